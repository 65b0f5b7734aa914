"""Who asks for something, how urgently, and who is served next: strict priorities, fair among ranks.

The one subtle rule: nothing is ever removed from the middle of a queue. An item lies in the lane of every
rank that asks for it; whoever's turn comes first takes it, and the other entries are found stale when they
reach the front. So promotion, demotion and a rank's leaving cost a push or nothing, and each lane holds an
item at most once.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

from prefetchd.broker.types import Priority, Rank

PRIORITIES = tuple(Priority)


class Asks:
    """How often each rank asks for one thing, by priority."""

    __slots__ = ("_counts", "_levels")

    def __init__(self) -> None:
        self._counts: dict[Rank, list[int]] = {}
        # How many ranks ask at best so: the first that is not zero is the thing's own priority.
        self._levels = [0] * len(PRIORITIES)

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._counts

    def ranks(self) -> list[Rank]:
        """Everyone who asks."""
        return list(self._counts)

    def add(self, rank: Rank, priority: Priority) -> bool:
        """One more ask; whether the rank's best priority changed."""
        counts = self._counts.get(rank)
        if counts is None:
            self._counts[rank] = counts = [0] * len(PRIORITIES)
            before = None
        else:
            before = _first(counts)
        counts[priority] += 1
        return self._changed(before, _first(counts))

    def move(self, rank: Rank, old: Priority, new: Priority) -> bool:
        """An ask changes its priority; whether the rank's best priority changed."""
        counts = self._counts.get(rank)
        if counts is None or not counts[old]:
            return False
        before = _first(counts)
        counts[old] -= 1
        counts[new] += 1
        return self._changed(before, _first(counts))

    def remove(self, rank: Rank, priority: Priority) -> bool:
        """One ask less; whether the rank's best priority changed."""
        counts = self._counts.get(rank)
        if counts is None or not counts[priority]:
            return False
        before = _first(counts)
        counts[priority] -= 1
        after = _first(counts)
        if after is None:
            del self._counts[rank]
        return self._changed(before, after)

    def drop(self, rank: Rank) -> None:
        """The rank asks no more."""
        counts = self._counts.pop(rank, None)
        if counts is not None:
            self._changed(_first(counts), None)

    def best_of(self, rank: Rank) -> Priority | None:
        """The best priority at which the rank asks."""
        counts = self._counts.get(rank)
        return None if counts is None else _first(counts)

    def best(self) -> Priority | None:
        """The best priority at which anyone asks."""
        return _first(self._levels)

    def _changed(self, before: Priority | None, after: Priority | None) -> bool:
        if before is after:
            return False
        if before is not None:
            self._levels[before] -= 1
        if after is not None:
            self._levels[after] += 1
        return True


def _first(counts: list[int]) -> Priority | None:
    for priority in PRIORITIES:
        if counts[priority]:
            return priority
    return None


class Queued(Protocol):
    """What a queue may hold. `waiting`: to be handed out. `counted`: the queue's own, None at first."""

    waiting: bool
    counted: Priority | None

    @property
    def asks(self) -> Asks:
        """Who asks for it."""
        ...


Item = TypeVar("Item", bound=Queued)


class _Lane(Generic[Item]):
    """One rank's items of one priority, smallest order first."""

    __slots__ = ("heap", "members")

    def __init__(self) -> None:
        self.heap: list[tuple[tuple[float, float], int, Item]] = []
        self.members: set[Item] = set()


class FairQueue(Generic[Item]):
    """Items by priority, within a priority each rank in turn, within a rank by the order given.

    `recount` must be called after any change of an item's `waiting` or asks; it keeps `depth` true.
    """

    def __init__(self) -> None:
        self.depth = [0] * len(PRIORITIES)
        self._lanes: tuple[dict[Rank, _Lane[Item]], ...] = tuple({} for _ in PRIORITIES)
        self._turns: tuple[deque[Rank], ...] = tuple(deque() for _ in PRIORITIES)
        self._sequence = count()

    def push(self, item: Item, rank: Rank, order: tuple[float, float] = (0.0, 0.0)) -> None:
        """Puts an item where the rank asks for it now; nothing if it does not."""
        priority = item.asks.best_of(rank)
        if priority is None:
            return
        lane = self._lanes[priority].get(rank)
        if lane is None:
            self._lanes[priority][rank] = lane = _Lane()
            self._turns[priority].append(rank)
        if item not in lane.members:
            lane.members.add(item)
            heappush(lane.heap, (order, next(self._sequence), item))
        self.recount(item)

    def pop(
        self, worst: Priority = Priority.UNIVERSE, *, best: Priority = Priority.URGENT
    ) -> tuple[Item, Rank, Priority] | None:
        """The next waiting item of a priority from `best` to `worst`, no longer waiting then."""
        for priority in PRIORITIES[best : worst + 1]:
            lanes, turns = self._lanes[priority], self._turns[priority]
            while turns:
                rank = turns[0]
                item = _next_waiting(lanes[rank], rank, priority)
                if item is None:
                    turns.popleft()
                    del lanes[rank]
                    continue
                turns.rotate(-1)
                item.waiting = False
                self.recount(item)
                return item, rank, priority
        return None

    def take(self, item: Item) -> None:
        """An item out of turn: it waits no longer, and where it lies it is found stale."""
        item.waiting = False
        self.recount(item)

    def recount(self, item: Item) -> None:
        """Counts the item under its present priority if it waits, and nowhere else."""
        now = item.asks.best() if item.waiting else None
        if now is item.counted:
            return
        if item.counted is not None:
            self.depth[item.counted] -= 1
        if now is not None:
            self.depth[now] += 1
        item.counted = now

    def forget(self, rank: Rank) -> None:
        """Removes the lanes of a rank that asks for nothing any more."""
        for lanes, turns in zip(self._lanes, self._turns, strict=True):
            if lanes.pop(rank, None) is not None:
                turns.remove(rank)


def _next_waiting(lane: _Lane[Item], rank: Rank, priority: Priority) -> Item | None:
    while lane.heap:
        item = heappop(lane.heap)[2]
        lane.members.discard(item)
        if item.waiting and item.asks.best_of(rank) is priority:
            return item
    return None
