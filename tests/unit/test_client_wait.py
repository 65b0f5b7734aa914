from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_daemon import LIMIT_S, NAME, FakeDaemon, until

from prefetchd.client import Client
from prefetchd.protocol import Answer, Failed, Goodbye, Published, Query, State, Sweep, decode_sweeps
from prefetchd.requests.deep_gemm import Fp8GemmNt

NAME_PARTS = (NAME.compiler, NAME.key)
LONG_MS = int(LIMIT_S * 1000)


class Waiting:
    """`client.wait` in a thread, so that the test can be the daemon meanwhile."""

    def __init__(self, client: Client, ms: int) -> None:
        self.result: bool | None = None
        self._thread = threading.Thread(target=self._wait, args=(client, ms))
        self._thread.start()

    def _wait(self, client: Client, ms: int) -> None:
        self.result = client.wait(*NAME_PARTS, ms=ms)

    def ended(self) -> bool | None:
        self._thread.join(LIMIT_S / 2)
        return self.result


def test_wait_asks_urgently_and_ends_when_the_variant_is_published(
    client: Client, daemon: FakeDaemon
) -> None:
    waiting = Waiting(client, LONG_MS)

    query = daemon.next(Query)
    assert (query.keys, query.priority) == ((NAME,), 0)
    daemon.send(Answer(id=query.id, keys=(State.COMPILING,)))
    daemon.send(Published(compiler=NAME.compiler, key=NAME.key, root="/cache"))

    assert waiting.ended() is True


@pytest.mark.parametrize("state", [State.FAILED, State.UNKNOWN])
def test_wait_ends_at_once_when_nothing_is_coming(client: Client, daemon: FakeDaemon, state: State) -> None:
    waiting = Waiting(client, LONG_MS)

    daemon.send(Answer(id=daemon.next(Query).id, keys=(state,)))

    assert waiting.ended() is False


def test_wait_ends_at_once_when_the_compile_fails(client: Client, daemon: FakeDaemon) -> None:
    waiting = Waiting(client, LONG_MS)

    daemon.next(Query)
    daemon.send(Failed(compiler=NAME.compiler, key=NAME.key, text="nvcc"))

    assert waiting.ended() is False


@pytest.mark.parametrize("goodbye", [True, False])
def test_wait_ends_when_the_daemon_goes(client: Client, daemon: FakeDaemon, goodbye: bool) -> None:
    waiting = Waiting(client, LONG_MS)

    daemon.next(Query)
    if goodbye:
        daemon.send(Goodbye())
    else:
        daemon.close()

    assert waiting.ended() is False


def test_wait_ends_at_its_time_when_the_daemon_only_says_it_is_compiling(
    client: Client, daemon: FakeDaemon
) -> None:
    begun = time.monotonic()
    waiting = Waiting(client, 50)
    query = daemon.next(Query)
    daemon.send(Answer(id=query.id, keys=(State.COMPILING,)))

    assert waiting.ended() is False
    assert 0.05 <= time.monotonic() - begun < LIMIT_S / 4


def test_wait_of_zero_and_wait_without_a_daemon_return_at_once(
    client: Client, daemon: FakeDaemon, clients: Callable[..., Client]
) -> None:
    assert client.wait(*NAME_PARTS) is False
    lonely = clients(wait_ms=LONG_MS)
    begun = time.monotonic()

    assert lonely.wait(*NAME_PARTS) is False

    assert time.monotonic() - begun < LIMIT_S / 4


def test_wait_for_something_published_needs_no_question(client: Client, daemon: FakeDaemon) -> None:
    daemon.send(Published(compiler=NAME.compiler, key=NAME.key, root="/cache"))
    until(lambda: client.is_published(*NAME_PARTS))

    assert client.wait(*NAME_PARTS, ms=0) is True


def test_states_of_sweeps_are_asked_and_answered_by_provider(client: Client, daemon: FakeDaemon) -> None:
    sweep = Sweep(Fp8GemmNt(m=1, n=128, k=128))
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client.states, {"deep_gemm": [sweep]}, LIMIT_S)

        query = daemon.next(Query)
        assert decode_sweeps(query.requests["deep_gemm"]) == [sweep]
        daemon.send(Answer(id=query.id, requests={"deep_gemm": (State.PUBLISHED,)}))

        assert asked.result(LIMIT_S) == {"deep_gemm": (State.PUBLISHED,)}


def test_states_are_empty_when_nobody_answers_in_time(client: Client, daemon: FakeDaemon) -> None:
    assert client.states({"deep_gemm": [Sweep(Fp8GemmNt(m=1, n=128, k=128))]}, 0.01) == {}
