"""What the broker does first: priorities, deadlines, turns among ranks, and the universe last."""

from __future__ import annotations

import pytest
from broker_world import COMPILER, PROVIDER, World, gemm, gemms, key_of

from prefetchd.broker.types import Priority, Slots
from prefetchd.compilers.base import Job


@pytest.fixture
def world() -> World:
    """One rank, attached."""
    world = World()
    world.attach("r0")
    return world


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


def test_batches_that_never_cease_do_not_keep_the_universe_from_being_traced() -> None:
    world = World(max_batch=1)
    world.attach("r0")
    world.broker.add_universe("r0", PROVIDER, [gemms(1, 64), gemms(1, 64, n=256)], world.now)
    seen: list[Priority] = []

    for m in range(100, 110):
        world.plan("r0", gemm(m), gemm(m + 100))
        order = world.broker.next_trace("group", world.now)
        assert order is not None
        seen.append(order.priority)
        world.broker.traced(order.id, world.report(order), world.now)

    batch, universe = Priority.BATCH, Priority.UNIVERSE
    assert seen == [batch, batch, universe, batch, batch, universe, batch, batch, batch, batch]


def test_what_is_urgent_goes_before_the_universes_turn() -> None:
    world = World(max_batch=1)
    world.attach("r0")
    world.broker.add_universe("r0", PROVIDER, [gemms(1, 64)], world.now)
    world.plan("r0", gemm(100), gemm(200))
    for _ in range(2):
        assert world.broker.next_trace("group", world.now) is not None
    world.plan("r0", gemm(300), priority=Priority.URGENT)

    first = world.broker.next_trace("group", world.now)
    second = world.broker.next_trace("group", world.now)

    assert first is not None
    assert second is not None
    assert (first.priority, second.priority) == (Priority.URGENT, Priority.UNIVERSE)


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


def test_a_settled_sweep_answers_for_its_requests_after_another_rank_came(world: World) -> None:
    world.plan("r0", gemms(1, 64), priority=Priority.UNIVERSE)
    world.settle()
    # What was settled is in doubt then, and nobody asks for the sweep again.
    world.attach("r1", "/other")

    world.plan("r0", gemm(17))

    assert world.trace() == []
    assert world.state("r0", gemm(17)) == "published"


def test_a_sweep_that_lost_a_variant_answers_for_its_requests_once_it_is_back(
    world: World,
) -> None:
    world.plan("r0", gemms(1, 64), priority=Priority.UNIVERSE)
    world.settle()
    world.disk.remove((key_of(17), "/cache"))
    world.broker.query("r0", "token", [key_of(17)], world.now)
    world.look()

    world.plan("r0", gemm(17))

    assert world.state("r0", gemm(17)) == "queued"
    world.settle()
    world.plan("r0", gemm(18))
    assert world.trace() == []
    assert world.state("r0", gemm(18)) == "published"


def test_a_request_inside_a_sweep_that_is_still_open_is_traced_alone_and_goes_first(world: World) -> None:
    world.to_compile("r0", gemms(1, 64), priority=Priority.UNIVERSE)

    world.to_compile("r0", gemm(33))

    work = world.next_compile()
    assert work is not None
    assert (work.job.key, work.priority) == (key_of(33)[1], Priority.BATCH)
