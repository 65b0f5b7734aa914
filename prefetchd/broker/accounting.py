"""What each rank got for its plans: planned, hit, late, unplanned, wasted, and its engine's own compiles.

Each rank has a bit; each key holds one mask a class, so that 200,000 keys times a thousand ranks fit and a
variant is counted once a rank. The one subtle rule: an engine event for a key nobody planned says nothing yet
while requests of that rank are still to be traced, since the key may be among theirs. Such events stay
*undecided* until it is (late) or nothing is left to trace (unplanned); so counters only ever rise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from copy import deepcopy

from prefetchd.broker.keys import Key, KeyTable
from prefetchd.broker.types import Counts, Rank, Reason, Root

# Names of ranks remembered, with their figures; a node has tens, and a restarted engine brings them back.
MAX_RANKS = 1024
# Beyond it the oldest are decided as unplanned; a first step of an engine without us has some hundred.
MAX_UNDECIDED = 2_000


class EngineCompile:
    """One compile in an engine, from its begin; `reason` is None while it is undecided."""

    __slots__ = ("key", "reason", "seconds", "since")

    def __init__(self, key: Key, since: float) -> None:
        self.key = key
        self.since = since
        self.reason: Reason | None = None
        # Known at its end.
        self.seconds = 0.0


class Account:
    """One rank's figures and what is undecided. `to_trace` counts its requests and universes not traced."""

    def __init__(self, rank: Rank, bit: int) -> None:
        self.rank = rank
        self.bit = bit
        self.counts: dict[str, Counts] = {}
        self.to_trace = 0
        self._undecided: OrderedDict[Key, tuple[float, EngineCompile | None]] = OrderedDict()

    def of(self, compiler: str) -> Counts:
        """The figures for one compiler."""
        counts = self.counts.get(compiler)
        if counts is None:
            self.counts[compiler] = counts = Counts()
        return counts

    def snapshot(self) -> dict[str, Counts]:
        """A copy of the figures, by compiler."""
        return {compiler: deepcopy(counts) for compiler, counts in self.counts.items()}

    def planned(self, key: Key, since: float) -> None:
        """A request of this rank, asked for at `since`, turned out to need the key."""
        event = self._undecided.get(key)
        if event is not None and since <= event[0]:
            self._decide(key, "late")
        if not key.planned & self.bit:
            key.planned |= self.bit
            self.of(key.id[0]).planned += 1

    def on_disk(self, key: Key) -> None:
        """All of the rank's roots held the key when it planned or used it."""
        if not key.hit & self.bit:
            key.hit |= self.bit
            self.of(key.id[0]).hits += 1

    def built(self, key: Key) -> None:
        """The key was compiled here for this rank among others."""
        if not (key.used | key.unused) & self.bit:
            key.unused |= self.bit
            self.of(key.id[0]).wasted += 1

    def used(self, key: Key, now: float) -> None:
        """The rank's engine found the key on disk and used it."""
        if key.unused & self.bit:
            key.unused &= ~self.bit
            self.of(key.id[0]).wasted -= 1
        if key.used & self.bit:
            return
        key.used |= self.bit
        if key.planned:
            self.on_disk(key)
        else:
            self._undecide(key, now, None)

    def compiling(self, key: Key, roots: tuple[Root, ...], began: float, daemon_down: bool) -> EngineCompile:
        """The rank's engine began to compile the key, at a moment that may have passed for some time."""
        compile_ = EngineCompile(key, began)
        reason = _reason(key, roots, began, daemon_down)
        if reason is None:
            self._undecide(key, began, compile_)
        else:
            self._count(compile_, reason)
        return compile_

    def compiled(self, compile_: EngineCompile, seconds: float) -> None:
        """The end of an engine's compile."""
        compile_.seconds = seconds
        if compile_.reason is not None:
            figures = self.of(compile_.key.id[0]).engine_seconds
            figures[compile_.reason] = figures.get(compile_.reason, 0.0) + seconds

    def renamed(self, old: Key, new: Key) -> None:
        """What an event named otherwise is this key: it waits for the same decision under its own name."""
        event = self._undecided.get(old)
        if event is None:
            return
        if new in self._undecided:
            # Two events of one key: this one is decided by itself.
            self._decide(old, "unplanned")
            return
        del self._undecided[old]
        self._undecided[new] = event
        if event[1] is not None:
            event[1].key = new

    def waited(self, compiler: str, seconds: float) -> None:
        """An engine waited so long for a key of this compiler."""
        counts = self.of(compiler)
        counts.waits += 1
        counts.wait_seconds += seconds

    def settle_undecided(self) -> None:
        """Nothing is left to trace for this rank: what was not planned by now was not planned."""
        while self._undecided:
            self._decide(next(iter(self._undecided)), "unplanned")

    def _undecide(self, key: Key, now: float, compile_: EngineCompile | None) -> None:
        if key in self._undecided:
            # Used and compiled, or compiled twice: decide the first, the second is an event of its own.
            self._decide(key, "unplanned")
        self._undecided[key] = (now, compile_)
        self.of(key.id[0]).undecided += 1
        if not self.to_trace:
            self._decide(key, "unplanned")
        elif len(self._undecided) > MAX_UNDECIDED:
            self._decide(next(iter(self._undecided)), "unplanned")

    def _decide(self, key: Key, reason: Reason) -> None:
        _, compile_ = self._undecided.pop(key)
        self.of(key.id[0]).undecided -= 1
        if compile_ is not None:
            self._count(compile_, reason)
        elif reason == "late":
            # It was planned in time, and the engine found it on disk.
            self.on_disk(key)
        else:
            self._once(key, reason)

    def _count(self, compile_: EngineCompile, reason: Reason) -> None:
        compile_.reason = reason
        counts = self.of(compile_.key.id[0])
        counts.engine_compiles[reason] = counts.engine_compiles.get(reason, 0) + 1
        if compile_.seconds:
            counts.engine_seconds[reason] = counts.engine_seconds.get(reason, 0.0) + compile_.seconds
        if reason == "mismatch":
            counts.mismatch += 1
        self._once(compile_.key, reason)

    def _once(self, key: Key, reason: Reason) -> None:
        """Counts a late or unplanned variant the first time the rank meets it so."""
        if reason == "late" and not key.late & self.bit:
            key.late |= self.bit
            self.of(key.id[0]).late += 1
        elif reason == "unplanned" and not key.unplanned & self.bit:
            key.unplanned |= self.bit
            self.of(key.id[0]).unplanned += 1


def _reason(key: Key, roots: tuple[Root, ...], began: float, daemon_down: bool) -> Reason | None:
    """Why an engine compiles a key; None if nobody planned it so far."""
    if daemon_down:
        return "daemon_down"
    if not key.planned:
        return None
    if key.failure is not None:
        return "failed"
    # It lay where the engine said it looks, and the engine did not see it: it looks elsewhere. What was found
    # there only since is likely the engine's own.
    return "mismatch" if key.published_in(roots, began) else "late"


class Accounts:
    """The accounts of every rank seen, by name; the longest gone are forgotten beyond `MAX_RANKS`."""

    def __init__(self, max_ranks: int = MAX_RANKS) -> None:
        self._accounts: OrderedDict[Rank, Account] = OrderedDict()
        self._free = [1 << slot for slot in reversed(range(max_ranks))]

    def get(self, rank: Rank) -> Account | None:
        """The rank's account, if it was opened."""
        return self._accounts.get(rank)

    def all(self) -> list[Account]:
        """Every account."""
        return list(self._accounts.values())

    def open(self, rank: Rank, attached: Container[Rank], keys: KeyTable) -> Account | None:
        """The rank's account, new or as it was; None if every account belongs to an attached rank.

        To give a new rank the bit of a forgotten one, that bit is cleared in all `keys`.
        """
        account = self._accounts.get(rank)
        if account is None:
            if not self._free and not self._forget_one(attached, keys):
                return None
            self._accounts[rank] = account = Account(rank, self._free.pop())
        self._accounts.move_to_end(rank)
        return account

    def _forget_one(self, attached: Container[Rank], keys: KeyTable) -> bool:
        gone = next((account for rank, account in self._accounts.items() if rank not in attached), None)
        if gone is None:
            return False
        del self._accounts[gone.rank]
        self._free.append(gone.bit)
        for key in keys.all():
            for mask in ("planned", "hit", "late", "unplanned", "used", "unused"):
                setattr(key, mask, getattr(key, mask) & ~gone.bit)
        return True
