"""Clocks that jump: pure classes with a time that goes back and forth, a daemon with a mad wall clock."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
from broker_world import TIMED_OUT, World, gemm, key_of
from daemon_bench import Engine, Place, fakes, hello, plan, run

from prefetchd.broker.timers import Timers
from prefetchd.broker.types import Priority
from prefetchd.node.peers import Peer, Peers
from prefetchd.protocol import Answer as DaemonAnswer
from prefetchd.protocol import KeyName, Query, Settled, State
from prefetchd.protocol import Priority as Urgency

__all__ = ["fakes"]

HOUR = 3600.0
DECADE = 10 * 365 * 24 * HOUR


@pytest.mark.parametrize("jump", [-HOUR, HOUR, -DECADE, DECADE])
def test_what_was_planned_before_a_jump_is_published_after_it(jump: float) -> None:
    world = World()
    world.attach("r0")
    world.plan("r0", gemm(1), deadline=world.now + 1)
    world.now += jump
    world.plan("r0", gemm(64))
    world.broker.tick(world.now)
    world.settle()

    assert [world.state("r0", gemm(m)) for m in (1, 64)] == ["published", "published"]
    assert world.broker.drained


@pytest.mark.parametrize("jump", [-HOUR, HOUR, -DECADE, DECADE])
def test_waiter_is_answered_by_its_limit_after_the_jump(jump: float) -> None:
    world = World()
    world.attach("r0")
    world.to_compile("r0", gemm(1))
    world.broker.query("r0", "token", [key_of(1)], world.now, world.now + 2)
    world.look()
    assert world.next_compile() is not None
    begun = world.now
    world.now += jump
    # The caller's clock goes on from wherever it is; the limit comes when it reaches that moment.
    for _ in range(3):
        due = world.broker.tick(world.now)
        if world.take_answers():
            break
        world.now = max(world.now, due)

    assert [answer.token for answer in world.answers] == ["token"]
    assert world.now <= max(begun + 2, begun + jump)


@pytest.mark.parametrize("jump", [-HOUR, HOUR, -DECADE, DECADE])
def test_retry_and_an_engines_announcement_end_after_the_jump(jump: float) -> None:
    world = World()
    world.attach("r0")
    world.to_compile("r0", gemm(1), gemm(64))
    world.compile(TIMED_OUT)
    world.broker.engine_began("r0", key_of(128), world.now)
    world.now += jump
    for _ in range(10):
        due = world.broker.tick(world.now)
        world.settle()
        if due == float("inf"):
            break
        world.now = max(world.now, due)

    assert [world.state("r0", gemm(m)) for m in (1, 64)] == ["published", "published"]
    stats = world.broker.stats()
    assert (stats.engines_compiling, stats.drained) == (0, True)


def test_broker_settles_whatever_its_clock_does_meanwhile() -> None:
    chance = random.Random(7)
    world = World()
    for rank in range(4):
        world.attach(f"r{rank}")
    for number in range(200):
        world.now += chance.choice((-HOUR, -1.0, 0.0, 1.0, HOUR))
        deadline = chance.choice((None, world.now + chance.choice((-1.0, 1.0, HOUR))))
        world.plan(
            f"r{number % 4}", gemm(4 * number + 1), priority=chance.choice(list(Priority)), deadline=deadline
        )
        world.broker.query(f"r{number % 4}", number, [key_of(4 * number)], world.now, world.now + 1)
        world.broker.tick(world.now)
        if number % 5 == 0:
            world.trace()
            world.look()
            work = world.next_compile()
            if work is not None:
                world.end(work)
    world.settle()
    world.now = max(world.now, 100.0) + 400 * HOUR
    world.broker.tick(world.now)
    world.settle()

    assert all(world.state(f"r{number % 4}", gemm(4 * number + 1)) == "published" for number in range(200))
    assert sorted(int(str(answer.token)) for answer in world.answers) == list(range(200))


def test_timer_set_before_a_jump_falls_due_once() -> None:
    timers: Timers[str] = Timers(lambda item, at: True)
    timers.push(100.0, "x")

    found = [timers.due(now) for now in (-DECADE, 99.0, DECADE, 0.0, DECADE)]

    assert found == [[], [], ["x"], [], []]


def test_no_peer_is_silent_because_the_clock_went_back() -> None:
    peers = Peers(limit=10)
    peer = Peer(b"1", local=True, hello=hello(), now=1000.0)
    peers.add(peer)

    assert peers.silent(60.0, 1000.0 - HOUR) == []
    peers.heard(peer, 1000.0 - HOUR)
    assert peers.silent(60.0, 1000.0 - HOUR + 61) == [peer]


@pytest.mark.usefixtures("fakes")
def test_daemon_serves_under_a_wall_clock_that_jumps_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    jumps = itertools.cycle((0.0, DECADE, -DECADE, HOUR, -HOUR))
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + next(jumps))

    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1, 2, 3))
            assert (await engine.next(Settled)).plans == (1,)
            keys = (KeyName("shell", "key1"), KeyName("shell", "never"))
            await engine.send(Query(id=5, keys=keys, priority=Urgency.URGENT, deadline_s=0.05))
            assert (await engine.next(DaemonAnswer)).keys == (State.PUBLISHED, State.UNKNOWN)
            engine.close()

    run(scenario())
    assert place.leftovers() == []
