"""Questions about requests whose answer a thread of the engine waits for: how far is the daemon with them?

Pure bookkeeping without a socket. An answer that nobody waits for any more is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from prefetchd.protocol import Answer, State

States = Mapping[str, tuple[State, ...]]


class Inquiry:
    """One thread's question."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._states: States = {}

    def end(self, states: States) -> None:
        """This is the answer."""
        self._states = states
        self._done.set()

    def wait(self, seconds: float) -> States:
        """The answer, empty if there was none within that time."""
        self._done.wait(seconds)
        return self._states


class Inquiries:
    """The questions that are open, by the number of their query."""

    def __init__(self) -> None:
        self._open: dict[int, Inquiry] = {}

    def open(self, number: int) -> Inquiry:
        """A new one; `close` must follow, whatever happens."""
        inquiry = self._open[number] = Inquiry()
        return inquiry

    def answered(self, answer: Answer) -> None:
        """Whoever waits for it goes on."""
        inquiry = self._open.get(answer.id)
        if inquiry is not None:
            inquiry.end(answer.requests)

    def close(self, number: int) -> None:
        """Nobody waits any more."""
        self._open.pop(number, None)
