"""From an ask for a key to its being published in every root that was asked for, or failed.

Single flight: a key is compiled once on this node, whoever asks, and an engine that compiles it inline counts
as the one who does. The steps are ask the disk, compile into one root, publish into the others; `_advance`
decides the next one from what is known, and is the only place that does. Whatever ends a step - success,
failure, a lost process - comes back here, so that no ask is left without a next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Protocol

from prefetchd.broker.accounting import EngineCompile
from prefetchd.broker.asks import FairQueue
from prefetchd.broker.engine_compiles import EngineCompiles
from prefetchd.broker.keys import MAX_COPIES, MAX_RETRIES, MAX_TEXT, Copy, CopyState, Key, KeyTable, backoff
from prefetchd.broker.ranks import Ranks, RankState
from prefetchd.broker.timers import Timers
from prefetchd.broker.types import Check, Compile, End, Priority, Publish, Rank, Root, Slots

# A background compile takes up to minutes; on more slots than one, what is scheduled to run finds one free.
RESERVED_SLOTS = 1


class Listener(Protocol):
    """Who is told what becomes of the keys."""

    def key_settled(self, key: Key, rank: Rank, now: float) -> None:
        """Nothing more will be done on the key for this rank, which had asked."""
        ...

    def key_changed(self, key: Key, now: float) -> None:
        """An answer about the key may differ from the last one."""
        ...

    def key_lost(self, key: Key, rank: RankState, now: float) -> None:
        """The rank had planned the key and does not ask now, but a root of it may not hold the key."""
        ...


class JobQueue:
    """The keys that somebody asks for, and the work on them."""

    def __init__(self, keys: KeyTable, ranks: Ranks, listener: Listener) -> None:
        self._keys = keys
        self._ranks = ranks
        self._listener = listener
        self.compiles: FairQueue[Key] = FairQueue()
        self.publishes: FairQueue[Copy] = FairQueue()
        self.engines = EngineCompiles()
        self._checks: deque[Copy] = deque()
        self._audits: dict[Rank, Iterator[Copy]] = {}
        self._retries: Timers[Key | Copy] = Timers(lambda item, due: _retry_at(item) == due)
        self.checking = 0
        self.compiling = 0
        self.publishing = 0
        self._in_background = 0
        self.compiled_total = 0
        self.found_total = 0
        self.failures_total = 0
        self.published_total = 0

    @property
    def busy(self) -> bool:
        """Whether anything is handed out or a look at the disk is still to come."""
        return bool(self.compiling or self.publishing or self.checking or self._audits)

    # Asking.

    def ask(self, key: Key, rank: RankState, priority: Priority, deadline: float | None = None) -> bool:
        """The rank asks for the key; False if nothing can be done for it (published, failed, no root)."""
        if self.is_settled(key, rank):
            return False
        roots = rank.roots(key.id[0])
        if deadline is not None:
            key.deadline = min(key.deadline, deadline)
        changed = key.asks.add(rank.name, priority)
        if self._add_roots(key, roots) or changed:
            self._advance(key, rank)
        return True

    def is_settled(self, key: Key, rank: RankState) -> bool:
        """Whether nothing can be done for the rank any more: published, failed, or no root to put it."""
        roots = rank.roots(key.id[0])
        return not roots or key.failed_in(roots) or key.published_in(roots)

    def move(self, key: Key, rank: RankState, old: Priority, new: Priority) -> None:
        """An ask of the rank changed its priority."""
        if key.asks.move(rank.name, old, new):
            self._advance(key, rank)

    def unask(self, key: Key, rank: RankState, priority: Priority) -> None:
        """An ask of the rank ended; it may have others."""
        if key.asks.remove(rank.name, priority):
            self._advance(key, rank)

    def drop(self, key: Key, rank: Rank) -> None:
        """The rank is gone: what nobody else asks for is not worked on."""
        key.asks.drop(rank)
        self._advance(key)

    def moved(self, key: Key, rank: RankState, now: float) -> None:
        """The rank, which asks for the key, has other roots than before."""
        self._add_roots(key, rank.roots(key.id[0]))
        self._settle(key, now, built=False)
        self._advance(key, rank)

    def leave(self, rank: RankState, now: float) -> None:
        """The rank is gone, and its engine with all that it compiled."""
        self._audits.pop(rank.name, None)
        self.compiles.forget(rank.name)
        self.publishes.forget(rank.name)
        for key in self.engines.of(rank.name):
            self.engine_ended(key, rank.name, now)

    def retry(self, key: Key, now: float) -> None:
        """Somebody asks for what failed to be tried again at once."""
        for copy in key.copies.values():
            copy.tries, copy.retry_at, copy.text = 0, None, ""
            if copy.state is CopyState.FAILED:
                copy.state = CopyState.ABSENT
        self.forgive(key, now)
        self._advance(key)
        self._listener.key_changed(key, now)

    def forgive(self, key: Key, now: float) -> None:
        """A failure holds no longer: whoever had planned the key gets it after all."""
        self._keys.forgive(key)
        for rank in list(self._ranks.attached.values()):
            if key.planned & rank.account.bit and rank.name not in key.asks:
                self._listener.key_lost(key, rank, now)

    # The disk.

    def recheck(self, key: Key, rank: RankState) -> bool:
        """Asks the disk again what the rank's roots hold; False if it has none."""
        roots = rank.roots(key.id[0])
        self._add_roots(key, roots)
        for root in roots:
            copy = key.copies[root]
            if copy.state is CopyState.ABSENT:
                # Nothing is begun on an old answer.
                copy.state = CopyState.UNCHECKED
            self._check(copy)
        self._advance(key)
        return bool(roots)

    def audit(self, rank: RankState) -> None:
        """Asks the disk about all that a rank once had, as long as nothing else is to be asked."""
        self._audits[rank.name] = self._served_copies(rank)

    def next_checks(self, limit: int) -> list[Check]:
        """Up to so many questions for the disk."""
        checks: list[Check] = []
        while len(checks) < limit:
            if self._checks:
                copy = self._checks.popleft()
            elif self._audits:
                name, copies = next(iter(self._audits.items()))
                audited = next(copies, None)
                if audited is None:
                    del self._audits[name]
                    continue
                copy = audited
            else:
                break
            checks.append(Check(*copy.key.id, copy.root))
        return checks

    def checked(self, check: Check, present: bool, now: float) -> None:
        """What the disk holds; out of date when we have published there since."""
        key = self._keys.get((check.compiler, check.key))
        copy = key.copies.get(check.root) if key else None
        if key is None or copy is None or not copy.checking:
            return
        self._checked(copy)
        before = copy.state
        if present and before is not CopyState.PUBLISHING:
            copy.is_published(now)
            if key.failure is not None:
                self.forgive(key, now)
        elif not present and before in (CopyState.UNCHECKED, CopyState.PUBLISHED, CopyState.ABSENT):
            # Also what was absent before: a rank that has moved there may not have been one of its users.
            copy.state = CopyState.ABSENT
            self._report_loss(copy, now)
        self._settle(key, now, built=False)
        self._advance(key)
        self._listener.key_changed(key, now)

    # Compiling.

    def next_compile(self, slots: Slots) -> Compile | None:
        """The next job for a free slot. Background work leaves `RESERVED_SLOTS` of several to the rest."""
        if slots.free <= 0:
            return None
        reserved = RESERVED_SLOTS if slots.total > RESERVED_SLOTS else 0
        full = self._in_background >= slots.total - reserved
        while (taken := self.compiles.pop(Priority.BATCH if full else Priority.UNIVERSE)) is not None:
            key, name, priority = taken
            rank = self._ranks.get(name)
            root = self._absent(key, rank.roots(key.id[0]) if rank else ())
            if root is None or key.job is None:
                continue
            key.flight = Compile(job=key.job, group=key.group, root=root, priority=priority)
            self.compiling += 1
            self._in_background += priority > Priority.BATCH
            return key.flight
        return None

    def compiled(self, work: Compile, end: End, now: float) -> None:
        """How a compile ended: published in its root, or failed. Only what is in flight can end."""
        key = self._keys.get((work.job.compiler, work.job.key))
        if key is None or key.flight is not work:
            return
        key.flight = None
        self.compiling -= 1
        self._in_background -= work.priority > Priority.BATCH
        if end.ok:
            self._mark_published(key.copies[work.root], now)
            if key.failure is not None:
                self.forgive(key, now)
            key.compiled = not end.found
            self.compiled_total += not end.found
            self.found_total += end.found
        else:
            self.failures_total += 1
            failure = self._keys.fail(key, end.text, work.group, end.retryable, now)
            if failure.retry_at is not None:
                self._retries.push(failure.retry_at, key)
        self._settle(key, now, built=key.compiled)
        self._advance(key)
        self._listener.key_changed(key, now)

    def engine_began(self, key: Key, rank: Rank, compile_: EngineCompile, now: float) -> None:
        """An engine compiles the key inline: nobody else starts to."""
        for other, name in self.engines.began(key, rank, compile_):
            self.engine_ended(other, name, now)
        self._advance(key)

    def engine_ended(self, key: Key, rank: Rank, now: float) -> EngineCompile | None:
        """An engine's compile ended, well or not, or the engine did: the disk says what it left."""
        compile_ = self.engines.ended(key, rank)
        if compile_ is not None:
            state = self._ranks.get(rank)
            if state is None or not self.recheck(key, state):
                self._advance(key)
            self._listener.key_changed(key, now)
        return compile_

    def renamed(self, old: Key, new: Key, now: float) -> None:
        """What engines compile under another name is this key: nobody else starts to."""
        for name in list(old.engines):
            compile_ = self.engines.ended(old, name)
            if compile_ is not None and name not in new.engines:
                self.engine_began(new, name, compile_, now)

    # Publishing.

    def next_publish(self) -> Publish | None:
        """The next copy to make from one root into another."""
        while (taken := self.publishes.pop()) is not None:
            copy, _, priority = taken
            source = copy.key.source()
            if source is None or copy.key.job is None or not self._may_publish(copy):
                continue
            copy.state = CopyState.PUBLISHING
            self.publishing += 1
            return Publish(
                job=copy.key.job, group=copy.key.group, source=source, root=copy.root, priority=priority
            )
        return None

    def published(self, work: Publish, end: End, now: float) -> None:
        """How a publish ended."""
        key = self._keys.get((work.job.compiler, work.job.key))
        copy = key.copies.get(work.root) if key else None
        if key is None or copy is None or copy.state is not CopyState.PUBLISHING:
            return
        self.publishing -= 1
        if end.ok:
            self._mark_published(copy, now)
            self.published_total += 1
        elif end.source_gone:
            copy.state = CopyState.ABSENT
            source = self._copy(key, work.source)
            source.state = CopyState.UNCHECKED
            self._check(source)
        else:
            self._publish_failed(copy, end, now)
        self._settle(key, now, built=key.compiled)
        self._advance(key)
        self._listener.key_changed(key, now)

    def tick(self, now: float) -> float:
        """Starts the retries that are due and lets go of silent engines; when to come again."""
        for item in self._retries.due(now):
            if isinstance(item, Copy):
                item.retry_at = None
                self._advance(item.key)
            elif item.failure is not None:
                item.failure.blocked = False
                self._advance(item)
        for key, rank in self.engines.silent(now):
            self.engine_ended(key, rank, now)
        return min(self._retries.next_at(), self.engines.next_limit())

    # What follows from what is known.

    def _advance(self, key: Key, rank: RankState | None = None) -> None:
        """Decides the next step. With `rank`, nothing but that rank's ask has changed."""
        asked = bool(key.asks)
        if not asked:
            key.deadline = inf
        published = key.source() is not None
        before = key.waiting
        key.waiting = (
            asked
            and not published
            and key.job is not None
            and key.flight is None
            and not key.engines
            and (key.failure is None or not key.failure.blocked)
            and not any(copy.state is CopyState.UNCHECKED for copy in key.copies.values())
        )
        if key.waiting and key.job is not None:
            order = (key.deadline, -key.job.cost)
            for name in (rank.name,) if rank is not None and before else key.asks.ranks():
                self.compiles.push(key, name, order)
        self.compiles.recount(key)
        for copy in key.copies.values():
            before = copy.waiting
            copy.waiting = asked and published and self._may_publish(copy)
            if copy.waiting:
                users = [rank] if rank is not None and before else self._ranks.users(key.id[0], copy.root)
                for user in users:
                    if copy.root in user.roots(key.id[0]):
                        self.publishes.push(copy, user.name, (key.deadline, 0.0))
            if before or copy.waiting:
                self.publishes.recount(copy)

    def _settle(self, key: Key, now: float, *, built: bool) -> None:
        """Ends the asks of every rank for which nothing more is to be done."""
        for name in key.asks.ranks():
            rank = self._ranks.attached[name]
            roots = rank.roots(key.id[0])
            if key.published_in(roots):
                (rank.account.built if built else rank.account.on_disk)(key)
            elif roots and not key.failed_in(roots):
                continue
            key.asks.drop(name)
            self._listener.key_settled(key, name, now)

    def _report_loss(self, copy: Copy, now: float) -> None:
        key = copy.key
        for rank in self._ranks.users(key.id[0], copy.root):
            if key.served(rank.account.bit) and rank.name not in key.asks:
                self._listener.key_lost(key, rank, now)

    def _may_publish(self, copy: Copy) -> bool:
        flight = copy.key.flight
        return (
            copy.state is CopyState.ABSENT
            and copy.retry_at is None
            # What is compiled into a root needs no copy there; two ends of one copy would be one too many.
            and (flight is None or flight.root != copy.root)
            and self._ranks.uses(copy.key.id[0], copy.root)
        )

    def _absent(self, key: Key, preferred: tuple[Root, ...]) -> Root | None:
        """Where to compile into: a root of the rank whose turn it is, else of another that asks."""
        others = [root for root in key.copies if root not in preferred]
        for root in (*preferred, *others):
            copy = key.copies.get(root)
            if copy is not None and self._may_publish(copy):
                return root
        return None

    def _mark_published(self, copy: Copy, now: float) -> None:
        copy.is_published(now)
        copy.tries, copy.text = 0, ""
        self._checked(copy)

    def _publish_failed(self, copy: Copy, end: End, now: float) -> None:
        self.failures_total += 1
        copy.tries += 1
        copy.text = end.text[:MAX_TEXT]
        if end.retryable and copy.tries <= MAX_RETRIES:
            copy.state = CopyState.ABSENT
            copy.retry_at = now + backoff(copy.tries)
            self._retries.push(copy.retry_at, copy)
        else:
            copy.state = CopyState.FAILED

    def _add_roots(self, key: Key, roots: tuple[Root, ...]) -> bool:
        fresh = [root for root in roots if root not in key.copies]
        for root in fresh:
            self._check(self._copy(key, root))
        return bool(fresh)

    def _copy(self, key: Key, root: Root) -> Copy:
        """The key's copy in the root; beyond a limit, those in roots that nobody uses are forgotten."""
        copy = key.copies.get(root)
        if copy is None:
            if len(key.copies) >= MAX_COPIES:
                for other in [each for each in key.copies.values() if self._useless(each)]:
                    del key.copies[other.root]
            key.copies[root] = copy = Copy(key, root)
        return copy

    def _useless(self, copy: Copy) -> bool:
        if copy.checking or copy.state is CopyState.PUBLISHING or copy.root == copy.key.source():
            return False
        flight = copy.key.flight
        return (flight is None or flight.root != copy.root) and not self._ranks.uses(
            copy.key.id[0], copy.root
        )

    def _check(self, copy: Copy) -> None:
        if not copy.checking:
            copy.checking = True
            self.checking += 1
            self._checks.append(copy)

    def _checked(self, copy: Copy) -> None:
        if copy.checking:
            copy.checking = False
            self.checking -= 1

    def _served_copies(self, rank: RankState) -> Iterator[Copy]:
        for key in self._keys.all():
            if self._ranks.get(rank.name) is not rank:
                return
            if key.evicted or not key.served(rank.account.bit):
                continue
            for root in rank.roots(key.id[0]):
                copy = self._copy(key, root)
                if not copy.checking:
                    copy.checking = True
                    self.checking += 1
                    yield copy


def _retry_at(item: Key | Copy) -> float | None:
    if isinstance(item, Copy):
        return item.retry_at
    return item.failure.retry_at if item.failure is not None and item.failure.blocked else None
