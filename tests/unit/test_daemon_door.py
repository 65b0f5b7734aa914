"""Who may come in at all: one daemon, its own user, and far peers with an allowed key."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from as_user import as_nameless_user
from daemon_bench import LIMIT_S, Engine, FakeHelper, Place, fakes, hello, plan, run, still_serves

from prefetchd.config import Settings
from prefetchd.curve import KeysError, generate_keys, read_keys
from prefetchd.daemon import Daemon
from prefetchd.node.lock import AlreadyRunning
from prefetchd.protocol import Refused, Settled, Stats, StatsQuery, Welcome

__all__ = ["fakes"]

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


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

    def encrypt(self, connection: zmq.asyncio.Socket) -> None:
        connection.curve_serverkey = self.server
        connection.curve_publickey, connection.curve_secretkey = self.public, self.secret

    def engine(self) -> Engine:
        return Engine(self.address, self.encrypt)


class Watched:
    """An engine whose connection is listened to from before it is made: one that was refused tries once."""

    def __init__(
        self,
        address: str,
        events: int,
        prepare: Callable[[zmq.asyncio.Socket], None] = lambda _: None,
    ) -> None:
        def watch(connection: zmq.asyncio.Socket) -> None:
            prepare(connection)
            self._monitor = connection.get_monitor_socket(events)

        self.engine = Engine(address, watch)

    async def asks_in_vain(self) -> None:
        """Sends a query; returns when one of the events took place."""
        # Refused before this, it has nowhere to send to and waits.
        asking = asyncio.create_task(self.engine.send(StatsQuery(id=1)))
        async with asyncio.timeout(LIMIT_S):
            await self._monitor.recv_multipart()
        asking.cancel()


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
            watched = Watched(remote.address, zmq.EVENT_HANDSHAKE_FAILED_AUTH, remote.encrypt)
            await watched.asks_in_vain()
            assert not daemon._node.received["StatsQuery"]
            watched.engine.close()

    run(scenario())


def test_remote_door_for_nobody_is_told(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with place.serving(**Remote(place).settings()):
            pass

    run(scenario())

    assert "lets nobody in: allow_peers is empty" in caplog.text


def test_remote_peer_without_encryption_is_not_let_in(place: Place) -> None:
    async def scenario() -> None:
        remote = Remote(place)
        async with place.serving(**remote.settings(remote.public)) as daemon:
            watched = Watched(remote.address, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
            await watched.asks_in_vain()
            assert not daemon._node.received["StatsQuery"]
            watched.engine.close()

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
