"""What a client remembers: plans the daemon has not settled, variants it has published, threads that wait.

Pure bookkeeping without a socket. Everything is bounded and counts what it had to let go, and may be used by
any thread: the locks are held for a few dictionary steps and are reentrant, so that a signal handler which
calls the client in the middle of them cannot stand in its own way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from prefetchd.protocol import KeyName

# Plans kept for a daemon that is away. A plan of one batch is some hundred bytes to some KB.
MAX_PLANS = 4096
MAX_PLAN_BYTES = 16 << 20
# DeepSeek-V3 has some hundred variants, every model we know far below ten thousand.
MAX_PUBLISHED = 65536


class Wanted:
    """Plans until they are settled, in the order they were made, and which of them are yet to be sent."""

    def __init__(self, max_plans: int = MAX_PLANS, max_bytes: int = MAX_PLAN_BYTES) -> None:
        self._max_plans, self._max_bytes = max_plans, max_bytes
        self._lock = threading.RLock()
        self._frames: dict[int, bytes] = {}
        self._unsent: deque[int] = deque()
        self._bytes = 0
        # Plans let go because there were too many: their requests must be asked for again.
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, plan: int, frame: bytes) -> None:
        """One more; the oldest give way."""
        with self._lock:
            self._frames[plan] = frame
            self._bytes += len(frame)
            self._unsent.append(plan)
            while len(self._frames) > self._max_plans or self._bytes > self._max_bytes:
                self._drop(next(iter(self._frames)))
                self.forgotten += 1

    def settle(self, plans: Iterable[int]) -> None:
        """These need nothing more."""
        with self._lock:
            for plan in plans:
                if plan in self._frames:
                    self._drop(plan)

    def next_unsent(self) -> bytes | None:
        """The frame to send next; `sent` says that it went."""
        with self._lock:
            while self._unsent:
                if frame := self._frames.get(self._unsent[0]):
                    return frame
                self._unsent.popleft()
            return None

    def sent(self) -> None:
        """The one that `next_unsent` named has left."""
        with self._lock:
            if self._unsent:
                self._unsent.popleft()

    def rewind(self) -> None:
        """Another daemon, or the same after a gap: all of it is to be sent again."""
        with self._lock:
            self._unsent = deque(self._frames)

    def _drop(self, plan: int) -> None:
        self._bytes -= len(self._frames.pop(plan))


class Waiter:
    """One thread's wait for one variant."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._published = False

    def end(self, *, published: bool) -> None:
        """There is nothing more to wait for."""
        self._published = published
        self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether the variant was published within that time."""
        self._done.wait(seconds)
        return self._published


class Variants:
    """Which variants the daemon says are published for this engine, and who waits for one."""

    def __init__(self, max_published: int = MAX_PUBLISHED) -> None:
        self._max_published = max_published
        self._lock = threading.RLock()
        # A dictionary for its order: the oldest give way.
        self._published: dict[KeyName, None] = {}
        self._waiters: dict[KeyName, list[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._published)

    def is_published(self, name: KeyName) -> bool:
        """Whether it was said; a look-up without a lock."""
        return name in self._published

    def waiter(self, name: KeyName) -> Waiter:
        """A new waiter; `leave` must follow, whatever happens."""
        with self._lock:
            waiter = Waiter()
            self._waiters.setdefault(name, []).append(waiter)
            return waiter

    def leave(self, name: KeyName, waiter: Waiter) -> None:
        """The thread waits no more."""
        with self._lock:
            waiting = self._waiters.get(name, [])
            if waiter in waiting:
                waiting.remove(waiter)
            if not waiting:
                self._waiters.pop(name, None)

    def published(self, name: KeyName) -> None:
        """It is there; whoever waits for it goes on."""
        with self._lock:
            self._published[name] = None
            if len(self._published) > self._max_published:
                del self._published[next(iter(self._published))]
            self._end(name, published=True)

    def not_coming(self, name: KeyName) -> None:
        """It failed, or nobody is making it."""
        with self._lock:
            self._end(name, published=False)

    def nothing_is_coming(self) -> None:
        """The daemon is gone: nobody waits for it."""
        with self._lock:
            for name in self._waiters:
                self._end(name, published=False)

    def _end(self, name: KeyName, *, published: bool) -> None:
        for waiter in self._waiters.get(name, ()):
            waiter.end(published=published)
