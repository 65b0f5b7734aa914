"""The report's drawings, as SVG inside the page: lanes of compiles, and two curves over the same time.

Each is bounded by the number of columns and lanes, never by the number of records. Positions are numbers of
ours; of a log only escaped names appear, as tool tips and labels.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prefetchd.log_commands import moment
from prefetchd.plain_text import printable
from prefetchd.report.axis import Axis
from prefetchd.report.gathering import COLUMNS, MAX_TEXT, Bar, Lane, Report

# Of a drawing: room for labels, for what is drawn, and for the axis.
LABEL, WIDTH, FOOT = 150, 930, 34
LANE, BAR, TICK = 28, 12, 5
HEIGHT = 130
# A label beside a lane has room for so many characters.
LABEL_TEXT = 22
# A compile of a moment is still seen.
LEAST_WIDTH = 1.5


def timeline(report: Report) -> Iterator[str]:
    """A lane a rank: above what the engine compiled, below what it found ready and what was published."""
    if not report.axis.stretches:
        yield '<p class="empty">Nothing to draw.</p>'
        return
    names = {name: number for number, name in enumerate(report.lanes)}
    height = LANE * len(names)
    yield _open(height)
    yield from _grid(report.axis, height)
    for name, number in names.items():
        yield f'<text class="label" x="{LABEL - 8}" y="{LANE * number + 14}">{_text(name, LABEL_TEXT)}</text>'
        yield from _ticks(report.lanes[name], LANE * number)
    for bar in report.bars:
        yield _bar(bar, report.axis, LANE * names[bar.rank])
    yield "</svg>"
    yield _legend(("unplanned", "late", "mismatch", "ready", "published"))
    if len(report.bars) < report.compiles:
        yield f"<p>Drawn are the {len(report.bars):,} longest of {report.compiles:,} engine compiles.</p>"


def coverage(report: Report) -> Iterator[str]:
    """How large a share of first uses had been ready, so far."""
    hits = list(accumulate(report.hit_columns))
    compiles = list(accumulate(report.compile_columns))
    shares = [hit / (hit + miss) if hit + miss else 0.0 for hit, miss in zip(hits, compiles, strict=True)]
    yield from _curves(report.axis, {"ready": shares}, 1.0, ("0 %", "100 %"))


def stalls(report: Report) -> Iterator[str]:
    """Seconds so far, of both kinds on one scale."""
    curves = {
        "unplanned": list(accumulate(report.suffered_columns)),
        "ready": list(accumulate(report.avoided_columns)),
    }
    top = max(max(values) for values in curves.values())
    yield from _curves(report.axis, curves, top, ("0 s", f"{top:,.0f} s"))
    yield _legend(("unplanned", "ready"), {"unplanned": "suffered", "ready": "avoided"})


def _curves(
    axis: Axis, curves: Mapping[str, Sequence[float]], top: float, labels: tuple[str, str]
) -> Iterator[str]:
    if not axis.stretches or not top:
        yield '<p class="empty">Nothing to draw.</p>'
        return
    yield _open(HEIGHT)
    yield from _grid(axis, HEIGHT)
    for label, y in zip(labels, (HEIGHT, 10), strict=True):
        yield f'<text class="label" x="{LABEL - 8}" y="{y}">{label}</text>'
    for kind, values in curves.items():
        step = WIDTH / COLUMNS
        points = " ".join(
            f"{LABEL + (column + 1) * step:.1f},{HEIGHT - (HEIGHT - 8) * value / top:.1f}"
            for column, value in enumerate(values)
        )
        yield f'<polyline class="curve {kind}" points="{points}"/>'
    yield "</svg>"


def _open(height: int) -> str:
    return f'<svg viewBox="0 0 {LABEL + WIDTH + 10} {height + FOOT}" role="img">'


def _grid(axis: Axis, height: int) -> Iterator[str]:
    """Where each stretch of time begins, and what time that is."""
    for number, stretch in enumerate(axis.stretches):
        left, width = LABEL + stretch.left * WIDTH, (stretch.right - stretch.left) * WIDTH
        kind = "odd" if number % 2 else "even"
        yield f'<rect class="stretch {kind}" x="{left:.1f}" y="0" width="{width:.1f}" height="{height}"/>'
        if width >= 100 or len(axis.stretches) == 1:
            yield f'<text class="time" x="{left + 3:.1f}" y="{height + 14}">{moment(stretch.begin)}</text>'
            lasts = f"+ {stretch.end - stretch.begin:,.0f} s"
            yield f'<text class="time" x="{left + 3:.1f}" y="{height + 28}">{lasts}</text>'


def _ticks(lane: Lane, top: int) -> Iterator[str]:
    for kind, columns, y in (
        ("ready", lane.hit_columns, top + BAR + 3),
        ("published", lane.published_columns, top + BAR + TICK + 4),
    ):
        if any(columns):
            tip = f"<title>{sum(columns):,} {kind}</title>"
            yield f'<path class="tick {kind}" d="{_path(columns, y)}">{tip}</path>'


def _path(columns: Iterable[int], y: int) -> str:
    """A mark in each column in which something was."""
    width = WIDTH / COLUMNS
    return "".join(
        f"M{LABEL + column * width:.1f} {y}h{width:.1f}v{TICK - 1}h-{width:.1f}z"
        for column, count in enumerate(columns)
        if count
    )


def _bar(bar: Bar, axis: Axis, top: int) -> str:
    begin = axis.place(bar.at)
    end = axis.place(bar.at + bar.seconds)
    assert begin is not None
    left = LABEL + begin * WIDTH
    width = max(((1.0 if end is None else end) - begin) * WIDTH, LEAST_WIDTH)
    failed = "" if bar.ok else ", failed"
    tip = f"{bar.seconds:.3f} s {bar.cause}{failed}: {bar.compiler} {bar.key}, from {bar.site or 'unknown'}"
    return (
        f'<rect class="bar {bar.cause}" x="{left:.1f}" y="{top + 2}" width="{width:.1f}" height="{BAR}">'
        f"<title>{_text(tip, 3 * MAX_TEXT)}</title></rect>"
    )


def _legend(kinds: Iterable[str], names: dict[str, str] | None = None) -> str:
    items = (f'<li class="{kind}">{(names or {}).get(kind, kind)}</li>' for kind in kinds)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _text(value: str, limit: int) -> str:
    return html.escape(printable(value, limit), quote=True)
