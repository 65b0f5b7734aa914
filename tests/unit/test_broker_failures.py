"""What the broker makes of failures: tried again, remembered, told, and never in the way of others."""

from __future__ import annotations

import pytest
from broker_world import COMPILE_ERROR, MANY, TIMED_OUT, World, gemm, gemms, key_of

from prefetchd.broker.keys import MAX_RETRIES
from prefetchd.broker.tasks import MAX_CRASHES
from prefetchd.broker.types import End, KeyStatus
from prefetchd.trace import Failure


@pytest.fixture
def world() -> World:
    """One rank, attached."""
    world = World()
    world.attach("r0")
    return world


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


def test_a_sweep_of_which_something_failed_vouches_for_none_of_its_requests() -> None:
    world = World()
    world.attach("r0")
    world.to_compile("r0", gemms(1, 24))
    world.compile(COMPILE_ERROR)

    assert world.state("r0", gemms(1, 24)) == "failed"
    assert world.state("r0", gemm(3)) == "failed"


def test_a_failed_key_that_was_forgotten_is_not_said_to_be_there() -> None:
    world = World(max_keys=1)
    world.attach("r0")
    world.to_compile("r0", gemm(1))
    world.compile(COMPILE_ERROR)
    world.plan("r0", gemm(64))
    world.settle()

    assert world.state("r0", gemm(1)) == "failed"
    world.broker.retry("r0", world.now)
    assert world.state("r0", gemm(1)) == "unknown"
    world.plan("r0", gemm(1))
    world.settle()
    assert world.state("r0", gemm(1)) == "published"
