"""A client and the daemon it talks to, for the tests of the engine's side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory

import pytest
from fake_daemon import BEAT_S, LIMIT_S, FakeDaemon

from prefetchd.client import Client, session
from prefetchd.protocol import Heartbeat, Hello


@pytest.fixture(autouse=True)
def finders_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hook of one test acts on what another imports."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


@pytest.fixture
def address() -> Iterator[str]:
    # Shorter than pytest's own directories, which may not fit into a socket's name.
    with TemporaryDirectory(prefix="pd") as folder:
        yield f"ipc://{folder}/daemon"


@pytest.fixture
def daemons(address: str) -> Iterator[Callable[..., FakeDaemon]]:
    started: list[FakeDaemon] = []

    def start(instance: str = "first", **options: int) -> FakeDaemon:
        started.append(FakeDaemon(address, instance, **options))
        return started[-1]

    yield start
    for daemon in started:
        daemon.close()


@pytest.fixture
def clients(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []
    # The daemon here answers while the test listens; a test held up for three short beats is no dead daemon.
    monkeypatch.setattr(session, "SILENT_HEARTBEATS", LIMIT_S / BEAT_S)

    def make(**options: int) -> Client:
        made.append(
            Client(address, lambda: Hello(engine="test", pid=0, generation=""), heartbeat_s=BEAT_S, **options)
        )
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def daemon(daemons: Callable[..., FakeDaemon]) -> FakeDaemon:
    return daemons()


@pytest.fixture
def client(clients: Callable[..., Client], daemon: FakeDaemon) -> Client:
    """A client that has been welcomed."""
    client = clients()
    client.start()
    daemon.next(Heartbeat)
    return client
