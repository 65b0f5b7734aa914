"""Why an engine compiled: late though only its compiler was seen, and no daemon was there to ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from broker_world import COMPILER, World, gemm, key_of
from daemon_bench import Engine, FakeHelper, Place, ShellCompiler, eventually, fakes, plan, run
from fake_daemon import FakeDaemon, until

from prefetchd.broker.types import Counts
from prefetchd.client import Client
from prefetchd.compilers.base import Job
from prefetchd.protocol import Event, Settled, Stats, StatsQuery

__all__ = ["fakes"]

KEY = key_of(1)
# The same compile by what its compiler was given.
DIGEST = (COMPILER, "digest:d")


@pytest.fixture
def world() -> World:
    """One rank, attached."""
    world = World()
    world.attach("r0")
    return world


def counts(world: World) -> Counts:
    return world.broker.stats().ranks["r0"][COMPILER]


def test_compile_seen_without_its_key_is_late_once_a_trace_names_it(world: World) -> None:
    world.plan("r0", gemm(1))
    world.broker.engine_ended("r0", DIGEST, 4.0, world.now + 5)
    assert counts(world).undecided == 1

    world.broker.engine_named(DIGEST, KEY, world.now + 6)
    world.trace()

    assert (counts(world).late, counts(world).unplanned, counts(world).undecided) == (1, 0, 0)
    assert counts(world).engine_compiles == {"late": 1}
    assert counts(world).engine_seconds == {"late": 4.0}


def test_compile_that_nobody_planned_stays_unplanned_whatever_it_is_called(world: World) -> None:
    world.broker.engine_ended("r0", DIGEST, 4.0, world.now)

    world.broker.engine_named(DIGEST, KEY, world.now)
    world.plan("r0", gemm(1))
    world.trace()

    assert counts(world).engine_compiles == {"unplanned": 1}


def test_key_that_an_engine_compiles_under_another_name_is_not_compiled_beside_it(world: World) -> None:
    world.plan("r0", gemm(1))
    world.broker.engine_began("r0", DIGEST, world.now)
    world.broker.engine_named(DIGEST, KEY, world.now)
    world.trace()
    world.look()

    assert world.compile() == []
    world.broker.engine_ended("r0", KEY, 2.0, world.now + 2)
    world.disk.add((KEY, "/cache"))
    world.settle()
    assert world.compiles == []
    assert counts(world).engine_compiles == {"late": 1}
    assert world.broker.drained


def test_name_that_no_engine_used_changes_nothing(world: World) -> None:
    world.broker.engine_named(DIGEST, KEY, world.now)

    assert world.broker.stats().known_keys == 0


@pytest.mark.usefixtures("fakes")
def test_daemon_joins_a_digest_with_the_key_of_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(_: ShellCompiler, job: Job) -> str:
        return f"of {job.key}"

    monkeypatch.setattr(ShellCompiler, "digest", digest, raising=False)
    monkeypatch.setattr(FakeHelper, "refuse", "not yet")
    place = Place(tmp_path)

    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await engine.send(Event(what="started", compiler="shell", digest="of key1"))
            await engine.send(Event(what="ended", compiler="shell", digest="of key1", seconds=2.0))
            await eventually(lambda: daemon._node.received["Event"] == 2)
            monkeypatch.setattr(FakeHelper, "refuse", "")
            await engine.next(Settled)
            await engine.send(StatsQuery(id=1))
            figures = (await engine.next(Stats)).figures
            assert figures["prefetchd_late_total{compiler=shell}"] == 1
            assert figures["prefetchd_engine_compiles_total{compiler=shell,reason=late}"] == 1
            assert figures.get("prefetchd_unplanned_total{compiler=shell}", 0) == 0
            engine.close()

    run(scenario())


@pytest.mark.usefixtures("fakes")
def test_daemon_counts_a_compile_that_happened_without_it(tmp_path: Path) -> None:
    place = Place(tmp_path)

    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.attach(place.root())
            event = Event(what="ended", compiler="shell", key="k", seconds=2.0, daemon_down=True)
            await engine.send(event)
            await engine.send(StatsQuery(id=1))
            figures = (await engine.next(Stats)).figures
            name = "prefetchd_engine_compile_seconds_total{compiler=shell,reason=daemon_down}"
            assert figures[name] == 2.0
            engine.close()

    run(scenario())


def compile_event(what: str, key: str) -> Event:
    return Event(what=what, compiler="triton", key=key)  # type: ignore[arg-type]


def test_client_marks_compiles_for_which_no_daemon_was_there(
    clients: Callable[..., Client], address: str
) -> None:
    client = clients()
    assert client.event(compile_event("started", "before"))
    assert client.event(compile_event("hit", "before"))

    daemon = FakeDaemon(address)
    told = [daemon.next(Event), daemon.next(Event)]
    until(lambda: client.stats().get("connected"))
    client.event(compile_event("ended", "after"))
    told.append(daemon.next(Event))
    daemon.close()
    until(lambda: not client.stats().get("connected"))
    client.event(compile_event("ended", "again"))
    second = FakeDaemon(address, instance="second")
    told.append(second.next(Event))
    second.close()

    assert [(event.what, event.daemon_down) for event in told] == [
        ("started", True),
        ("hit", False),
        ("ended", False),
        ("ended", True),
    ]
