"""Compiles that engines announced and that have not ended: while one runs, ours of the same key waits.

The subtle rule: an engine may die or forget to say that it ended, so each announcement holds for a limited
time and there are never more of them than a limit.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

from prefetchd.broker.accounting import EngineCompile
from prefetchd.broker.keys import Key
from prefetchd.broker.types import Rank

# An engine that announced a compile and says nothing for so long no longer keeps others from it.
ENGINE_LIMIT_S = 600.0
# A thread compiles one kernel at a time; more open ones than this were never ended.
MAX_ENGINE_COMPILES = 10_000


class EngineCompiles:
    """The open announcements, oldest first."""

    def __init__(self, limit: int = MAX_ENGINE_COMPILES) -> None:
        self._open: OrderedDict[tuple[Key, Rank], EngineCompile] = OrderedDict()
        self._limit = limit

    def __len__(self) -> int:
        return len(self._open)

    def began(self, key: Key, rank: Rank, compile_: EngineCompile) -> list[tuple[Key, Rank]]:
        """A new announcement; those that must end to keep within the limit."""
        self._open[key, rank] = compile_
        self._open.move_to_end((key, rank))
        key.engines[rank] = compile_
        return [next(iter(self._open))] if len(self._open) > self._limit else []

    def ended(self, key: Key, rank: Rank) -> EngineCompile | None:
        """The announcement that ends, if there was one."""
        self._open.pop((key, rank), None)
        return key.engines.pop(rank, None)

    def of(self, rank: Rank) -> list[Key]:
        """The keys that this rank's engine compiles now."""
        return [key for key, name in self._open if name == rank]

    def silent(self, now: float) -> list[tuple[Key, Rank]]:
        """Announcements past their limit."""
        found = []
        for identity, compile_ in self._open.items():
            if compile_.since + ENGINE_LIMIT_S > now:
                break
            found.append(identity)
        return found

    def next_limit(self) -> float:
        """When the oldest announcement passes its limit."""
        return next((compile_.since + ENGINE_LIMIT_S for compile_ in self._open.values()), inf)
