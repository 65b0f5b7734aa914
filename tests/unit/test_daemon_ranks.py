"""Engines of one daemon come, fall silent, come back, and share or own their helpers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_bench import Clock, Engine, FakeHelper, Place, eventually, fakes, figures, hello, plan, run

from prefetchd.daemon import Daemon
from prefetchd.protocol import Goodbye, Heartbeat, HeartbeatAnswer, HelloWanted, Settled

__all__ = ["fakes"]

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def is_there(daemon: Daemon, rank: str) -> bool:
    """Whether the rank's connection is open, as the daemon finds out when an engine of that name comes."""
    node = daemon._node
    peer = node.peers.of_rank(rank)
    return peer is not None and node.send(peer, HeartbeatAnswer(sequence=0, instance=node.instance))


def test_silent_engine_is_detached_and_comes_back_by_itself(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            clock = Clock(daemon._node)
            clock.ahead(61.0)
            daemon._keep_house(daemon._node.clock(), late=False)
            assert not daemon._node.peers.ranks()
            await engine.send(Heartbeat(sequence=1))
            await engine.next(HelloWanted)
            await engine.attach(place.root())
            assert list(daemon._node.peers.ranks()) == ["test/0"]
            engine.close()

    run(scenario())


def test_daemon_that_was_stopped_hears_its_peers_before_it_judges_them(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            clock = Clock(daemon._node)
            clock.ahead(600.0)
            daemon._keep_house(daemon._node.clock(), late=True)
            assert list(daemon._node.peers.ranks()) == ["test/0"]
            engine.close()

    run(scenario())


def test_engine_that_is_gone_is_noticed_by_a_probe(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            # As a killed process: the socket closes without a goodbye.
            engine.close()

            def gone() -> bool:
                Clock(daemon._node).ahead(4.0)
                daemon._keep_house(daemon._node.clock(), late=False)
                return not daemon._node.peers.ranks()

            await eventually(gone)

    run(scenario())


def test_restarted_engine_has_its_name_and_figures_back(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            first = Engine(place.address)
            await first.attach(place.root(), generation="a")
            await first.send(plan(1, 1))
            await first.next(Settled)
            first.close()
            await eventually(lambda: not is_there(daemon, "test/0"))
            second = Engine(place.address)
            await second.attach(place.root(), generation="b")
            assert list(daemon._node.peers.ranks()) == ["test/0"]
            await second.send(plan(1, 1))
            await second.next(Settled)
            assert daemon._node.broker.stats().compiled == 1
            second.close()

    run(scenario())


def test_two_engines_that_call_themselves_alike_are_told_apart(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            one, two = Engine(place.address), Engine(place.address)
            await one.attach(place.root(), generation="a")
            await two.attach(place.root(), generation="b")
            assert list(daemon._node.peers.ranks()) == ["test/0", "test/0#2"]
            for engine in (one, two):
                await engine.send(plan(1, 1))
                await engine.next(Settled)
                engine.close()

    run(scenario())


def test_same_process_on_a_new_connection_goes_on_as_the_same_rank(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            one, two = Engine(place.address), Engine(place.address)
            await one.attach(place.root())
            await two.attach(place.root())
            assert list(daemon._node.peers.ranks()) == ["test/0"]
            await two.send(plan(1, 1))
            await two.next(Settled)
            one.close()
            two.close()

    run(scenario())


def test_a_helper_for_every_rank_where_it_is_set(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving(helper_per_rank=True) as daemon:
            engines = [Engine(place.address) for _ in range(2)]
            for rank, engine in enumerate(engines):
                await engine.attach(place.root(), rank=rank, generation=f"g{rank}")
                await engine.send(plan(1, 1))
            for engine in engines:
                await engine.next(Settled)
                engine.close()
            assert len(daemon._node.groups.by_name) == len(FakeHelper.started) == 2
            assert daemon._node.broker.stats().compiled == 1

    run(scenario())


def test_helper_is_ended_when_its_engines_have_been_gone_for_a_while(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            await engine.send(Goodbye())
            await eventually(lambda: not daemon._node.peers.ranks())
            Clock(daemon._node).ahead(61.0)
            daemon._wake()
            await eventually(lambda: not daemon._node.groups.by_name)
            assert FakeHelper.started[0]._end.is_set()
            engine.close()

    run(scenario())


def test_heartbeats_are_answered_by_the_same_instance(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            welcome = await engine.attach(place.root())
            await engine.send(Heartbeat(sequence=5, figures={"dropped": 3}))
            answer = await engine.next(HeartbeatAnswer)
            assert (answer.sequence, answer.instance) == (5, welcome.instance)
            assert (await figures(engine))["prefetchd_clients{figure=dropped}"] == 3
            engine.close()

    run(scenario())


@pytest.fixture(autouse=True)
def _restored_affinity() -> Iterator[None]:
    cpus = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cpus)


def test_children_run_off_a_pinned_engines_cpus(place: Place) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs to keep one free")

    async def scenario() -> None:
        seen = place.directory / "cpus"
        FakeHelper.hook = f"taskset -cp $$ >{seen}"
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root(), cpus=(cpus[0],))
            daemon._keep_house(daemon._node.clock(), late=False)
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            assert str(cpus[0]) not in seen.read_text().rpartition(":")[2].replace(",", " ").split()
            engine.close()

    run(scenario())


def test_hello_of_an_ending_daemon_is_answered_by_goodbye(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            daemon._node.stopping = True
            engine = Engine(place.address)
            await engine.send(hello(place.root()))
            await engine.next(Goodbye)
            engine.close()

    run(scenario())
