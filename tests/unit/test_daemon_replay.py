"""What earlier runs compiled, given to the daemon: who gets it, in which order, and what waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_bench import PROVIDER, Engine, FakeHelper, Place, eventually, fakes, job, run, sweep

from prefetchd.node.groups import Group, Replay
from prefetchd.protocol import Published

__all__ = ["fakes"]

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_jobs_of_a_replay_reach_every_rank_of_the_group_without_a_helper(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            first, second = Engine(place.address), Engine(place.address)
            await first.attach(place.root("a"))
            await second.attach(place.root("b"), generation="second", rank=1)
            (group,) = daemon._node.groups.by_name.values()
            daemon._works.replay(group, Replay(jobs=(job(1),)))
            for engine, root in ((first, "a"), (second, "b")):
                while (await engine.next(Published)).root != str(place.root(root)):
                    pass
            stats = daemon._node.broker.stats()
            assert (stats.compiled, stats.published) == (1, 1)
            assert FakeHelper.started == []
            first.close()
            second.close()

    run(scenario())


def test_rank_that_joins_later_gets_the_replay_too(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            first, late = Engine(place.address), Engine(place.address)
            await first.attach(place.root("a"))
            (group,) = daemon._node.groups.by_name.values()
            daemon._works.replay(group, Replay(jobs=(job(1),)))
            await first.next(Published)
            await late.attach(place.root("b"), generation="second", rank=1)
            told = await late.next(Published)
            assert (told.key, told.root) == ("key1", str(place.root("b")))
            assert daemon._node.broker.stats().compiled == 1
            first.close()
            late.close()

    run(scenario())


def test_requests_of_a_replay_start_the_groups_helper(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            (group,) = daemon._node.groups.by_name.values()
            daemon._works.replay(group, Replay(requests={PROVIDER: (sweep(5),)}))
            assert (await engine.next(Published)).key == "key5"
            assert [helper.traced for helper in FakeHelper.started] == [[5]]
            engine.close()

    run(scenario())


def test_node_is_ready_only_when_the_replay_is_done(place: Place) -> None:
    gate = place.directory / "gate"

    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            node = daemon._node
            (group,) = node.groups.by_name.values()
            node.begin_expanding()
            daemon._works.pump()
            assert not node.ready, "a log is being read"
            held = job(1, f"while ! [ -e {gate} ]; do sleep 0.01; done")
            daemon._works.replay(group, Replay(jobs=(held,)))
            node.end_expanding()
            daemon._works.pump()
            await eventually(lambda: daemon._works.busy)
            assert not node.ready, "its job is compiling"
            gate.touch()
            await eventually(lambda: node.ready)
            assert (place.root() / "cache/key1/out").exists()
            engine.close()

    run(scenario())


def test_each_new_group_is_told_of_before_its_engine_is_welcomed(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            told: list[Group] = []
            daemon._node.group_made.append(told.append)
            engine = Engine(place.address)
            await engine.attach(place.root())
            assert told == list(daemon._node.groups.by_name.values())
            engine.close()

    run(scenario())
