"""From a plan to published files, in a daemon of the test's own process; helper and compiler are of sh."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from daemon_bench import Clock, Engine, FakeHelper, Place, eventually, fakes, figures, job, plan, run, sweep

from prefetchd.broker import Broker
from prefetchd.broker.types import Compile, KeyId, KeyStatus, Priority
from prefetchd.protocol import (
    Answer,
    Event,
    Failed,
    Goodbye,
    Hello,
    KeyName,
    Published,
    Query,
    Settled,
    State,
    Welcome,
    encode_sweeps,
)
from prefetchd.protocol import Priority as Urgency

__all__ = ["fakes"]

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def published(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("cache/*/out"))


def test_planned_variant_is_published_told_and_settled(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(7, 1, 2))
            assert (await engine.next(Settled)).plans == (7,)
            told = {message.key for message in engine.heard if isinstance(message, Published)}
            assert told == {"key1", "key2"}
            assert published(place.root()) == ["key1", "key2"]
            engine.close()

    run(scenario())
    assert place.leftovers() == []


def test_two_ranks_with_two_directories_cost_one_compile_and_both_get_it(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engines = [Engine(place.address), Engine(place.address)]
            roots = [place.root("one"), place.root("two")]
            for rank, (engine, root) in enumerate(zip(engines, roots, strict=True)):
                await engine.attach(root, rank=rank, generation=f"g{rank}")
                await engine.send(plan(1, 1, 2, 3))
            for engine in engines:
                await engine.next(Settled)
            assert [published(root) for root in roots] == [["key1", "key2", "key3"]] * 2
            stats = daemon._node.broker.stats()
            assert (stats.compiled, stats.published) == (3, 3)
            assert len(FakeHelper.started) == 1
            for engine in engines:
                engine.close()

    run(scenario())
    assert place.leftovers() == []


def test_a_changed_directory_gets_everything_again_without_a_compile(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root("one"))
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            await engine.attach(place.root("two"))
            await engine.send(plan(2, 1))
            await engine.next(Settled)
            assert published(place.root("two")) == ["key1"]
            assert daemon._node.broker.stats().compiled == 1
            engine.close()

    run(scenario())


def test_what_lies_on_disk_already_is_not_compiled(place: Place) -> None:
    async def scenario() -> None:
        entry = place.root() / "cache/key1"
        entry.mkdir(parents=True)
        (entry / "out").write_text("an engine's")
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            assert daemon._node.broker.stats().compiled == 0
            assert (entry / "out").read_text() == "an engine's"
            engine.close()

    run(scenario())


def test_a_helper_that_dies_loses_no_order(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            FakeHelper.started[0].holds = True
            await engine.send(plan(2, 5))
            await eventually(lambda: 5 in FakeHelper.started[0].traced)
            FakeHelper.started[0].die()
            assert (await engine.next(Settled)).plans == (2,)
            assert FakeHelper.started[1].traced == [5]
            (group,) = daemon._node.groups.by_name.values()
            assert group.helper.restarts == 1
            engine.close()

    run(scenario())


def test_urgent_query_is_answered_when_the_variant_is_published(place: Place) -> None:
    async def scenario() -> None:
        gate = place.directory / "gate"
        os.mkfifo(gate)
        FakeHelper.hook = f"read opened <{gate}"
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await eventually(lambda: daemon._works.busy)
            wanted = (KeyName("shell", "key1"),)
            await engine.send(Query(id=4, keys=wanted, priority=Urgency.URGENT, deadline_s=15.0))
            await eventually(lambda: daemon._node.broker.stats().waiting)
            threading.Thread(target=gate.write_text, args=("open\n",)).start()
            answer = await engine.next(Answer)
            assert (answer.id, answer.keys) == (4, (State.PUBLISHED,))
            engine.close()

    run(scenario())


def test_urgent_query_is_answered_at_its_deadline_though_nothing_moves(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing else has the daemon look at its dates before the test gives up.
    monkeypatch.setattr("prefetchd.daemon.HOUSEKEEPING_S", 600.0)

    async def scenario() -> None:
        FakeHelper.hook = "sleep 60"
        async with place.serving(stop_timeout_s=0.01) as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await eventually(lambda: daemon._works.busy)
            wanted = (KeyName("shell", "key1"),)
            await engine.send(Query(id=4, keys=wanted, priority=Urgency.URGENT, deadline_s=0.05))
            assert (await engine.next(Answer)).keys == (State.COMPILING,)
            engine.close()

    run(scenario())
    assert place.leftovers() == []


def test_tool_that_asks_hears_how_far_a_key_is_for_the_engine_that_is_best_off(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            engine, tool = Engine(place.address), Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            await tool.send(Hello(engine="explain", pid=os.getpid(), generation="a tool"))
            await tool.next(Welcome)
            await tool.send(Query(id=7, keys=(KeyName("shell", "key1"), KeyName("shell", "never"))))
            assert (await tool.next(Answer)).keys == (State.PUBLISHED, State.UNKNOWN)
            engine.close()
            tool.close()

    run(scenario())


def test_tools_query_costs_one_look_for_each_directory_however_many_ranks_share_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    real = Broker.key_status

    def counted(broker: Broker, rank: str, key: KeyId) -> KeyStatus:
        looks.append(key[1])
        return real(broker, rank, key)

    async def scenario() -> None:
        async with place.serving():
            engine, tool = Engine(place.address), Engine(place.address)
            others = [Engine(place.address) for _ in range(4)]
            for number, other in enumerate(others):
                await other.attach(place.root("apart" if number == 3 else "cache"), rank=number)
            await engine.attach(place.root("last"), rank=4)
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            monkeypatch.setattr(Broker, "key_status", counted)
            await tool.send(Hello(engine="explain", pid=os.getpid(), generation="a tool"))
            await tool.next(Welcome)
            await tool.send(Query(id=7, keys=(KeyName("shell", "key1"), KeyName("shell", "never"))))
            assert (await tool.next(Answer)).keys == (State.PUBLISHED, State.UNKNOWN)
            for each in (engine, tool, *others):
                each.close()

    run(scenario())
    assert looks == ["key1"] * 3 + ["never"] * 3


def test_compile_that_fails_is_told_with_its_reason_and_settles_the_plan(place: Place) -> None:
    async def scenario() -> None:
        FakeHelper.hook = "echo no such instruction; exit 1"
        async with place.serving():
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            failed = await engine.next(Failed)
            assert (failed.key, "no such instruction" in failed.text) == ("key1", True)
            await engine.next(Settled)
            engine.close()

    run(scenario())


def test_query_tells_the_states_of_requests(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            await engine.send(Query(id=2, requests={"fake": encode_sweeps([sweep(1), sweep(9)])}))
            answer = await engine.next(Answer)
            assert answer.requests == {"fake": (State.PUBLISHED, State.UNKNOWN)}
            engine.close()

    run(scenario())


def test_engine_compiles_are_counted_with_their_reason(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(Event(what="started", compiler="shell", key="nobody.planned"))
            await engine.send(Event(what="ended", compiler="shell", key="nobody.planned", seconds=1.5))
            await engine.send(Event(what="ended", compiler="shell", digest="abc", seconds=0.5))
            found = await figures(engine)
            assert found["prefetchd_unplanned_total{compiler=shell}"] == 2
            assert found["prefetchd_engine_compile_seconds_total{compiler=shell,reason=unplanned}"] == 2.0
            engine.close()

    run(scenario())


def test_ending_lets_a_running_compile_finish(place: Place) -> None:
    async def scenario() -> None:
        begun = place.directory / "begun"
        FakeHelper.hook = f"touch {begun}; sleep 0.3"
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1, 2, 3, 4))
            await eventually(begun.exists)
            daemon.end()
            await engine.next(Goodbye)
            # Two slots: what had begun is finished, nothing else is begun.
            assert len(published(place.root())) in (1, 2)
            engine.close()

    run(scenario())
    assert place.leftovers() == []


def test_ending_abandons_what_takes_longer_than_the_stated_time(place: Place) -> None:
    async def scenario() -> None:
        pid = place.directory / "pid"
        FakeHelper.hook = f"echo $$ >{pid}.new && mv {pid}.new {pid}; sleep 600"
        async with place.serving(stop_timeout_s=0.05) as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await eventually(pid.exists)
            daemon.end()
            await engine.next(Goodbye)
            engine.close()
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)

    run(scenario())
    assert (place.leftovers(), published(place.root())) == ([], [])


def test_idle_daemon_ends_only_when_nobody_is_there_and_nothing_is_left(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving(idle_exit_s=0.01) as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            clock = Clock(daemon._node)
            clock.ahead(5.0)
            daemon._keep_house(daemon._node.clock(), late=False)
            assert not daemon._ending
            await engine.send(Goodbye())
            await eventually(lambda: not list(daemon._node.peers.ranks()))

            def ended() -> bool:
                clock.ahead(2.0)
                daemon._wake()
                return daemon._ending

            await eventually(ended)
            engine.close()

    run(scenario())


def test_work_of_a_group_that_is_gone_is_done_by_whoever_uses_the_root(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            order = Compile(job=job(3), group="gone", root=str(place.root()), priority=Priority.BATCH)
            await daemon._works._compile(order)
            assert published(place.root()) == ["key3"]
            engine.close()

    run(scenario())
