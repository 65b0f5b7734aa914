"""The broker from a plan to the file: one trace and one compile for all who ask, in every root they use."""

from __future__ import annotations

import pytest
from broker_world import COMPILE_ERROR, COMPILER, PROVIDER, World, gemm, key_of

from prefetchd.broker.keys import MAX_COPIES
from prefetchd.broker.types import End, Priority
from prefetchd.compilers.base import Job


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
