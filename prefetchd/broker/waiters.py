"""Queries about keys, and engines that wait for one: each is answered exactly once, whatever happens.

A query asks the disk again before it is answered. One that waits makes its keys urgent for as long as it
waits. The subtle rule: an answer depends on nothing that could fail to come - a key that fails, a rank that
leaves, a silent disk and the time limit all end it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from prefetchd.broker.job_queue import JobQueue
from prefetchd.broker.keys import Key, KeyTable
from prefetchd.broker.ranks import Ranks, RankState
from prefetchd.broker.timers import Timers
from prefetchd.broker.types import Answer, KeyId, KeyStatus, Priority, Rank

# Queries open at a time; a thread has one. Beyond it they are answered at once by what is known.
MAX_WAITERS = 10_000
# A look at a disk takes well below a millisecond; after this long the answer is what is known.
DISK_LIMIT_S = 1.0
# No engine waits longer than this for anything of ours.
MAX_WAIT_S = 60.0


class Waiter:
    """One open query."""

    __slots__ = ("asked", "ids", "pending", "rank", "since", "token", "until", "waits")

    def __init__(
        self, rank: RankState, token: Hashable, ids: tuple[KeyId, ...], now: float, until: float | None
    ) -> None:
        self.rank = rank
        self.token = token
        self.ids = ids
        self.since = now
        # Whether it waits for the keys, or only for the disk.
        self.waits = until is not None
        self.until = now + DISK_LIMIT_S if until is None else min(until, now + MAX_WAIT_S)
        self.pending: dict[Key, None] = {}
        self.asked: set[Key] = set()


class Waiters:
    """The open queries, and the answers that have not been taken yet."""

    def __init__(self, keys: KeyTable, ranks: Ranks, jobs: JobQueue, limit: int = MAX_WAITERS) -> None:
        self._keys = keys
        self._ranks = ranks
        self._jobs = jobs
        self._limit = limit
        self._open: set[Waiter] = set()
        self._limits: Timers[Waiter] = Timers(lambda waiter, _: waiter in self._open)
        self.answers: deque[Answer] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def query(
        self, name: Rank, token: Hashable, ids: Sequence[KeyId], now: float, until: float | None
    ) -> None:
        """Answers now or later, and by `until` at the latest."""
        rank = self._ranks.get(name)
        if rank is None:
            unknown = tuple(KeyStatus(*identity, "unknown") for identity in ids)
            self.answers.append(Answer(rank=name, token=token, keys=unknown))
            return
        waiter = Waiter(rank, token, tuple(ids), now, until)
        if len(self._open) >= self._limit or waiter.until <= now:
            self._close(waiter, now, timed_out=True)
            return
        self._open.add(waiter)
        rank.waiters[waiter] = None
        self._limits.push(waiter.until, waiter)
        for identity in dict.fromkeys(ids):
            key = self._keys.get(identity)
            if key is not None:
                self._watch(waiter, key)
        for key in list(waiter.pending):
            self._look(waiter, key)
        if not waiter.pending:
            self._close(waiter, now, timed_out=False)

    def changed(self, key: Key, now: float) -> None:
        """Something about the key is different: whose answer is complete gets it."""
        for waiter in list(key.waiters):
            self._look(waiter, key)
            if not waiter.pending and waiter in self._open:
                self._close(waiter, now, timed_out=False)

    def leave(self, rank: RankState, now: float) -> None:
        """The rank is gone; its queries end."""
        for waiter in list(rank.waiters):
            self._close(waiter, now, timed_out=True)

    def tick(self, now: float) -> float:
        """Answers those whose time is over; when to come again."""
        for waiter in self._limits.due(now):
            if waiter in self._open:
                self._close(waiter, now, timed_out=True)
        return self._limits.next_at()

    def status(self, rank: RankState, identity: KeyId) -> KeyStatus:
        """The key as this rank's engine would meet it, by what is known."""
        key = self._keys.get(identity)
        roots = rank.roots(identity[0])
        if key is None:
            return KeyStatus(*identity, "unknown")
        if key.published_in(roots):
            return KeyStatus(*identity, "published")
        if key.failure is not None or key.failed_in(roots):
            return KeyStatus(*identity, "failed", key.failure_text(roots))
        if key.flight is not None or key.engines:
            return KeyStatus(*identity, "compiling")
        return KeyStatus(*identity, "missing" if key.job is not None else "unknown")

    def _watch(self, waiter: Waiter, key: Key) -> None:
        waiter.pending[key] = None
        key.waiters[waiter] = None
        self._jobs.recheck(key, waiter.rank)
        if waiter.waits and self._jobs.ask(key, waiter.rank, Priority.URGENT, waiter.until):
            waiter.asked.add(key)

    def _look(self, waiter: Waiter, key: Key) -> None:
        """Takes the key off the waiter's list if its answer is final."""
        roots = waiter.rank.roots(key.id[0])
        if any((copy := key.copies.get(root)) is not None and copy.checking for root in roots):
            return
        state = self.status(waiter.rank, key.id).state
        # A failed key that is to be retried keeps nobody waiting.
        if waiter.waits and roots and state in ("missing", "compiling"):
            return
        self._unwatch(waiter, key)

    def _unwatch(self, waiter: Waiter, key: Key) -> None:
        waiter.pending.pop(key, None)
        key.waiters.pop(waiter, None)
        if key in waiter.asked:
            waiter.asked.discard(key)
            self._jobs.unask(key, waiter.rank, Priority.URGENT)

    def _close(self, waiter: Waiter, now: float, *, timed_out: bool) -> None:
        for key in list(waiter.pending):
            self._unwatch(waiter, key)
        self._open.discard(waiter)
        waiter.rank.waiters.pop(waiter, None)
        keys = tuple(self.status(waiter.rank, identity) for identity in waiter.ids)
        self.answers.append(Answer(rank=waiter.rank.name, token=waiter.token, keys=keys, timed_out=timed_out))
        if waiter.waits and waiter.ids:
            waiter.rank.account.waited(waiter.ids[0][0], now - waiter.since)
