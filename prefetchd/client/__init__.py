"""The engine's side of the socket: says what will run and what happened, hears what is published.

Every call returns at once, from any thread, in a forked child, at exit, whether the daemon is there, stopped
or gone; none raises. One background thread (`session.py`) owns the socket; calls only leave work for it. The
subtle rule: a plan is kept until the daemon settles it and is sent again to whichever daemon comes next,
while everything else is a report of the moment, kept in a bounded queue and counted when it does not fit.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import msgspec

from prefetchd.client.inquiries import Inquiries
from prefetchd.client.link import CurveKeys
from prefetchd.client.session import Session
from prefetchd.client.state import Variants, Wanted
from prefetchd.client.wakeup import Wakeup
from prefetchd.guard import Guard, guarded
from prefetchd.protocol import (
    Event,
    Hello,
    KeyName,
    Message,
    Plan,
    Priority,
    Query,
    Request,
    State,
    Sweep,
    Universe,
    encode,
    encode_sweeps,
    sweeps,
)

# Reports kept while the daemon is away or slow: engine compiles are rare, a burst of them is some hundred.
MAX_QUEUE = 4096
# An interpreter that exits waits this long for the goodbye to be said.
CLOSE_S = 0.05

NO_FIGURES: Mapping[str, int] = MappingProxyType({})
NO_STATES: Mapping[str, tuple[State, ...]] = MappingProxyType({})

# Events whose reason is that no daemon was there, where none was.
COMPILES = ("started", "ended")

# Does a bounded piece of work in the background thread; True: there is more to do.
Source = Callable[[], bool]


class Client:
    """One engine rank's connection. `hello` is asked in the background whenever a hello is due."""

    def __init__(
        self,
        address: str,
        hello: Callable[[], Hello],
        *,
        wait_ms: int = 0,
        max_queue: int = MAX_QUEUE,
        heartbeat_s: float = 1.0,
        curve: CurveKeys | None = None,
    ) -> None:
        self.address, self.curve, self.heartbeat_s = address, curve, heartbeat_s
        self.guard = Guard()
        self.hello = hello
        self.sources: list[Source] = []
        # Changes when plans were let go and a daemon is there again: what was asked for must be asked anew.
        self.losses = 0
        self._wait_ms, self._max_queue = wait_ms, max_queue
        self._start_anew()
        _clients.add(self)

    def _start_anew(self) -> None:
        """As if nothing had happened in this process: at the beginning, and in a forked child."""
        self.generation = secrets.token_hex(8)
        self.queue: deque[Message] = deque()
        self.plans, self.variants, self.inquiries = Wanted(), Variants(), Inquiries()
        self.universe_wanted: Universe | None = None
        self.refresh_wanted = False
        self.dropped = 0
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._thread: threading.Thread | None = None
        self.session: Session | None = None
        self._wakeup: Wakeup | None = None
        self.closed = False

    @guarded(None)
    def start(self) -> None:
        """Starts the background thread now; otherwise the first message does."""
        if self._thread is not None or self.closed:
            return
        with self._lock:
            if self._thread is not None:
                return
            self._wakeup = Wakeup()
            self.session = Session(self, self._wakeup)
            thread = threading.Thread(target=self.session.run, name="prefetchd-client", daemon=True)
            thread.start()
            self._thread = thread

    @guarded(None)
    def wake(self) -> None:
        """There is work for the background thread; a microsecond, and no more if it knows already."""
        if self._thread is None:
            self.start()
        if self._wakeup is not None and not self.closed:
            self._wakeup.set()

    @guarded(None)
    def refresh(self) -> None:
        """The engine may have changed what it says of itself, such as a cache directory: looks anew, now."""
        self.refresh_wanted = True
        self.wake()

    @guarded(None)
    def add_source(self, source: Source) -> None:
        """`source` is called in the background thread after each `wake`."""
        self.sources.append(source)

    @guarded(False)
    def plan(
        self,
        requests: Mapping[str, Iterable[Request]],
        priority: Priority = Priority.BATCH,
        deadline_s: float = 0.0,
    ) -> bool:
        """Asks for these requests, by provider, as one plan; groups and encodes them in this thread."""
        encoded = {name: encode_sweeps(sweeps(items)) for name, items in requests.items()}
        number = next(self._ids)
        self.plans.add(
            number,
            encode(Plan(id=number, requests=encoded, priority=priority, deadline_s=deadline_s)),
        )
        self.wake()
        return True

    @guarded(None)
    def universe(self, universe: Universe) -> None:
        """Asks for all that a profile can cause; every daemon that comes is told."""
        self.universe_wanted = universe
        self.wake()

    @guarded(False)
    def event(self, event: Event) -> bool:
        """Reports what the engine did. False when the queue is full and the report was dropped.

        A compile for which no daemon was there says so, since it is told when one is.
        """
        session = self.session
        if event.what in COMPILES and not (session is not None and session.answers):
            event = msgspec.structs.replace(event, daemon_down=True)
        return self._post(event)

    @guarded(False)
    def is_published(self, compiler: str, key: str) -> bool:
        """Whether the daemon has said that the engine finds this variant on disk."""
        return self.variants.is_published(KeyName(compiler, key))

    @guarded(False)
    def wait(self, compiler: str, key: str, ms: int | None = None) -> bool:
        """Waits for a variant that is compiling now, at most `ms` (the setting), and asks for it urgently.

        True: it is published. Returns at once where `ms` is 0, and where no daemon answers.
        """
        name = KeyName(compiler, key)
        if self.variants.is_published(name):
            return True
        seconds = (self._wait_ms if ms is None else ms) / 1000
        session = self.session
        if seconds <= 0 or session is None or not session.answers:
            return False
        waiter = self.variants.waiter(name)
        try:
            query = Query(id=next(self._ids), keys=(name,), priority=Priority.URGENT, deadline_s=seconds)
            return self._post(query, first=True) and waiter.wait(seconds)
        finally:
            self.variants.leave(name, waiter)

    @guarded(NO_STATES)
    def states(
        self, wanted: Mapping[str, Iterable[Sweep]], timeout_s: float
    ) -> Mapping[str, tuple[State, ...]]:
        """How far the daemon is with these sweeps, by provider; empty where it does not answer in time."""
        requests = {name: encode_sweeps(list(items)) for name, items in wanted.items()}
        query = Query(id=next(self._ids), requests=requests)
        inquiry = self.inquiries.open(query.id)
        try:
            return inquiry.wait(timeout_s) if self._post(query, first=True) else NO_STATES
        finally:
            self.inquiries.close(query.id)

    @property
    @guarded(0)
    def wanted(self) -> int:
        """Plans that the daemon has not settled."""
        return len(self.plans)

    @guarded(NO_FIGURES)
    def stats(self) -> Mapping[str, int]:
        """Counters and sizes, for people and for the daemon's metrics."""
        session = self.session
        return {
            "queued": len(self.queue),
            "dropped": self.dropped,
            "wanted": len(self.plans),
            "forgotten": self.plans.forgotten,
            "published": len(self.variants),
            "errors": self.guard.errors,
            **(session.figures() if session else {}),
        }

    @guarded(None)
    def close(self) -> None:
        """Says goodbye if that takes no more than `CLOSE_S`; every later call does nothing."""
        self.wake_to_close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    @guarded(None)
    def wake_to_close(self) -> None:
        """The first half of `close`: the background thread ends by itself."""
        with self._lock:
            if self._wakeup is not None and not self.closed:
                self._wakeup.set()
            self.closed = True

    def _post(self, message: Message, *, first: bool = False) -> bool:
        if self.closed or len(self.queue) >= self._max_queue:
            with self._lock:
                self.dropped += 1
            return False
        (self.queue.appendleft if first else self.queue.append)(message)
        self.wake()
        return True

    @guarded(None)
    def forget_parent(self) -> None:
        """In a forked child: the parent's thread is not here and its sockets must not be touched."""
        _inherited.append((self._thread, self.session, self._wakeup))
        was_closed = self.closed
        self._start_anew()
        self.closed = was_closed
        self.losses += 1


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
# Kept for ever, since collecting them would close what the parent still uses.
_inherited: list[object] = []


def _after_fork() -> None:
    for client in list(_clients):
        client.forget_parent()


def _at_exit() -> None:
    clients = list(_clients)
    for client in clients:
        client.wake_to_close()
    for client in clients:
        client.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
