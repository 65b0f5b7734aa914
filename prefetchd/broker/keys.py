"""What the broker knows of each key: its job, who asks, which roots hold it, who compiles it, how it failed.

*Published* is a fact about (key, root). The one subtle rule: a root is only acted upon after the disk was
asked, so that nothing is compiled which an engine or an earlier start has left there. The table is bounded
by entries and by payload bytes; what is open is never dropped, since dropping it would lose a request.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING

from prefetchd.broker.asks import Asks
from prefetchd.broker.types import Compile, Group, KeyId, Priority, Rank, Root
from prefetchd.compilers.base import Job

if TYPE_CHECKING:
    from prefetchd.broker.accounting import EngineCompile
    from prefetchd.broker.tasks import Task
    from prefetchd.broker.waiters import Waiter

# A universe has some thousand keys; this is room for dozens of models, at roughly 1 KB an entry.
MAX_KEYS = 200_000
# Kernel sources are 1-3 KB each; a republish into a new root may need them again.
MAX_PAYLOAD_BYTES = 256 << 20
# Failures remembered with their text. One that is forgotten costs a compile when it is asked for again.
MAX_FAILURES = 10_000
# A compiler's whole output is in its log; this much tells a person what to do.
MAX_TEXT = 4_000
# Roots remembered of one key beside those in use; a node's ranks have at most one or two each.
MAX_COPIES = 128
# Machine faults pass, or they do not; three more tries tell which.
MAX_RETRIES = 3
# Seconds before the first retry; a full disk or memory needs more than a moment to get free.
RETRY_BASE_S = 2.0
RETRY_FACTOR = 4.0
# How many busy entries may be passed over to find one to drop: keeps an insertion short.
EVICTION_TRIES = 16


class CopyState(Enum):
    """What is known of a key in one root."""

    UNCHECKED = auto()
    ABSENT = auto()
    PUBLISHING = auto()
    PUBLISHED = auto()
    # It could not be written there; other roots are not touched by that.
    FAILED = auto()


class Copy:
    """One key in one root: what its publish queue holds."""

    __slots__ = (
        "checking",
        "counted",
        "key",
        "retry_at",
        "root",
        "since",
        "state",
        "text",
        "tries",
        "waiting",
    )

    def __init__(self, key: Key, root: Root) -> None:
        self.key = key
        self.root = root
        self.state = CopyState.UNCHECKED
        # When it was first known to be published there, in its last time of being so.
        self.since = inf
        # A look at the disk is under way; an answer that comes after a publish is out of date.
        self.checking = False
        self.tries = 0
        self.text = ""
        self.retry_at: float | None = None
        self.waiting = False
        self.counted: Priority | None = None

    @property
    def asks(self) -> Asks:
        """Who asks for the key."""
        return self.key.asks

    def is_published(self, now: float) -> None:
        """It is there, as we have done or seen at this moment."""
        if self.state is not CopyState.PUBLISHED:
            self.state, self.since = CopyState.PUBLISHED, now


class Failure:
    """Why a key is not compiled, where it was tried, and when it may be tried again (None: never)."""

    __slots__ = ("blocked", "groups", "retry_at", "text", "tries")

    def __init__(self) -> None:
        self.text = ""
        self.tries = 0
        self.retry_at: float | None = None
        # Not to be tried at this moment; a retry that is due is tried with its history kept.
        self.blocked = True
        self.groups: set[Group] = set()


class Key:
    """One variant of one compiler. The masks hold a bit for each rank (see `accounting`)."""

    __slots__ = (
        "asks",
        "compiled",
        "copies",
        "counted",
        "deadline",
        "engines",
        "evicted",
        "failure",
        "flight",
        "group",
        "hit",
        "id",
        "job",
        "late",
        "planned",
        "tasks",
        "unplanned",
        "unused",
        "used",
        "waiters",
        "waiting",
    )

    def __init__(self, identity: KeyId) -> None:
        self.id = identity
        # None while only an engine has named it: nobody here can compile it.
        self.job: Job | None = None
        self.group: Group = None
        self.copies: dict[Root, Copy] = {}
        self.asks = Asks()
        self.tasks: dict[Task, None] = {}
        self.waiters: dict[Waiter, None] = {}
        self.waiting = False
        self.counted: Priority | None = None
        # The earliest moment at which any of those who ask needs it.
        self.deadline = inf
        # Our compile in flight.
        self.flight: Compile | None = None
        # Engines that compile it now; ours waits for them.
        self.engines: dict[Rank, EngineCompile] = {}
        self.failure: Failure | None = None
        self.compiled = False
        self.evicted = False
        self.planned = self.hit = self.late = self.unplanned = self.used = self.unused = 0

    def source(self) -> Root | None:
        """A root that holds it."""
        for root, copy in self.copies.items():
            if copy.state is CopyState.PUBLISHED:
                return root
        return None

    def published_in(self, roots: tuple[Root, ...], by: float = inf) -> bool:
        """Whether every one of these roots (at least one) holds it, and was known to by that moment."""
        for root in roots:
            copy = self.copies.get(root)
            if copy is None or copy.state is not CopyState.PUBLISHED or copy.since > by:
                return False
        return bool(roots)

    def failed_in(self, roots: tuple[Root, ...]) -> bool:
        """Whether it cannot get into these roots, and no retry will come."""
        if self.failure is not None and self.failure.retry_at is None:
            return True
        for root in roots:
            copy = self.copies.get(root)
            if copy is not None and copy.state is CopyState.FAILED:
                return True
        return False

    def failure_text(self, roots: tuple[Root, ...]) -> str:
        """The reason of a failure, or of the one that is to be retried."""
        if self.failure is not None:
            return self.failure.text
        return next((copy.text for root in roots if (copy := self.copies.get(root)) and copy.text), "")

    def served(self, bit: int) -> bool:
        """Whether it was planned by the rank with this bit, and lay in all its roots once."""
        return bool(self.planned & (self.hit | self.unused | self.used) & bit)

    def busy(self) -> bool:
        """Whether dropping it could lose something."""
        if self.asks or self.tasks or self.waiters or self.engines or self.flight is not None:
            return True
        return any(copy.checking or copy.state is CopyState.PUBLISHING for copy in self.copies.values())


def backoff(tries: int) -> float:
    """Seconds to wait before the next try, after so many."""
    return float(RETRY_BASE_S * RETRY_FACTOR ** (tries - 1))


class KeyTable:
    """The known keys, least recently touched first."""

    def __init__(self, max_keys: int = MAX_KEYS, max_failures: int = MAX_FAILURES) -> None:
        self._keys: OrderedDict[KeyId, Key] = OrderedDict()
        self._failed: OrderedDict[Key, None] = OrderedDict()
        self._max_keys = max_keys
        self._max_failures = max_failures
        self._payload_bytes = 0

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def failures(self) -> int:
        """How many keys are failed now, those to be retried included."""
        return len(self._failed)

    def get(self, identity: KeyId) -> Key | None:
        """The key, if it is known."""
        return self._keys.get(identity)

    def all(self) -> list[Key]:
        """Every known key at this moment."""
        return list(self._keys.values())

    def failed(self) -> list[Key]:
        """Every failed key at this moment."""
        return list(self._failed)

    def touch(self, identity: KeyId) -> Key:
        """The key, made if need be, now the most recently touched."""
        key = self._keys.get(identity)
        if key is None:
            self._keys[identity] = key = Key(identity)
            self._evict(key)
        else:
            self._keys.move_to_end(identity)
        return key

    def give_job(self, key: Key, job: Job, group: Group) -> None:
        """How the key is compiled, as the latest trace said."""
        self._payload_bytes += len(job.payload) - (len(key.job.payload) if key.job else 0)
        key.job = job
        key.group = group

    def fail(self, key: Key, text: str, group: Group, retryable: bool, now: float) -> Failure:
        """Remembers a failure; the oldest are forgotten beyond the limit, if no retry is due."""
        failure = key.failure or Failure()
        key.failure = failure
        failure.text = text[:MAX_TEXT]
        failure.groups.add(group)
        failure.tries += 1
        retried = retryable and failure.tries <= MAX_RETRIES
        failure.retry_at = now + backoff(failure.tries) if retried else None
        failure.blocked = True
        self._failed[key] = None
        self._failed.move_to_end(key)
        for _ in range(EVICTION_TRIES):
            if len(self._failed) <= self._max_failures:
                break
            oldest = next(iter(self._failed))
            if oldest.busy():
                self._failed.move_to_end(oldest)
            else:
                self.forgive(oldest)
        return failure

    def forgive(self, key: Key) -> None:
        """Forgets the key's failure."""
        key.failure = None
        self._failed.pop(key, None)

    def _evict(self, newest: Key) -> None:
        for _ in range(EVICTION_TRIES):
            if len(self._keys) <= self._max_keys and self._payload_bytes <= MAX_PAYLOAD_BYTES:
                return
            identity, oldest = next(iter(self._keys.items()))
            if oldest is newest or oldest.busy():
                self._keys.move_to_end(identity)
                continue
            del self._keys[identity]
            self._failed.pop(oldest, None)
            if oldest.job is not None:
                self._payload_bytes -= len(oldest.job.payload)
            oldest.evicted = True
            oldest.job = None
            oldest.copies.clear()
