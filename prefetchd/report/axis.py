"""Time on a page: logs cover days, of which engines compile for minutes, so idle time is left out.

The axis is a row of *stretches*, each a while in which something happened, side by side and as wide as they
last. It is divided into columns, and whatever is counted over time is counted by column: the size of the page
does not depend on how many records there are.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

# What happens within so many seconds of each other belongs to one stretch.
IDLE_S = 600.0
# Times beyond are no times of a log (2001 and 2096): a clock that was not set, or harm.
EARLIEST, LATEST = 1e9, 4e9
# Stretches shown, the last ones. Each is one start of an engine or a change of its load.
MAX_STRETCHES = 12
# A short stretch beside a long one is still seen.
LEAST_SHARE = 0.04
# Buckets in which it is noted that something happened, before they are made twice as long.
MAX_BUCKETS = 100_000


class Stretch(NamedTuple):
    """From when to when, and where it lies on the axis, of which the whole is 1."""

    begin: float
    end: float
    left: float
    right: float


class Busy:
    """When anything happened, in buckets, in bounded memory."""

    def __init__(self) -> None:
        self._length = 1.0
        self._buckets: set[int] = set()

    def add(self, begin: float, end: float) -> bool:
        """Notes both ends; whether they are times that can be shown."""
        if not EARLIEST < begin <= end < LATEST:
            return False
        self._buckets.update((int(begin // self._length), int(end // self._length)))
        while len(self._buckets) > MAX_BUCKETS:
            self._length *= 2
            self._buckets = {bucket // 2 for bucket in self._buckets}
        return True

    def axis(self) -> Axis:
        """The stretches in which something happened."""
        spans: list[tuple[float, float]] = []
        idle = max(IDLE_S, 2 * self._length)
        for bucket in sorted(self._buckets):
            begin, end = bucket * self._length, (bucket + 1) * self._length
            if spans and begin - spans[-1][1] <= idle:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((begin, end))
        return Axis(spans[-MAX_STRETCHES:], len(spans) - MAX_STRETCHES)


class Axis:
    """Where a time lies. `left_out`: earlier stretches that are not shown."""

    def __init__(self, spans: list[tuple[float, float]], left_out: int = 0) -> None:
        self.left_out = max(left_out, 0)
        total = sum(end - begin for begin, end in spans)
        wide = 1 - LEAST_SHARE * len(spans)
        self.stretches: list[Stretch] = []
        left = 0.0
        for begin, end in spans:
            right = left + LEAST_SHARE + wide * (end - begin) / total
            self.stretches.append(Stretch(begin, end, left, right))
            left = right
        self._begins = [stretch.begin for stretch in self.stretches]

    def place(self, at: float) -> float | None:
        """From 0 to 1; None for a time that is not shown."""
        index = bisect_right(self._begins, at) - 1
        if index < 0 or at > self.stretches[index].end:
            return None
        stretch = self.stretches[index]
        share = (at - stretch.begin) / (stretch.end - stretch.begin)
        return stretch.left + share * (stretch.right - stretch.left)

    def column(self, at: float, columns: int) -> int | None:
        """Which of so many columns it falls into."""
        place = self.place(at)
        return None if place is None else min(int(place * columns), columns - 1)
