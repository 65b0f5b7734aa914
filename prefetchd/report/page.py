"""One self-contained page from the figures of a report: no resource from elsewhere, whatever is in the logs.

Everything in a log is a stranger's text. The subtle rule: it reaches the page through `text` alone, which
leaves no character that HTML, a browser's console or right-to-left writing could obey; and the page itself
forbids, by the hashes of its own style and script, that anything else runs.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

from prefetchd.log_commands import moment
from prefetchd.plain_text import printable
from prefetchd.report.charts import coverage, stalls, timeline
from prefetchd.report.gathering import MAX_TEXT, Report, rank_of

# Rows of a table.
MAX_ROWS = 50
# Of the lines that could not be read.
MAX_PROBLEMS = 20


def text(value: object) -> str:
    """A stranger's text as a page may hold it."""
    return html.escape(printable(str(value), MAX_TEXT), quote=True)


def page(report: Report) -> str:
    """The whole page."""
    style, script = _asset("report.css"), _asset("report.js")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Engine compiles</title><style>{style}</style></head><body><main>",
        *_head(report),
        *_section(
            "Timeline", "Engine compiles by rank; what was ready; what was published ahead", timeline(report)
        ),
        *_section("Coverage", "Share of variants that were ready when first used, so far", coverage(report)),
        *_section(
            "Stalls", "Seconds that engines spent compiling, and seconds they did not have to", stalls(report)
        ),
        '<p class="filter"><label>Show rows with <input id="filter" type="search"></label></p>',
        *_dearest(report),
        *_by_site(report),
        *_ranks(report),
        *_unfinished(report),
        *_unreadable(report),
        f"</main><script>{script}</script></body></html>\n",
    ]
    return "".join(parts)


def _head(report: Report) -> Iterator[str]:
    span = f"{moment(report.first)} to {moment(report.last)}" if report.last else "no records"
    yield "<header><h1>Engine compiles</h1>"
    yield f"<p>{text(span)}; {len(report.lanes)} ranks, {report.files} logs</p></header>"
    first_uses = report.hits + report.compiles
    ready = f"{100 * report.hits / first_uses:.1f} %" if first_uses else "-"
    unvalued = f", {report.unvalued:,} of unknown cost" if report.unvalued else ""
    yield '<div class="tiles">'
    yield _tile("suffered", seconds(report.suffered), f"{report.compiles:,} engine compiles")
    yield _tile("avoided", seconds(report.avoided), f"{report.hits:,} times ready{unvalued}")
    yield _tile("coverage", ready, "of first uses were ready")
    for cause in ("unplanned", "late", "mismatch"):
        count, spent = report.causes.get(cause, (0, 0.0))
        yield _tile(cause, f"{count:,}", seconds(spent))
    yield _tile("unended", f"{len(report.unfinished):,}", f"compiles never ended; {report.failed:,} failed")
    yield "</div>"
    if report.timeless:
        yield f"<p>{report.timeless:,} events have no time that can be shown: counted, not drawn.</p>"
    if report.axis.left_out:
        yield f"<p>{report.axis.left_out:,} earlier stretches of time are counted, not drawn.</p>"


def _tile(kind: str, value: str, note: str) -> str:
    return f'<div class="tile {kind}"><h2>{kind}</h2><b>{value}</b><span>{note}</span></div>'


def _section(title: str, note: str, content: Iterable[str]) -> Iterator[str]:
    yield f"<section><h2>{title}</h2><p>{note}</p>"
    yield from content
    yield "</section>"


def _dearest(report: Report) -> Iterator[str]:
    compiled = (variant for variant in report.variants.values() if variant.compiles)
    ordered = sorted(compiled, key=lambda variant: (-variant.seconds, variant.compiler, variant.key))
    rows = [
        (
            seconds(variant.seconds),
            str(variant.compiles),
            str(len(variant.ranks)),
            text(variant.compiler),
            f"<code>{text(variant.key) or '(no name)'}</code>",
            text(variant.site),
            text(variant.changed),
        )
        for variant in ordered[:MAX_ROWS]
    ]
    head = ("cost", "compiles", "ranks", "compiler", "variant", "first called from", "what changed")
    yield from _section("Dearest variants", _of(rows, len(ordered), "variants"), _table(head, rows))


def _by_site(report: Report) -> Iterator[str]:
    ordered = sorted(report.sites.items(), key=lambda item: (-item[1].seconds, item[0]))
    rows = [
        (
            seconds(site.seconds),
            str(site.compiles),
            str(len(site.variants)),
            f"<code>{text(name)}</code>",
            text(site.changed),
        )
        for name, site in ordered[:MAX_ROWS]
    ]
    head = ("cost", "compiles", "variants", "called from", "what changed, as an example")
    yield from _section("Unplanned, by call site", _of(rows, len(ordered), "call sites"), _table(head, rows))


def _ranks(report: Report) -> Iterator[str]:
    rows = [
        (
            text(name),
            str(lane.compiles),
            seconds(lane.suffered),
            str(lane.hits),
            seconds(lane.avoided),
            f"{100 * lane.hits / (lane.hits + lane.compiles):.1f} %" if lane.hits + lane.compiles else "-",
        )
        for name, lane in report.lanes.items()
    ]
    head = ("rank", "engine compiles", "suffered", "ready", "avoided", "coverage")
    yield from _section("Ranks", _of(rows, len(rows), "ranks"), _table(head, rows))


def _unfinished(report: Report) -> Iterator[str]:
    if not report.unfinished:
        return
    rows = [
        (
            text(rank_of(started)),
            text(moment(started.at)),
            text(started.process),
            text(started.compiler),
            f"<code>{text(started.key or started.job_digest) or '(no name)'}</code>",
            text(started.site),
        )
        for started in report.unfinished[:MAX_ROWS]
    ]
    head = ("rank", "begun", "process", "compiler", "variant", "called from")
    note = "The process hangs there, or was killed in it. " + _of(rows, len(report.unfinished), "compiles")
    yield from _section("Never ended", note, _table(head, rows))


def _unreadable(report: Report) -> Iterator[str]:
    if not report.problems.count:
        return
    rows = [(text(problem),) for problem in report.problems.first[:MAX_PROBLEMS]]
    note = _of(rows, report.problems.count, "lines")
    yield from _section("Lines that could not be read", note, _table(("where, and why",), rows))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield '<div class="wide"><table><thead><tr>'
    yield from (f"<th>{name}</th>" for name in head)
    yield "</tr></thead><tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    yield "</tbody></table></div>"


def _of(rows: Sequence[object], total: int, what: str) -> str:
    return f"{len(rows):,} of {total:,} {what}" if len(rows) < total else f"{total:,} {what}"


def seconds(value: float) -> str:
    """A duration for people."""
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    return f"{value:,.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _asset(name: str) -> str:
    return files("prefetchd.report").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
