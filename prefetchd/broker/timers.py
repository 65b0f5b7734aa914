"""Things that fall due: a heap in which what is no longer awaited is left lying, but never for the most part.

The subtle rule: an entry is out of date when `live` says so at its time. So that a flood of short-lived
things cannot fill the memory, the heap is swept whenever it has doubled.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeVar

Item = TypeVar("Item")

# Below this size a sweep is not worth its time.
SMALLEST_SWEEP = 1024


class Timers(Generic[Item]):
    """Items with the moment at which they fall due."""

    def __init__(self, live: Callable[[Item, float], bool]) -> None:
        self._live = live
        self._heap: list[tuple[float, int, Item]] = []
        self._sequence = count()
        self._sweep_at = SMALLEST_SWEEP

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, at: float, item: Item) -> None:
        """The item falls due then."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if self._live(entry[2], entry[0])]
            heapify(self._heap)
            self._sweep_at = max(SMALLEST_SWEEP, 2 * len(self._heap))
        heappush(self._heap, (at, next(self._sequence), item))

    def due(self, now: float) -> list[Item]:
        """Takes out what has fallen due and is still awaited."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            at, _, item = heappop(self._heap)
            if self._live(item, at):
                found.append(item)
        return found

    def next_at(self) -> float:
        """When to look again; infinity if nothing is awaited."""
        return self._heap[0][0] if self._heap else inf
