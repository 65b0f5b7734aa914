"""From logs to the figures of a report, in two readings and in memory that does not grow with the logs.

The first reading learns what each variant costs and when anything happened; the second places each event on
the axis that follows from it. The subtle rule is *avoided*: a variant that was ready cost nothing, so what
it would have cost is known only where some engine, or the publisher, was seen to compile it. Where nobody
was, the hit is counted and no seconds are made up for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from heapq import heappush, heappushpop
from pathlib import Path
from typing import NamedTuple

from prefetchd.report.axis import Axis, Busy
from prefetchd.shapelog import Ended, Line, Problems, Published, Record, Started, read_log
from prefetchd.shapelog.reading import Unreadable, read_places
from prefetchd.shapelog.record import Run, run_of

# Columns over time: as many as a screen can tell apart.
COLUMNS = 240
# Ranks with a lane of their own, those that waited longest; the others share one.
MAX_LANES = 64
OTHERS = "(others)"
# Compiles drawn one by one, the dearest; all of them are in the columns.
MAX_BARS = 1000
# Names from logs that are kept while reading.
MAX_VARIANTS, MAX_SITES, MAX_RANKS, MAX_RUNNING = 250_000, 10_000, 10_000, 10_000
# Characters of a stranger's text on the page.
MAX_TEXT = 160


class Bar(NamedTuple):
    """One engine compile; ordered by its cost."""

    seconds: float
    at: float
    rank: str
    cause: str
    ok: bool
    compiler: str
    key: str
    site: str


class Variant:
    """What one variant cost all engines."""

    __slots__ = ("changed", "compiler", "compiles", "cost", "hits", "key", "ranks", "seconds", "site")

    def __init__(self, compiler: str, key: str) -> None:
        self.compiler, self.key = compiler[:MAX_TEXT], key[:MAX_TEXT]
        self.compiles = self.hits = 0
        self.seconds = self.cost = 0.0
        self.ranks: set[str] = set()
        self.site = self.changed = ""


class Site:
    """Unplanned compiles called from one place."""

    __slots__ = ("changed", "compiles", "seconds", "variants")

    def __init__(self) -> None:
        self.compiles = 0
        self.seconds = 0.0
        self.variants: set[bytes] = set()
        self.changed = ""


class Lane:
    """One rank over time."""

    __slots__ = ("avoided", "compiles", "hit_columns", "hits", "published_columns", "suffered")

    def __init__(self) -> None:
        self.compiles = self.hits = 0
        self.suffered = self.avoided = 0.0
        self.hit_columns = [0] * COLUMNS
        self.published_columns = [0] * COLUMNS


class Report:
    """All figures of a page."""

    def __init__(self) -> None:
        self.files = 0
        self.problems = Problems()
        self.records = self.compiles = self.hits = self.published = self.failed = 0
        self.suffered = self.avoided = 0.0
        # Hits of which nobody knows what they saved; events whose time cannot be shown.
        self.unvalued = self.timeless = 0
        self.causes: dict[str, tuple[int, float]] = {}
        self.variants: dict[bytes, Variant] = {}
        self.sites: dict[str, Site] = {}
        self.lanes: dict[str, Lane] = {}
        self.unfinished: list[Started] = []
        self.first = self.last = 0.0
        self.axis = Axis([])
        self.bars: list[Bar] = []
        # By column: variants met first that were ready, that were not, and the seconds of both.
        self.hit_columns, self.compile_columns = [0] * COLUMNS, [0] * COLUMNS
        self.avoided_columns, self.suffered_columns = [0.0] * COLUMNS, [0.0] * COLUMNS


def gather(paths: Iterable[Path], advance: Callable[[int], None] = lambda size: None) -> Report:
    """Reads the logs twice. Raises `LogUnusable`."""
    report, busy = Report(), Busy()
    files = list(paths)
    for path in files:
        report.files += 1
        running: dict[Run, Started] = {}
        for line, place in read_places(path):
            advance(place.size)
            if isinstance(line, Unreadable):
                report.problems.add(line)
            else:
                _learn(report, busy, running, line)
        report.unfinished += list(running.values())[: MAX_RUNNING - len(report.unfinished)]
    report.axis = busy.axis()
    lanes = _lanes(report)
    for path in files:
        for line in read_log(path):
            _place(report, lanes, line)
    report.lanes = {name: lanes[name] for name in sorted(set(lanes) - {OTHERS})}
    if OTHERS in lanes:
        report.lanes[OTHERS] = lanes[OTHERS]
    report.bars.sort(key=lambda bar: bar.at)
    return report


def rank_of(line: Record | Started | Published) -> str:
    """The lane's name."""
    return f"{line.host}:{line.rank}"[:MAX_TEXT]


def _learn(report: Report, busy: Busy, running: dict[Run, Started], line: Line) -> None:
    """The first reading: costs, totals, and when anything happened."""
    match line:
        case Record():
            _learn_record(report, line)
            report.timeless += not busy.add(line.at, line.at + line.seconds)
            report.first = min(report.first or line.at, line.at)
            report.last = max(report.last, line.at + line.seconds)
        case Published():
            report.published += 1
            report.timeless += not busy.add(line.at, line.at)
            variant = _variant(report, line.compiler, line.key)
            if variant is not None:
                variant.cost = max(variant.cost, line.seconds)
        case Started():
            if len(running) < MAX_RUNNING:
                running[run_of(line)] = line
        case Ended():
            running.pop(run_of(line), None)


def _learn_record(report: Report, record: Record) -> None:
    report.records += 1
    report.failed += not record.ok
    variant = _variant(report, record.compiler, record.key or record.job_digest)
    rank = rank_of(record)
    lane = report.lanes.get(rank)
    if lane is None:
        lane = report.lanes.setdefault(rank if len(report.lanes) < MAX_RANKS else OTHERS, Lane())
    if record.cause == "planned":
        report.hits += 1
        lane.hits += 1
        if variant is not None:
            variant.hits += 1
        return
    report.compiles += 1
    report.suffered += record.seconds
    lane.compiles += 1
    lane.suffered += record.seconds
    count, seconds = report.causes.get(record.cause, (0, 0.0))
    report.causes[record.cause] = (count + 1, seconds + record.seconds)
    if variant is not None:
        variant.compiles += 1
        variant.seconds += record.seconds
        variant.cost = max(variant.cost, record.seconds)
        if len(variant.ranks) < MAX_LANES:
            variant.ranks.add(rank)
        variant.site = variant.site or record.site[:MAX_TEXT]
        variant.changed = variant.changed or record.changed[:MAX_TEXT]
    if record.cause == "unplanned":
        _learn_site(report, record)


def _learn_site(report: Report, record: Record) -> None:
    name = record.site[:MAX_TEXT] or "(unknown)"
    site = report.sites.get(name)
    if site is None:
        site = report.sites.setdefault(name if len(report.sites) < MAX_SITES else OTHERS, Site())
    site.compiles += 1
    site.seconds += record.seconds
    site.changed = site.changed or record.changed[:MAX_TEXT]
    if len(site.variants) < MAX_SITES:
        site.variants.add(_name(record.compiler, record.key or record.job_digest))


def _lanes(report: Report) -> dict[str, Lane]:
    """The lanes that are drawn; the ranks that waited least share the last."""
    ordered = sorted(report.lanes.items(), key=lambda item: (item[0] == OTHERS, -item[1].suffered, item[0]))
    lanes = dict(ordered[:MAX_LANES])
    for _, lane in ordered[MAX_LANES:]:
        shared = lanes.setdefault(OTHERS, Lane())
        shared.compiles += lane.compiles
        shared.hits += lane.hits
        shared.suffered += lane.suffered
    return lanes


def _place(report: Report, lanes: dict[str, Lane], line: Line) -> None:
    """The second reading: what happened in which column."""
    if not isinstance(line, (Record, Published)):
        return
    rank = rank_of(line)
    lane = lanes.get(rank) or lanes.get(OTHERS)
    column = report.axis.column(line.at, COLUMNS)
    if isinstance(line, Published):
        if lane is not None and column is not None:
            lane.published_columns[column] += 1
        return
    if line.cause == "planned":
        cost = _cost(report, line)
        report.avoided += cost
        report.unvalued += cost == 0
        if lane is not None:
            lane.avoided += cost
        if column is not None:
            report.hit_columns[column] += 1
            report.avoided_columns[column] += cost
            if lane is not None:
                lane.hit_columns[column] += 1
    elif column is not None:
        report.compile_columns[column] += 1
        report.suffered_columns[column] += line.seconds
        _draw(report, line, rank if rank in lanes else OTHERS)


def _draw(report: Report, record: Record, rank: str) -> None:
    key = (record.key or record.job_digest)[:MAX_TEXT]
    site = record.site[:MAX_TEXT]
    bar = Bar(record.seconds, record.at, rank, record.cause, record.ok, record.compiler[:MAX_TEXT], key, site)
    if len(report.bars) < MAX_BARS:
        heappush(report.bars, bar)
    else:
        heappushpop(report.bars, bar)


def _cost(report: Report, record: Record) -> float:
    """What compiling it took whoever was seen to do so; 0 if nobody was."""
    variant = report.variants.get(_name(record.compiler, record.key or record.job_digest))
    return variant.cost if variant else 0.0


def _variant(report: Report, compiler: str, key: str) -> Variant | None:
    name = _name(compiler, key)
    found = report.variants.get(name)
    if found is None and len(report.variants) < MAX_VARIANTS:
        found = report.variants[name] = Variant(compiler, key)
    return found


def _name(compiler: str, key: str) -> bytes:
    """Without the fingerprint: what a kernel costs hardly depends on it."""
    return hashlib.blake2b(f"{compiler}\0{key}".encode(errors="surrogatepass"), digest_size=16).digest()
