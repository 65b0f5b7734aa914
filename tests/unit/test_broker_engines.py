"""What engines do and ask: waits, inline compiles, and the figures of each rank."""

from __future__ import annotations

import pytest
from broker_world import COMPILE_ERROR, COMPILER, OK, PROVIDER, TIMED_OUT, World, gemm, key_of

from prefetchd.broker.engine_compiles import ENGINE_LIMIT_S
from prefetchd.broker.types import Answer, Counts, KeyStatus, Priority
from prefetchd.broker.waiters import DISK_LIMIT_S

KEY = key_of(1)


@pytest.fixture
def world() -> World:
    """One rank, attached."""
    world = World()
    world.attach("r0")
    return world


def counts(world: World, rank: str = "r0") -> Counts:
    return world.broker.stats().ranks[rank][COMPILER]


def answer(world: World) -> Answer:
    (found,) = world.take_answers()
    return found


def states(found: Answer) -> list[str]:
    return [status.state for status in found.keys]


def test_query_of_a_key_nobody_planned_is_answered_at_once(world: World) -> None:
    world.broker.query("r0", 1, [KEY], world.now, until=world.now + 5)

    assert answer(world).keys == (KeyStatus(*KEY, "unknown"),)


def test_query_of_an_unknown_rank_is_answered(world: World) -> None:
    world.broker.query("nobody", 1, [KEY], world.now, until=world.now + 5)

    assert states(answer(world)) == ["unknown"]


def test_wait_ends_when_the_key_is_published(world: World) -> None:
    world.to_compile("r0", gemm(1), gemm(65))
    work = world.next_compile()
    assert work is not None
    world.broker.query("r0", 1, [(COMPILER, work.job.key)], world.now, until=world.now + 5)
    world.look()
    assert world.take_answers() == []

    world.now += 2
    world.end(work)

    found = answer(world)
    assert states(found) == ["published"]
    assert not found.timed_out
    assert counts(world).wait_seconds == 2


def test_wait_ends_when_the_key_fails_even_if_it_will_be_retried(world: World) -> None:
    world.to_compile("r0", gemm(1))
    work = world.next_compile()
    assert work is not None
    world.broker.query("r0", 1, [KEY], world.now, until=world.now + 5)
    world.look()

    world.end(work, TIMED_OUT)

    assert answer(world).keys == (KeyStatus(*KEY, "failed", TIMED_OUT.text),)


def test_wait_ends_at_its_limit_and_says_what_is(world: World) -> None:
    world.to_compile("r0", gemm(1))
    world.next_compile()
    world.broker.query("r0", 1, [KEY], world.now, until=world.now + 5)
    world.look()

    world.now = world.broker.tick(world.now)
    world.broker.tick(world.now)

    found = answer(world)
    assert found.timed_out
    assert states(found) == ["compiling"]


def test_wait_makes_a_key_urgent_for_as_long_as_it_waits(world: World) -> None:
    world.to_compile("r0", gemm(1), priority=Priority.UNIVERSE)
    world.broker.query("r0", 1, [KEY], world.now, until=world.now + 5)
    world.look()
    assert world.broker.stats().job_depth["urgent"] == 1

    world.now += 6
    world.broker.tick(world.now)

    assert world.broker.stats().job_depth == {"urgent": 0, "batch": 0, "replay": 0, "universe": 1}


def test_key_named_twice_in_a_query_is_asked_for_once(world: World) -> None:
    world.to_compile("r0", gemm(1), priority=Priority.UNIVERSE)
    world.broker.query("r0", 1, [KEY, KEY], world.now, until=world.now + 5)
    world.look()

    world.now += 6
    world.broker.tick(world.now)

    assert states(answer(world)) == ["missing", "missing"]
    assert world.broker.stats().job_depth["urgent"] == 0


def test_wait_of_a_rank_with_another_root_gets_the_artifact_published_there() -> None:
    world = World()
    world.attach("r0", "/a")
    world.attach("r1", "/b")
    world.to_compile("r0", gemm(1))
    world.broker.query("r1", 1, [KEY], world.now, until=world.now + 5)

    world.settle()

    assert states(world.answers[0]) == ["published"]
    assert (KEY, "/b") in world.disk


def test_wait_of_a_rank_that_leaves_is_answered(world: World) -> None:
    world.to_compile("r0", gemm(1))
    world.broker.query("r0", 1, [KEY], world.now, until=world.now + 5)

    world.broker.detach("r0", 1, world.now)

    assert answer(world).token == 1


def test_query_without_wait_looks_at_the_disk_again(world: World) -> None:
    world.plan("r0", gemm(1))
    world.settle()
    world.disk.clear()
    world.broker.query("r0", 1, [KEY], world.now)
    assert world.take_answers() == []

    world.look()

    assert states(answer(world)) == ["missing"]
    world.settle()
    assert (KEY, "/cache") in world.disk


def test_query_is_answered_though_the_disk_is_silent(world: World) -> None:
    world.plan("r0", gemm(1))
    world.settle()
    world.broker.query("r0", 1, [KEY], world.now)

    world.broker.tick(world.now + DISK_LIMIT_S)

    assert states(answer(world)) == ["published"]


def test_too_many_waiters_are_answered_at_once() -> None:
    world = World(max_waiters=2)
    world.attach("r0")
    world.to_compile("r0", gemm(1))
    for token in range(5):
        world.broker.query("r0", token, [KEY], world.now, until=world.now + 5)

    assert [found.token for found in world.take_answers()] == [2, 3, 4]
    assert world.broker.stats().waiting == 2


def test_key_that_an_engine_compiles_is_left_to_it_and_then_served_to_others() -> None:
    world = World()
    world.attach("r0", "/a")
    world.attach("r1", "/b")
    world.to_compile("r0", gemm(1))
    world.to_compile("r1", gemm(1))

    world.broker.engine_began("r0", KEY, world.now)
    assert world.next_compile() is None
    world.disk.add((KEY, "/a"))
    world.broker.engine_ended("r0", KEY, 3.0, world.now + 3)
    world.settle()

    assert world.compiles == []
    assert (KEY, "/b") in world.disk


@pytest.mark.parametrize("ending", ["failed", "left", "silent"])
def test_key_that_an_engine_did_not_finish_is_compiled_here(ending: str) -> None:
    world = World()
    world.attach("r0")
    world.attach("r1")
    world.to_compile("r1", gemm(1))
    world.broker.engine_began("r0", KEY, world.now)
    assert world.next_compile() is None

    if ending == "failed":
        world.broker.engine_ended("r0", KEY, 3.0, world.now)
    elif ending == "left":
        world.broker.detach("r0", 1, world.now)
    else:
        world.now += ENGINE_LIMIT_S
        world.broker.tick(world.now)
    world.settle()

    assert len(world.compiles) == 1
    assert world.state("r1", gemm(1)) == "published"


def test_what_an_engine_uses_after_we_built_it_is_a_hit_and_not_wasted(world: World) -> None:
    world.plan("r0", gemm(1), gemm(65))
    world.settle()
    assert (counts(world).planned, counts(world).hits, counts(world).wasted) == (2, 0, 2)

    world.broker.engine_used("r0", KEY, world.now)
    world.broker.engine_used("r0", KEY, world.now)

    assert (counts(world).planned, counts(world).hits, counts(world).wasted) == (2, 1, 1)


def test_compile_of_a_planned_key_that_is_not_published_yet_is_late(world: World) -> None:
    world.to_compile("r0", gemm(1))

    world.broker.engine_ended("r0", KEY, 4.0, world.now)

    assert counts(world).late == 1
    assert counts(world).engine_compiles == {"late": 1}
    assert counts(world).engine_seconds == {"late": 4.0}


def test_compile_of_a_key_nobody_planned_is_unplanned(world: World) -> None:
    world.broker.engine_ended("r0", KEY, 4.0, world.now)

    assert counts(world).unplanned == 1
    assert counts(world).engine_compiles == {"unplanned": 1}


def test_compile_of_a_key_whose_request_is_still_to_be_traced_is_late_in_the_end(world: World) -> None:
    world.plan("r0", gemm(1))
    world.broker.engine_ended("r0", KEY, 4.0, world.now + 5)
    assert (counts(world).undecided, counts(world).engine_compiles) == (1, {})

    world.trace()

    assert counts(world).undecided == 0
    assert counts(world).engine_compiles == {"late": 1}
    assert counts(world).engine_seconds == {"late": 4.0}


def test_compile_before_its_request_was_planned_is_unplanned_in_the_end(world: World) -> None:
    world.broker.add_universe("r0", PROVIDER, iter([gemm(65)]), world.now)
    world.broker.engine_ended("r0", KEY, 4.0, world.now + 5)
    world.now += 10
    world.plan("r0", gemm(1))

    world.settle()

    assert counts(world).engine_compiles == {"unplanned": 1}
    assert (counts(world).unplanned, counts(world).late) == (1, 0)


def test_compile_of_a_failed_key_is_counted_so(world: World) -> None:
    world.to_compile("r0", gemm(1))
    world.compile(COMPILE_ERROR)

    world.broker.engine_ended("r0", KEY, 4.0, world.now)

    assert counts(world).engine_compiles == {"failed": 1}


def test_compile_of_a_key_that_is_published_is_a_mismatch(world: World) -> None:
    world.plan("r0", gemm(1))
    world.settle()

    world.broker.engine_ended("r0", KEY, 4.0, world.now + 5)

    assert counts(world).engine_compiles == {"mismatch": 1}
    assert counts(world).mismatch == 1


def test_compile_that_began_before_the_key_was_published_is_late_when_it_is_told_late(world: World) -> None:
    world.plan("r0", gemm(1))
    world.settle()

    world.broker.engine_began("r0", KEY, world.now + 1, ago=2.0)
    world.broker.engine_ended("r0", KEY, 2.0, world.now + 1)

    assert counts(world).engine_compiles == {"late": 1}
    assert counts(world).mismatch == 0


def test_compile_while_the_daemon_was_away_is_counted_so(world: World) -> None:
    world.broker.engine_ended("r0", KEY, 4.0, world.now, daemon_down=True)

    assert counts(world).engine_compiles == {"daemon_down": 1}


def test_an_engine_compile_without_an_end_is_visible(world: World) -> None:
    world.broker.engine_began("r0", KEY, world.now)

    assert world.broker.stats().engines_compiling == 1
    assert counts(world).engine_compiles == {"unplanned": 1}


def test_differing_fingerprint_fields_are_counted_by_name(world: World) -> None:
    world.broker.mismatch(COMPILER, "nvcc")
    world.broker.mismatch(COMPILER, "nvcc")

    assert world.broker.stats().mismatches == {f"{COMPILER} nvcc": 2}


def test_what_is_being_compiled_into_a_root_is_not_copied_there_as_well(world: World) -> None:
    world.attach("r1", "/other")
    world.to_compile("r1", gemm(1))
    work = world.next_compile()
    assert work is not None
    world.broker.engine_began("r0", KEY, world.now)
    world.disk.add((KEY, "/cache"))
    world.broker.engine_ended("r0", KEY, 4.0, world.now)
    world.look()

    copy = world.broker.next_publish(world.now)
    world.end(work)
    if copy is not None:
        world.broker.published(copy, OK, world.now)
    world.settle()

    assert world.broker.drained
    assert world.broker.stats().publishing == 0


def test_a_copy_is_made_after_all_where_the_compile_into_its_root_fails(world: World) -> None:
    world.attach("r1", "/other")
    world.to_compile("r1", gemm(1))
    work = world.next_compile()
    assert work is not None
    world.disk.add((KEY, "/cache"))
    world.broker.engine_ended("r0", KEY, 4.0, world.now)
    world.look()

    world.end(work, TIMED_OUT)

    assert [(copy.source, copy.root) for copy in world.publish()] == [("/cache", "/other")]
    world.settle()
    assert world.broker.drained
