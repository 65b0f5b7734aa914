from __future__ import annotations

import pytest
from broker_world import COMPILE_ERROR, COMPILER, MANY, PROVIDER, TIMED_OUT, World, gemm, gemms, key_of

from prefetchd.broker.keys import MAX_COPIES, MAX_RETRIES
from prefetchd.broker.tasks import MAX_CRASHES
from prefetchd.broker.types import End, KeyStatus, Priority, Slots
from prefetchd.compilers.base import Job
from prefetchd.trace import Failure


@pytest.fixture
def world() -> World:
    """One rank, attached."""
    world = World()
    world.attach("r0")
    return world


def job(number: int) -> Job:
    return Job(compiler=COMPILER, key=key_of(number)[1], payload=b"source")


def test_equal_requests_of_64_ranks_are_traced_once_and_compiled_once_a_key() -> None:
    world = World()
    batch = [gemm(m, n) for m in (1, 2, 65) for n in (128, 256)]
    for rank in range(64):
        world.attach(rank)
        world.plan(rank, *batch)

    world.settle()

    assert len(world.compiles) == len({work.job.key for work in world.compiles}) == 4
    assert set(world.traces.values()) == {1}
    assert all(world.state(rank, sweep) == "published" for rank in range(64) for sweep in batch)


def test_what_was_planned_and_published_costs_nothing_when_asked_again(world: World) -> None:
    world.plan("r0", gemm(1))
    world.settle()

    accepted = world.broker.plan("r0", PROVIDER, [gemm(1)], Priority.URGENT, world.now)

    assert accepted is not None
    assert (accepted.new, accepted.known) == (0, 1)
    assert world.broker.drained


def test_another_group_traces_for_itself_and_shares_the_compile(world: World) -> None:
    world.attach("r1", group="other")
    world.plan("r0", gemm(1))
    world.plan("r1", gemm(1))

    world.settle(("group", "other"))

    assert world.traces[gemm(1)] == 2
    assert len(world.compiles) == 1


def test_a_key_on_disk_is_a_hit_and_never_compiled(world: World) -> None:
    world.disk.add((key_of(1), "/cache"))
    world.plan("r0", gemm(1))

    world.settle()

    assert world.compiles == []
    assert world.broker.stats().ranks["r0"][COMPILER].hits == 1


def test_one_compile_is_published_into_every_root_of_the_ranks_that_asked() -> None:
    world = World()
    world.attach("r0", "/a")
    world.attach("r1", "/b", "/c")
    world.attach("r2", "/not-asked")
    world.plan("r0", gemm(1))
    world.plan("r1", gemm(1))

    world.settle()

    assert len(world.compiles) == 1
    assert {root for key, root in world.disk if key == key_of(1)} == {"/a", "/b", "/c"}


def test_a_hello_with_a_changed_root_publishes_again_without_compiling(world: World) -> None:
    world.plan("r0", gemm(1), gemm(65))
    world.settle()
    compiled = len(world.compiles)

    world.attach("r0", "/moved")
    world.settle()

    assert len(world.compiles) == compiled
    assert {root for _, root in world.disk} == {"/cache", "/moved"}
    assert world.state("r0", gemm(1)) == "published"


def test_a_changed_root_in_the_middle_of_a_compile_gets_the_artifact_too(world: World) -> None:
    world.to_compile("r0", gemm(1))
    work = world.next_compile()
    assert work is not None

    world.attach("r0", "/moved")
    world.end(work)
    world.settle()

    assert (key_of(1), "/moved") in world.disk
    assert len(world.compiles) == 1


def test_what_somebody_deleted_is_made_again_after_a_hello(world: World) -> None:
    world.plan("r0", gemm(1))
    world.settle()
    world.disk.clear()

    world.attach("r0")
    world.settle()

    assert len(world.compiles) == 2
    assert (key_of(1), "/cache") in world.disk


def test_a_source_that_vanished_is_compiled_again_for_the_root_that_asks() -> None:
    world = World()
    world.attach("r0", "/a")
    world.plan("r0", gemm(1))
    world.settle()
    world.attach("r1", "/b")
    world.plan("r1", gemm(1))
    world.look()
    work = world.broker.next_publish(world.now)
    assert work is not None
    world.disk.clear()

    world.broker.published(work, End(ok=False, source_gone=True), world.now)
    world.settle()

    assert (key_of(1), "/b") in world.disk


def test_better_priorities_go_first_whatever_came_first(world: World) -> None:
    order = [Priority.UNIVERSE, Priority.REPLAY, Priority.BATCH, Priority.URGENT]
    for number, priority in enumerate(order):
        world.plan("r0", gemm(64 * number + 1), priority=priority)

    traced = [each.priority for each in world.trace()]
    world.look()
    compiled = [work.priority for work in world.compile()]

    assert traced == compiled == sorted(order)


def test_only_urgent_work_runs_at_normal_niceness(world: World) -> None:
    world.to_compile("r0", gemm(1), priority=Priority.URGENT)
    world.to_compile("r0", gemm(65), priority=Priority.BATCH)

    assert [work.background for work in world.compile()] == [False, True]


def test_asking_again_at_a_better_priority_promotes_trace_and_job(world: World) -> None:
    world.plan("r0", gemm(1), gemm(65), priority=Priority.UNIVERSE)
    world.plan("r0", gemm(65), priority=Priority.BATCH)
    assert [sweep for order in world.trace() for sweep in order.sweeps] == [gemm(65), gemm(1)]
    world.look()

    world.plan("r0", gemm(1), priority=Priority.URGENT)

    assert [work.job.key for work in world.compile()] == [key_of(1)[1], key_of(65)[1]]


def test_a_worse_priority_never_demotes(world: World) -> None:
    world.plan("r0", gemm(1), priority=Priority.BATCH)
    world.plan("r0", gemm(1), priority=Priority.UNIVERSE)

    assert world.trace()[0].priority is Priority.BATCH


def test_ranks_take_turns_within_a_priority() -> None:
    world = World(max_batch=1)
    for rank in range(3):
        world.attach(rank)
    world.plan(0, *(gemm(64 * number + 1) for number in range(6)))
    world.plan(1, gemm(1, 256), gemm(65, 256))
    world.plan(2, gemm(1, 384), gemm(65, 384))

    widths = [order.sweeps[0].request.n for order in world.trace()]  # type: ignore[attr-defined]

    assert widths == [128, 256, 384, 128, 256, 384, 128, 128, 128, 128]


def test_a_batch_whose_deadline_passed_becomes_universe_and_is_not_lost(world: World) -> None:
    world.plan("r0", gemm(1), deadline=world.now + 1)
    assert world.broker.tick(world.now) == world.now + 1

    world.now += 2
    world.broker.tick(world.now)

    assert world.broker.stats().trace_depth["universe"] == 1
    assert world.broker.stats().demoted == 1
    world.settle()
    assert world.state("r0", gemm(1)) == "published"


def test_a_later_batch_that_wants_the_same_puts_the_deadline_off(world: World) -> None:
    world.plan("r0", gemm(1), deadline=world.now + 1)
    world.plan("r0", gemm(1), deadline=world.now + 5)

    world.now += 2
    world.broker.tick(world.now)
    assert world.broker.stats().trace_depth["batch"] == 1
    world.now += 4
    world.broker.tick(world.now)

    assert world.broker.stats().trace_depth["batch"] == 0


def test_a_deadline_demotes_jobs_that_are_traced_already(world: World) -> None:
    world.plan("r0", gemm(1), deadline=world.now + 1)
    world.trace()
    world.look()

    world.now += 2
    world.broker.tick(world.now)

    assert world.broker.stats().job_depth == {"urgent": 0, "batch": 0, "replay": 0, "universe": 1}


def test_background_compiles_leave_a_slot_to_what_is_scheduled(world: World) -> None:
    world.to_compile("r0", *(gemm(64 * number + 1) for number in range(3)), priority=Priority.UNIVERSE)
    assert world.next_compile(Slots(2, 2)) is not None
    assert world.next_compile(Slots(1, 2)) is None

    world.to_compile("r0", gemm(65), priority=Priority.BATCH)

    work = world.next_compile(Slots(1, 2))
    assert work is not None
    assert work.job.key == key_of(65)[1]


def test_a_single_slot_serves_background_work_too(world: World) -> None:
    world.to_compile("r0", gemm(1), priority=Priority.UNIVERSE)

    assert world.next_compile(Slots(1, 1)) is not None


def test_dearest_jobs_of_a_priority_go_first(world: World) -> None:
    jobs = [Job(compiler=COMPILER, key=f"k{cost}", payload=b"", cost=cost) for cost in (1.0, 9.0, 4.0)]
    world.broker.plan_jobs("r0", jobs, Priority.REPLAY, world.now)
    world.look()

    assert [work.job.cost for work in world.compile()] == [9.0, 4.0, 1.0]


def test_universe_is_pulled_only_when_nothing_better_is_left_to_trace(world: World) -> None:
    pulled = []

    def universe() -> object:
        for number in range(3):
            pulled.append(number)
            yield gemms(1, 8, 128 * (number + 1))

    world.broker.add_universe("r0", PROVIDER, universe(), world.now)  # type: ignore[arg-type]
    world.plan("r0", gemm(1))

    first = world.broker.next_trace("group", world.now)
    assert first is not None
    assert pulled == []
    world.broker.traced(first.id, world.report(first), world.now)
    assert not world.broker.drained
    world.settle()
    assert pulled == [0, 1, 2]
    assert world.broker.drained


def test_a_universe_that_ends_with_an_error_says_so_and_the_rest_goes_on(world: World) -> None:
    def universe() -> object:
        yield gemms(1, 8)
        raise ValueError("site q_proj: n must be positive")

    world.broker.add_universe("r0", PROVIDER, universe(), world.now)  # type: ignore[arg-type]
    world.settle()

    assert world.broker.drained
    assert world.state("r0", gemms(1, 8)) == "published"
    assert "site q_proj" in world.broker.stats().problems[0]


def test_a_request_inside_a_published_sweep_needs_no_trace_of_its_own(world: World) -> None:
    world.plan("r0", gemms(1, 64), priority=Priority.UNIVERSE)
    world.settle()

    world.plan("r0", gemm(17))

    assert world.broker.drained
    assert world.state("r0", gemm(17)) == "published"


def test_a_request_inside_a_sweep_that_is_still_open_is_traced_alone_and_goes_first(world: World) -> None:
    world.to_compile("r0", gemms(1, 64), priority=Priority.UNIVERSE)

    world.to_compile("r0", gemm(33))

    work = world.next_compile()
    assert work is not None
    assert (work.job.key, work.priority) == (key_of(33)[1], Priority.BATCH)


def test_retryable_failures_are_tried_again_with_growing_pauses_and_then_stay(world: World) -> None:
    world.to_compile("r0", gemm(1))
    pauses = []
    for _ in range(MAX_RETRIES):
        world.compile(TIMED_OUT)
        assert world.next_compile() is None
        due = world.broker.tick(world.now)
        pauses.append(due - world.now)
        world.now = due
    world.compile(TIMED_OUT)
    world.now += 1e6

    assert world.next_compile() is None
    assert len(world.compiles) == 1 + MAX_RETRIES
    assert pauses == sorted(set(pauses))
    assert world.state("r0", gemm(1)) == "failed"
    assert world.broker.drained


def test_a_retry_that_ends_well_is_published(world: World) -> None:
    world.to_compile("r0", gemm(1))
    world.compile(TIMED_OUT)
    world.now += 1000.0

    world.compile()

    assert world.state("r0", gemm(1)) == "published"
    assert world.broker.stats().failed_keys == 0


def test_a_compile_error_stays_failed_for_whoever_asks_in_the_group(world: World) -> None:
    world.to_compile("r0", gemm(1))
    world.compile(COMPILE_ERROR)
    world.attach("r1")

    world.to_compile("r1", gemm(2))
    world.now += 1e6
    world.broker.tick(world.now)

    assert world.next_compile() is None
    status = KeyStatus(*key_of(2), "failed", COMPILE_ERROR.text)
    assert world.broker.key_status("r1", key_of(2)) == status


def test_another_fingerprint_tries_a_failed_key_again(world: World) -> None:
    world.to_compile("r0", gemm(1))
    world.compile(COMPILE_ERROR)
    world.attach("r1", group="other")
    world.plan("r1", gemm(1))

    world.settle(("other",))

    assert world.state("r1", gemm(1)) == "published"


@pytest.mark.parametrize("named", [True, False])
def test_a_retry_that_somebody_asks_for_compiles_again(world: World, named: bool) -> None:
    world.to_compile("r0", gemm(1))
    world.compile(COMPILE_ERROR)

    world.broker.retry("r0", world.now, [key_of(1)] if named else [])
    world.settle()

    assert world.state("r0", gemm(1)) == "published"


def test_requests_that_could_not_be_traced_are_uncovered_until_a_retry(world: World) -> None:
    failure = Failure(request="fp8_gemm_nt m=1", kind="unavailable", text="no such entry point")
    world.failures[gemm(1)] = (failure,)
    world.keys_of = lambda sweep: []
    world.plan("r0", gemm(1))
    world.settle()
    assert world.state("r0", gemm(1)) == "uncovered"
    assert "no such entry point" in world.broker.stats().problems[0]
    world.plan("r0", gemm(1))
    assert world.trace() == []

    world.failures.clear()
    world.broker.retry("r0", world.now)
    world.settle()

    assert world.traces[gemm(1)] == 2
    assert world.state("r0", gemm(1)) == "published"


def test_dead_helper_gives_its_tasks_back_until_too_many_died(world: World) -> None:
    world.plan("r0", gemm(1))
    for _ in range(MAX_CRASHES):
        order = world.broker.next_trace("group", world.now)
        assert order is not None
        world.broker.trace_lost(order.id, "killed by SIGKILL", world.now)

    assert world.broker.next_trace("group", world.now) is None
    assert world.state("r0", gemm(1)) == "uncovered"
    assert "killed by SIGKILL" in world.broker.stats().problems[0]
    assert world.broker.drained


def test_late_report_of_a_lost_task_is_ignored(world: World) -> None:
    world.plan("r0", gemm(1))
    order = world.broker.next_trace("group", world.now)
    assert order is not None
    world.broker.trace_lost(order.id, "no heartbeat", world.now)
    again = world.broker.next_trace("group", world.now)
    assert again is not None
    world.broker.traced(again.id, world.report(again), world.now)

    world.broker.traced(again.id, world.report(again), world.now)
    world.settle()

    assert world.state("r0", gemm(1)) == "published"
    assert len(world.compiles) == 1


def test_a_rank_that_leaves_takes_its_wants_and_no_others() -> None:
    world = World(max_batch=1)
    world.attach("r0")
    world.attach("r1")
    world.to_compile("r0", gemm(1), gemm(65))
    world.plan("r0", gemm(129))
    world.to_compile("r1", gemm(1))

    world.broker.detach("r0", 1, world.now)

    assert world.trace() == []
    assert [work.job.key for work in world.compile()] == [key_of(1)[1]]
    assert world.broker.drained


def test_an_older_generation_can_neither_attach_nor_detach(world: World) -> None:
    world.attach("r0", generation=3)

    assert not world.attach("r0", generation=2)
    world.broker.detach("r0", 2, world.now)

    assert world.broker.stats().attached == 1


def test_a_reattached_rank_starts_anew_and_finds_its_group_traced(world: World) -> None:
    for sweep in (gemm(1), gemm(65)):
        world.plan("r0", sweep)
        world.trace()
    world.attach("r0", generation=2)
    world.look()
    assert world.next_compile() is None

    world.plan("r0", gemm(1))
    world.settle()

    assert world.traces[gemm(1)] == 1
    assert [work.job.key for work in world.compiles] == [key_of(1)[1]]


def test_messages_of_unknown_ranks_change_nothing() -> None:
    world = World()

    assert world.broker.plan("nobody", PROVIDER, [gemm(1)], Priority.BATCH, world.now) is None
    assert world.broker.plan_jobs("nobody", [job(1)], Priority.BATCH, world.now) is None
    assert not world.broker.add_universe("nobody", PROVIDER, [gemm(1)], world.now)
    world.broker.engine_began("nobody", key_of(1), world.now)
    world.broker.engine_ended("nobody", key_of(1), 1.0, world.now)
    world.broker.engine_used("nobody", key_of(1), world.now)
    world.broker.retry("nobody", world.now)
    world.broker.detach("nobody", 1, world.now)

    assert world.broker.stats().known_keys == 0
    assert world.broker.drained


def test_an_end_nobody_waits_for_is_ignored(world: World) -> None:
    world.to_compile("r0", gemm(1))
    work = world.next_compile()
    assert work is not None
    world.end(work)

    world.end(work, COMPILE_ERROR)

    assert world.state("r0", gemm(1)) == "published"
    assert world.broker.stats().compiling == 0


def test_jobs_of_a_log_need_no_trace_and_are_compiled_once(world: World) -> None:
    accepted = world.broker.plan_jobs("r0", [job(1), job(2), job(65)], Priority.REPLAY, world.now)
    world.settle()

    assert accepted is not None
    assert (accepted.new, accepted.known) == (2, 1)
    assert len(world.compiles) == 2
    assert not world.traces


def test_a_full_group_refuses_and_says_so() -> None:
    world = World(max_tasks=4)
    world.attach("r0")
    asked = [gemm(64 * number + 1) for number in range(6)]

    accepted = world.broker.plan("r0", PROVIDER, asked, Priority.BATCH, world.now)

    assert accepted is not None
    assert (accepted.new, accepted.refused) == (4, 2)
    world.settle()
    world.plan("r0", *asked[4:])
    world.settle()
    assert world.broker.stats().requests == 4
    assert world.state("r0", asked[5]) == "published"


def test_known_keys_and_failures_stay_within_their_limits() -> None:
    world = World(max_keys=50, max_failures=10)
    world.attach("r0")
    for number in range(200):
        world.to_compile("r0", gemm(64 * number + 1))
        world.compile(COMPILE_ERROR if number % 2 else End(ok=True))

    stats = world.broker.stats()
    assert stats.known_keys == 50
    assert stats.failed_keys == 10
    assert stats.drained


def test_roots_that_nobody_uses_any_more_are_forgotten(world: World) -> None:
    world.plan("r0", gemm(1))
    world.settle()
    compiled = len(world.compiles)

    for number in range(2 * MAX_COPIES):
        world.attach("r0", f"/moved-{number}")
        world.settle()

    (key,) = world.broker._keys.all()
    assert len(key.copies) <= MAX_COPIES
    assert len(world.compiles) == compiled
    assert world.state("r0", gemm(1)) == "published"


def test_open_keys_are_never_dropped_to_keep_a_limit() -> None:
    world = World(max_keys=5)
    world.attach("r0")
    world.to_compile("r0", *(gemm(64 * number + 1) for number in range(20)))

    assert len(world.compile()) == 20
    assert world.broker.drained


def test_figures_of_ranks_long_gone_are_forgotten_and_their_place_is_reused() -> None:
    world = World(max_ranks=2)
    world.attach("old")
    world.plan("old", gemm(1))
    world.settle()
    world.broker.detach("old", 1, world.now)
    world.attach("r1")
    world.attach("r2")

    world.plan("r2", gemm(1))
    world.settle()

    stats = world.broker.stats()
    assert set(stats.ranks) == {"r1", "r2"}
    assert stats.ranks["r2"][COMPILER].planned == stats.ranks["r2"][COMPILER].hits == 1
    assert not world.attach("r3")


def test_nothing_is_compiled_before_every_root_was_looked_at() -> None:
    world = World()
    world.attach("r0", "/a")
    world.attach("r1", "/b")
    world.disk.add((key_of(1), "/b"))
    world.plan("r0", gemm(1))
    world.plan("r1", gemm(1))
    world.trace()
    first, second = world.broker.next_checks(2)
    world.broker.checked(first, False, world.now)
    assert world.next_compile() is None

    world.broker.checked(second, True, world.now)
    world.settle()

    assert world.compiles == []
    assert (key_of(1), "/a") in world.disk


def test_a_publish_that_met_a_full_disk_is_tried_again() -> None:
    world = World()
    world.attach("r0", "/a")
    world.attach("r1", "/b")
    world.plan("r0", gemm(1))
    world.plan("r1", gemm(1))
    world.trace()
    world.look()
    world.compile()
    world.publish(End(ok=False, text="no space left for /b", retryable=True))
    assert world.publish() == []

    world.now = world.broker.tick(world.now)

    assert len(world.publish()) == 1
    assert world.broker.drained


def test_a_publish_that_fails_for_good_leaves_the_other_roots_alone() -> None:
    world = World()
    world.attach("r0", "/a")
    world.attach("r1", "/read-only")
    world.plan("r0", gemm(1))
    world.plan("r1", gemm(1))
    world.trace()
    world.look()
    world.compile()
    (work,) = world.publish(End(ok=False, text="/read-only: read-only file system"))

    states = {work.source: "published", work.root: "failed"}

    assert {world.state("r0", gemm(1)), world.state("r1", gemm(1))} == set(states.values())
    assert world.broker.drained


def test_a_compiler_without_a_root_for_the_rank_is_uncovered_and_not_compiled(world: World) -> None:
    world.keys_of = lambda sweep: [("triton", "key")]
    world.plan("r0", gemm(1))

    world.settle()

    assert world.compiles == []
    assert world.state("r0", gemm(1)) == "uncovered"
    assert world.broker.next_compile(MANY, world.now) is None
