"""What logs hold, in numbers: how much was compiled by engines, where, for what reason and at what cost.

Names come from strangers, so each table is bounded; what does not fit is counted under one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from prefetchd.shapelog.merging import MAX_VARIANTS, variant_name
from prefetchd.shapelog.reading import Problems, Unreadable, read_places
from prefetchd.shapelog.record import Ended, Line, Published, Record, Run, Started, run_of

# Rows of each table. Runs have some dozen ranks and a handful of compilers and fingerprints.
MAX_ROWS = 512
OTHERS = "(others)"


class Count(msgspec.Struct):
    """Records under one name. `seconds` is what engines' own compiles took, `hits` needed none."""

    records: int = 0
    variants: int = 0
    hits: int = 0
    late: int = 0
    unplanned: int = 0
    mismatch: int = 0
    failed: int = 0
    seconds: float = 0.0
    # Which of them can be compiled ahead: by a request, or by what rebuilds them without its provider.
    replayable: int = 0

    def add(self, record: Record, first: bool) -> None:
        """One record more; `first` for a variant not met before."""
        self.records += 1
        self.variants += first
        self.replayable += first and (record.request is not None or record.rebuild is not None)
        self.failed += not record.ok
        if record.cause == "planned":
            self.hits += 1
            return
        self.seconds += record.seconds
        setattr(self, record.cause, getattr(self, record.cause) + 1)


class LogStats(msgspec.Struct):
    """The figures of several logs."""

    files: int = 0
    bytes: int = 0
    total: Count = msgspec.field(default_factory=Count)
    published: int = 0
    # Compiles that began and never ended.
    unfinished: int = 0
    unreadable: int = 0
    # The first of the lines that could not be read.
    problems: list[str] = []
    # Seconds since 1970 of the first and the last record; 0 without any.
    first: float = 0.0
    last: float = 0.0
    compilers: dict[str, Count] = {}
    ranks: dict[str, Count] = {}
    fingerprints: dict[str, Count] = {}


def log_stats(paths: Iterable[Path], advance: Callable[[int], None] = lambda size: None) -> LogStats:
    """Reads all of them once; `advance` hears the bytes of each line. Raises `LogUnusable`."""
    stats, problems = LogStats(), Problems()
    seen: set[bytes] = set()
    for path in paths:
        stats.files += 1
        running: set[Run] = set()
        for line, place in read_places(path):
            stats.bytes += place.size
            advance(place.size)
            if isinstance(line, Unreadable):
                problems.add(line)
            else:
                _add(stats, line, seen, running)
        stats.unfinished += len(running)
    stats.unreadable, stats.problems = problems.count, problems.first
    return stats


def _add(stats: LogStats, line: Line, seen: set[bytes], running: set[Run]) -> None:
    match line:
        case Record():
            name = variant_name(line)
            first = name not in seen
            # Beyond the bound a variant is taken for a known one: the figures are too low, memory is not.
            if first and len(seen) < MAX_VARIANTS:
                seen.add(name)
            _add_record(stats, line, first and name in seen)
        case Started():
            if len(running) < MAX_VARIANTS:
                running.add(run_of(line))
        case Ended():
            running.discard(run_of(line))
        case Published():
            stats.published += 1


def _add_record(stats: LogStats, record: Record, first: bool) -> None:
    rank = f"{record.host}:{record.rank}"
    for table, name in (
        (stats.compilers, record.compiler),
        (stats.ranks, rank),
        (stats.fingerprints, record.fingerprint),
    ):
        row = name if name in table or len(table) < MAX_ROWS else OTHERS
        table.setdefault(row, Count()).add(record, first)
    stats.total.add(record, first)
    stats.first = min(stats.first or record.at, record.at)
    stats.last = max(stats.last, record.at)
