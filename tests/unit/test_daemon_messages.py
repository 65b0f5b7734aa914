"""What strangers, other versions and noise meet at the daemon's door; who may come in at all."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from as_user import as_nameless_user
from daemon_bench import Engine, FakeHelper, Place, eventually, fakes, hello, plan, run, sweep

from prefetchd.config import Settings
from prefetchd.curve import KeysError, generate_keys, read_keys
from prefetchd.daemon import Daemon
from prefetchd.node.lock import AlreadyRunning
from prefetchd.protocol import (
    MAX_MESSAGE_BYTES,
    Answer,
    Goodbye,
    Heartbeat,
    HelloWanted,
    KeyName,
    Mismatch,
    Query,
    Refused,
    Settled,
    State,
    Stats,
    StatsQuery,
    Sweep,
    Universe,
    Welcome,
    encode,
    encode_sweeps,
)
from prefetchd.protocol import Plan as PlanMessage

__all__ = ["fakes"]

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def still_serves(place: Place) -> Stats:
    engine = Engine(place.address)
    await engine.send(StatsQuery(id=9))
    found = await engine.next(Stats)
    engine.close()
    return found


# What comes in.


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode({"type": "plan", "id": "seven"}), "malformed"),
        (msgspec.msgpack.encode({"type": "hello", "protocol": 999}), "version"),
    ],
)
def test_frame_that_is_no_message_is_counted_and_refused_with_the_reason(
    place: Place, frame: bytes, problem: str
) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.socket.send(frame)
            assert (await engine.next(Refused)).text
            assert daemon._node.problems[problem] == 1
            await still_serves(place)
            engine.close()

    run(scenario())


def test_oversized_frame_ends_its_connection_and_nothing_else(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.socket.send(b"x" * (MAX_MESSAGE_BYTES + 1))
            await still_serves(place)
            engine.close()

    run(scenario())


def test_unknown_type_is_counted_and_the_connection_goes_on(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.socket.send(msgspec.msgpack.encode({"type": "from_the_future", "x": 1}))
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            assert daemon._node.problems["unknown"] == 1
            engine.close()

    run(scenario())


def test_stranger_is_asked_to_introduce_itself(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.send(plan(1, 1))
            assert (await engine.next(HelloWanted)).instance == daemon._node.instance
            assert not daemon._node.broker.stats().requests
            engine.close()

    run(scenario())


def test_message_of_several_parts_is_its_last(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.socket.send_multipart([b"", encode(StatsQuery(id=3))])
            assert (await engine.next(Stats)).id == 3
            engine.close()

    run(scenario())


@pytest.mark.parametrize(
    "requests",
    [
        {"fake": b"\xc1"},
        {"fake": encode_sweeps([Sweep(sweep(1).request, ((1, 1 << 62, 1),))])},
        {"fake": encode_sweeps([Sweep(sweep(1).request, ((1, 1 << 20, 1), (1 << 21, 1 << 22, 1)))])},
    ],
)
def test_plan_that_cannot_be_meant_is_counted_and_not_traced(
    place: Place, requests: dict[str, bytes]
) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(PlanMessage(id=1, requests=requests))
            await engine.send(plan(2, 1))
            assert (await engine.next(Settled)).plans == (2,)
            assert daemon._node.problems["malformed"] == 1
            engine.close()

    run(scenario())


def test_profile_that_cannot_be_read_is_counted(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(Universe(profile=b"\xc1", providers=("deep_gemm",), max_tokens=1))
            await eventually(lambda: daemon._node.problems["profile"])
            engine.close()

    run(scenario())


def test_key_that_is_a_path_is_not_looked_up(place: Place) -> None:
    async def scenario() -> None:
        outside = place.root("outside") / "out"
        outside.write_text("good")
        async with place.serving():
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(Query(id=1, keys=(KeyName("shell", "../../outside"),)))
            assert (await engine.next(Answer)).keys == (State.UNKNOWN,)
            engine.close()

    run(scenario())


def test_peers_are_bounded_and_whoever_gave_way_is_asked_again(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving(max_peers=3) as daemon:
            engines = [Engine(place.address) for _ in range(5)]
            for number, engine in enumerate(engines):
                await engine.attach(target=None, generation=f"g{number}")
            assert len(daemon._node.peers) == 3
            await engines[0].send(Heartbeat(sequence=1))
            await engines[0].next(HelloWanted)
            for engine in engines:
                engine.close()

    run(scenario())


def test_noise_leaves_the_daemon_serving_and_small(place: Place) -> None:
    async def scenario() -> None:
        chance = random.Random(7)
        good = [
            encode(hello(place.root())),
            encode(plan(1, 1)),
            encode(Goodbye()),
            encode(Heartbeat(sequence=1)),
        ]
        async with place.serving() as daemon:
            engine = Engine(place.address)
            for _ in range(3000):
                frame = bytearray(chance.choice(good))
                for _ in range(chance.randrange(4)):
                    frame[chance.randrange(len(frame))] = chance.randrange(256)
                await engine.socket.send(bytes(frame))
            await still_serves(place)
            assert daemon._node.problems["defect"] == 0
            engine.close()

    run(scenario())


def test_peer_that_does_not_read_is_asked_for_everything_again_when_it_does(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            (peer,) = daemon._node.peers.ranks().values()
            peer.behind = True
            await engine.send(Heartbeat(sequence=1))
            await engine.next(HelloWanted)
            engine.close()

    run(scenario())


# What a hello may bring about.


def test_other_interpreter_is_an_alarm_and_is_never_started(place: Place) -> None:
    async def scenario() -> None:
        trap = place.directory / "python3"
        trap.write_text(f"#!/bin/sh\ntouch {place.directory}/executed\n")
        trap.chmod(0o755)
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.send(hello(place.root(), interpreter=str(trap)))
            mismatch = await engine.next(Mismatch)
            assert (mismatch.field, mismatch.helper) == ("interpreter", sys.executable)
            assert f"allow_interpreters = ['{trap}']" in mismatch.fix
            (group,) = daemon._node.groups.by_name.values()
            assert group.interpreter == group.workshop.interpreter == sys.executable
            assert daemon._node.broker.stats().mismatches == {" interpreter": 1}
            engine.close()
        assert not (place.directory / "executed").exists()

    run(scenario())


def test_package_directory_of_a_message_is_not_imported_from(place: Place) -> None:
    async def scenario() -> None:
        trap = place.root("site-packages")
        async with place.serving():
            engine = Engine(place.address)
            await engine.send(hello(place.root(), library_directories=(str(trap),)))
            assert (await engine.next(Mismatch)).field == "library_directories"
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            assert str(trap) not in FakeHelper.started[0].environment.get("PYTHONPATH", "")
            engine.close()

    run(scenario())


def test_variables_of_a_message_do_not_reach_the_helper(place: Place) -> None:
    facts = {"shell": {"shell.env.TRITON_PTXAS_PATH": "/tmp/evil", "shell.env.PYTHONPATH": "/tmp/evil"}}

    async def scenario() -> None:
        FakeHelper.facts = {"shell": {"shell.version": "1"}}
        async with place.serving():
            engine = Engine(place.address)
            await engine.attach(place.root(), fingerprints=facts)
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            names = {message.field for message in engine.heard if isinstance(message, Mismatch)}
            assert names == set(facts["shell"])
            assert "/tmp/evil" not in FakeHelper.started[0].environment.values()
            engine.close()

    run(scenario())


def test_fingerprint_that_differs_is_an_alarm_with_both_values(place: Place) -> None:
    async def scenario() -> None:
        FakeHelper.facts = {"shell": {"shell.version": "2", "shell.same": "x"}}
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(
                place.root(), fingerprints={"shell": {"shell.version": "1", "shell.same": "x"}}
            )
            await engine.send(plan(1, 1))
            mismatch = await engine.next(Mismatch)
            assert (mismatch.field, mismatch.engine, mismatch.helper) == ("shell.version", "1", "2")
            figures = (await still_serves(place)).figures
            name = "prefetchd_fingerprint_mismatches_total{compiler=shell,field=shell.version}"
            assert figures[name] == 1
            # The same hello again is told again and counted once.
            await engine.send(hello(place.root(), fingerprints={"shell": {"shell.version": "1"}}))
            await engine.next(Mismatch)
            assert daemon._node.broker.stats().mismatches == {"shell shell.version": 1}
            engine.close()

    run(scenario())


@pytest.mark.parametrize("kind", ["link", "open to all", "another's", "not absolute", "file"])
def test_directory_that_is_not_ours_alone_is_never_written_to(place: Place, kind: str) -> None:
    root = place.root("root")
    named = str(root)
    if kind == "link":
        (place.directory / "link").symlink_to(root)
        named = str(place.directory / "link")
    elif kind == "open to all":
        root.chmod(0o777)
    elif kind == "another's":
        if os.geteuid() != 0:
            pytest.skip("gives a directory away, which only root can")
        os.chown(root, 12345, 12345)
    elif kind == "not absolute":
        named = f"{root}/../root"
    else:
        root.rmdir()
        root.write_text("")

    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.send(hello(cache_roots={"shell": (named,)}))
            mismatch = await engine.next(Mismatch)
            assert (mismatch.field, mismatch.engine) == ("cache_root", named)
            assert f"allow_cache_roots = ['{named}']" in mismatch.fix
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            assert (await still_serves(place)).figures["prefetchd_cache_dir_mismatch{compiler=shell}"] == 1
            engine.close()

    run(scenario())
    assert not root.is_dir() or not any(root.iterdir())


def test_directory_that_the_user_has_allowed_is_used(place: Place) -> None:
    link = place.directory / "link"
    link.symlink_to(place.root("root"))

    async def scenario() -> None:
        async with place.serving(allow_cache_roots=(str(link),)):
            engine = Engine(place.address)
            await engine.attach(link)
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            assert (place.root("root") / "cache/key1/out").read_text() == "good"
            engine.close()

    run(scenario())


def test_helper_that_does_not_start_is_tried_again_and_says_why(place: Place) -> None:
    async def scenario() -> None:
        FakeHelper.refuse = "no null device here"
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await eventually(lambda: FakeHelper.started)
            await eventually(lambda: "no null device here" in daemon._figures.left())
            FakeHelper.refuse = ""
            await engine.next(Settled)
            engine.close()

    run(scenario())


# Who may come in.


def test_second_daemon_is_refused_and_names_the_first(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            with pytest.raises(AlreadyRunning, match=rf"process {os.getpid()}\).*PREFETCHD_ENDPOINT"):
                await Daemon(place.settings(), place.environment).run()
            await still_serves(place)

    run(scenario())


def test_other_user_cannot_connect(tmp_path_factory: pytest.TempPathFactory) -> None:
    # A directory that others may enter, so that the socket's own mode is what keeps them out.
    place = Place(Path("/tmp") / f"pf-{os.getpid()}")
    place.directory.mkdir(mode=0o755)

    def attempt() -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plain:
            try:
                plain.connect(str(place.directory / "daemon"))
            except OSError as error:
                return type(error).__name__
        return "connected"

    async def scenario() -> None:
        async with place.serving():
            assert await asyncio.to_thread(attempt) == "connected"
            assert as_nameless_user(attempt) == "PermissionError"

    try:
        run(scenario())
    finally:
        (place.directory / "daemon.lock").unlink()
        place.directory.rmdir()


def test_directory_of_our_own_choosing_is_closed_to_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        environment = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
        daemon = Daemon(Settings(metrics="off"), environment)
        running = asyncio.create_task(daemon.run())
        engine = Engine(daemon.endpoint.address)
        await engine.attach(target=None)
        assert (tmp_path / "prefetchd").stat().st_mode & 0o777 == 0o700
        engine.close()
        daemon.end()
        await running

    run(scenario())


class Remote:
    """A daemon with a TCP door, and keys of a client that may or may not come in."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.public, self.secret = zmq.curve_keypair()
        generate_keys(place.directory / "keys")
        self.server, _ = read_keys(place.directory / "keys")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def settings(self, *allowed: bytes) -> dict[str, Any]:
        return {
            "listen": self.address,
            "keys": str(self.place.directory / "keys"),
            "allow_peers": tuple(key.decode() for key in allowed),
        }

    def engine(self) -> Engine:
        def prepare(connection: zmq.asyncio.Socket) -> None:
            connection.curve_serverkey = self.server
            connection.curve_publickey, connection.curve_secretkey = self.public, self.secret

        return Engine(self.address, prepare)


def test_remote_peer_with_an_allowed_key_gets_figures(place: Place) -> None:
    async def scenario() -> None:
        remote = Remote(place)
        async with place.serving(**remote.settings(remote.public)):
            engine = remote.engine()
            await engine.send(StatsQuery(id=1))
            await engine.next(Stats)
            engine.close()

    run(scenario())


@pytest.mark.parametrize("allowed", [(), (zmq.curve_keypair()[0],)])
def test_remote_peer_without_an_allowed_key_is_not_let_in(place: Place, allowed: tuple[bytes, ...]) -> None:
    async def scenario() -> None:
        remote = Remote(place)
        async with place.serving(**remote.settings(*allowed)) as daemon:
            engine = remote.engine()
            monitor = engine.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            await engine.send(StatsQuery(id=1))
            async with asyncio.timeout(20):
                await monitor.recv_multipart()
            assert not daemon._node.received["StatsQuery"]
            engine.close()

    run(scenario())


def test_remote_peer_without_encryption_is_not_let_in(place: Place) -> None:
    async def scenario() -> None:
        remote = Remote(place)
        async with place.serving(**remote.settings(remote.public)) as daemon:
            engine = Engine(remote.address)
            monitor = engine.socket.get_monitor_socket(
                zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            )
            await engine.send(StatsQuery(id=1))
            async with asyncio.timeout(20):
                await monitor.recv_multipart()
            assert not daemon._node.received["StatsQuery"]
            engine.close()

    run(scenario())


def test_remote_peer_plans_with_a_helper_that_is_there_and_never_starts_one(place: Place) -> None:
    async def scenario() -> None:
        remote = Remote(place)
        async with place.serving(**remote.settings(remote.public)):
            far = remote.engine()
            await far.send(hello(place.root("far"), generation="far"))
            assert "does not start a helper" in (await far.next(Refused)).text
            near = Engine(place.address)
            await near.attach(place.root("near"))
            await far.send(hello(place.root("far"), generation="far"))
            await far.next(Welcome)
            await far.send(plan(1, 1))
            await still_serves(place)
            assert FakeHelper.started == []
            await near.send(plan(1, 2))
            await near.next(Settled)
            await far.next(Settled)
            assert len(FakeHelper.started) == 1
            assert not any(place.root("far").iterdir())
            far.close()
            near.close()

    run(scenario())


def test_tcp_door_without_keys_is_refused_with_the_command_that_makes_them(place: Place) -> None:
    async def scenario() -> None:
        with pytest.raises(KeysError, match="prefetchd keygen"):
            await Daemon(
                place.settings(listen="tcp://127.0.0.1:0", keys=str(place.directory / "none")),
                place.environment,
            ).run()

    run(scenario())


def test_malformed_allowed_key_is_refused(place: Place) -> None:
    async def scenario() -> None:
        remote = Remote(place)
        with pytest.raises(KeysError, match="allow_peers"):
            await Daemon(place.settings(**remote.settings(b"short")), place.environment).run()

    run(scenario())
