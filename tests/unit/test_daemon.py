"""From a plan to published files, in a daemon of the test's own process; helper and compiler are of sh."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_bench import Engine, FakeHelper, Place, eventually, fakes, hello, job, plan, run, sweep

from prefetchd.broker.types import Compile, Priority
from prefetchd.daemon import Daemon
from prefetchd.node import state
from prefetchd.protocol import (
    Answer,
    Event,
    Failed,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloWanted,
    KeyName,
    Published,
    Query,
    Settled,
    State,
    Stats,
    StatsQuery,
    Welcome,
    encode_sweeps,
)
from prefetchd.protocol import Priority as Urgency

__all__ = ["fakes"]

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def figures(engine: Engine) -> dict[str, float]:
    await engine.send(StatsQuery(id=1))
    return dict((await engine.next(Stats)).figures)


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


def test_urgent_query_is_answered_at_its_deadline_though_nothing_moves(place: Place) -> None:
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
            assert not daemon._end.is_set()
            await engine.send(Goodbye())
            await eventually(lambda: not list(daemon._node.peers.ranks()))
            await eventually(daemon._end.is_set)
            engine.close()

    run(scenario())


def is_there(daemon: Daemon, rank: str) -> bool:
    """Whether the rank's connection is open, as the daemon finds out when an engine of that name comes."""
    node = daemon._node
    peer = node.peers.of_rank(rank)
    return peer is not None and node.send(peer, HeartbeatAnswer(sequence=0, instance=node.instance))


class Clock:
    """Puts a node's clock ahead."""

    def __init__(self, node: state.Node) -> None:
        self._offset = 0.0
        real = node.clock
        node.clock = lambda: real() + self._offset

    def ahead(self, seconds: float) -> None:
        self._offset += seconds


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
            await eventually(lambda: not daemon._node.groups.by_name)
            assert FakeHelper.started[0]._end.is_set()
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
