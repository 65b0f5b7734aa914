"""The report: right figures, one page of bounded size, and nothing of a log that a browser would obey."""

from __future__ import annotations

import html.parser
import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.cli import main
from prefetchd.report.axis import IDLE_S, MAX_STRETCHES, Axis, Busy
from prefetchd.report.gathering import COLUMNS, MAX_BARS, MAX_LANES, OTHERS, Report, gather
from prefetchd.report.page import page
from prefetchd.shapelog import Ended, Line, Published, Record, Started, encode_line

T0 = 1_790_000_000.0
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def record(
    key: str, cause: str = "unplanned", seconds: float = 0.0, at: float = 0.0, **fields: object
) -> Record:
    shown: dict[str, object] = {"host": "n", **fields}
    return Record(  # type: ignore[arg-type]
        compiler="triton", key=key, fingerprint="f", cause=cause, seconds=seconds, at=T0 + at, **shown
    )


def written(path: Path, *lines: Line) -> Path:
    path.write_bytes(b"".join(map(encode_line, lines)))
    return path


def gathered(tmp_path: Path, *lines: Line) -> Report:
    return gather([written(tmp_path / "n.rank0.jsonl", *lines)])


def test_suffered_and_avoided_seconds(tmp_path: Path) -> None:
    report = gathered(
        tmp_path,
        record("a", "unplanned", 6.4),
        record("b", "late", 1.0, at=10),
        # Ready on two ranks, and compiled by one in an earlier run: each was spared as much.
        record("a", "planned", at=20, rank=1),
        record("a", "planned", at=20, rank=2),
        # The publisher said what it took.
        Published(compiler="triton", key="c", seconds=3.0, at=T0),
        record("c", "planned", at=21),
        # Nobody was seen to compile it.
        record("d", "planned", at=22),
    )

    assert (report.compiles, report.hits, report.published) == (2, 4, 1)
    assert report.suffered == pytest.approx(7.4)
    assert report.avoided == pytest.approx(2 * 6.4 + 3.0)
    assert report.unvalued == 1
    assert report.causes == {"unplanned": (1, 6.4), "late": (1, 1.0)}
    assert report.lanes["n:1"].avoided == pytest.approx(6.4)


def test_unplanned_compiles_are_counted_by_call_site(tmp_path: Path) -> None:
    report = gathered(
        tmp_path,
        record("a", seconds=1, site="kda.py:5"),
        record("b", seconds=2, site="kda.py:5", changed="T%16 differs"),
        record("c", "late", seconds=9, site="moe.py:7"),
        record("d", seconds=4),
    )

    sites = {name: (site.compiles, site.seconds, site.changed) for name, site in report.sites.items()}
    assert sites == {"kda.py:5": (2, 3.0, "T%16 differs"), "(unknown)": (1, 4.0, "")}


def test_compile_without_an_end_is_shown(tmp_path: Path) -> None:
    report = gathered(
        tmp_path,
        Started(compiler="triton", token=1, key="done", process="7-1"),
        Ended(token=1, process="7-1"),
        Started(compiler="triton", token=2, key="hangs_here", process="7-1", site="suspend.py:3"),
    )

    assert [started.key for started in report.unfinished] == ["hangs_here"]
    shown = page(report)
    assert "hangs_here" in shown
    assert "suspend.py:3" in shown
    assert "Never ended" in shown


def test_curves_add_up_to_the_figures(tmp_path: Path) -> None:
    chance = random.Random(1)
    lines = [
        record(f"k{number}", chance.choice(["planned", "late"]), chance.random(), at=number * 7.0)
        for number in range(200)
    ]

    report = gathered(tmp_path, *lines)

    assert sum(report.hit_columns) == report.hits
    assert sum(report.compile_columns) == report.compiles == len(report.bars)
    assert sum(report.suffered_columns) == pytest.approx(report.suffered)


def test_impossible_times_are_counted_and_not_drawn(tmp_path: Path) -> None:
    report = gathered(
        tmp_path,
        record("a", seconds=1),
        *(Record(compiler="c", key=f"k{at}", fingerprint="f", at=at, seconds=1) for at in (-1e300, 0, 1e12)),
    )

    assert (report.timeless, report.compiles, len(report.bars)) == (3, 4, 1)
    assert "3 events have no time" in page(report)


def test_empty_log_gives_a_page(tmp_path: Path) -> None:
    assert "no records" in page(gathered(tmp_path))


def test_page_of_many_records_is_bounded(tmp_path: Path) -> None:
    chance = random.Random(2)
    long = "x" * 3000
    count = 20 * MAX_BARS
    with (tmp_path / "n.rank0.jsonl").open("wb") as file:
        for number in range(count):
            line = record(
                f"{number}{long[:300]}",
                chance.choice(["planned", "late", "unplanned"]),
                chance.random() * 9,
                at=number * 1.5,
                rank=number % 500,
                site=f"{number % 15_000}.py{long[:100]}",
            )
            file.write(encode_line(line))

    report = gather([tmp_path / "n.rank0.jsonl"])
    shown = page(report)

    assert report.records == count
    assert len(report.lanes) == MAX_LANES + 1
    assert list(report.lanes)[-1] == OTHERS
    assert sum(lane.hits + lane.compiles for lane in report.lanes.values()) == count
    assert len(report.bars) == MAX_BARS
    # The dearest are drawn.
    assert min(bar.seconds for bar in report.bars) > 8
    assert len(shown) < 2_000_000


class Elements(html.parser.HTMLParser):
    """What a browser would make of the page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


HOSTILE = [
    '<script>document.title="OWNED"</script>',
    '"><img src=x onerror="document.title=\'OWNED\'">',
    "</title></style></script><script>document.title='OWNED'</script>",
    "' onmouseover='document.title=1' x='",
    "&lt;script&gt;",
    "\u202egnp.exe\u0000\x1b[31m",
    "]]></svg><script>document.title='OWNED'</script>",
]


def hostile_log(path: Path) -> Path:
    lines: list[Line] = []
    for number, text in enumerate(HOSTILE):
        told = {"host": text, "site": text, "process": text, "rank": number}
        for cause in ("unplanned", "late", "mismatch", "planned"):
            fields = {"compiler": text, "key": text, "fingerprint": text, "changed": text, **told}
            lines.append(Record(cause=cause, seconds=number + 1.0, at=T0 + 9 * number, **fields))  # type: ignore[arg-type]
        lines.append(Started(compiler=text, key=text, token=number, at=T0, **told))  # type: ignore[arg-type]
        lines.append(Published(compiler=text, key=text, at=T0, host=text))
    written(path, *lines)
    with path.open("ab") as file:
        file.write(HOSTILE[0].encode() + b'\n{"kind":"<img src=x onerror=1>"}\n')
    return path


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    shown = page(gather([hostile_log(tmp_path / "<b>.rank0.jsonl")]))

    found = Elements(shown)
    assert found.tags.count("script") == 1
    assert found.tags.count("style") == 1
    assert not {"img", "iframe", "object", "link", "a", "form"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    # Only what the page itself says: no text of a log became an attribute.
    assert not [value for _, value in found.attributes if "OWNED" in value or "document" in value]
    assert not [character for character in shown if not character.isprintable() and character != "\n"]
    assert "&lt;script&gt;document.title=&quot;OWNED&quot;" in shown


def test_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    shown = page(gathered(tmp_path, record("a", seconds=1)))

    assert not [name for name, _ in Elements(shown).attributes if name in ("src", "href", "srcset")]
    assert "url(" not in shown
    assert "default-src 'none'" in shown
    assert re.findall(r"\d+(?:\.\d+)?nan|NaN|inf\b", shown) == []


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no Chromium is installed")
@pytest.mark.slow
def test_real_browser_draws_the_page_and_runs_nothing_of_a_log(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    path = tmp_path / "report.html"
    shown = page(gather([hostile_log(tmp_path / "a.jsonl")]))
    path.write_text(shown, encoding="utf-8")

    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
        check=True,
    )

    assert "<title>Engine compiles</title>" in done.stdout
    assert "Content Security Policy" not in done.stderr
    assert Elements(done.stdout).tags.count("rect") == Elements(shown).tags.count("rect") > 20


def test_command_writes_the_page_and_says_what_it_holds(tmp_path: Path) -> None:
    written(tmp_path / "n.rank0.jsonl", record("a", seconds=2.5), record("a", "planned", at=5, rank=1))
    out = tmp_path / "out.html"

    result = CliRunner().invoke(main, ["report", str(tmp_path), "-o", str(out), "--json"])

    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert (figures["compiles"], figures["suffered_s"], figures["avoided_s"]) == (1, 2.5, 2.5)
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    written(tmp_path / "n.rank0.jsonl")

    out = tmp_path / "absent/out.html"
    result = CliRunner().invoke(main, ["report", str(tmp_path), "-o", str(out)])

    assert result.exit_code == 2
    assert f"{out}: cannot be written" in result.output


def test_idle_time_between_stretches_takes_no_room() -> None:
    busy = Busy()
    for begin in (T0, T0 + 30, T0 + 40, T0 + 86_400):
        busy.add(begin, begin + 5)

    axis = busy.axis()

    first, second = axis.stretches
    assert (first.end - first.begin, second.end - second.begin) == (pytest.approx(46), pytest.approx(6))
    assert axis.place(T0 + 3600) is None
    assert axis.place(T0 + 86_401) is not None
    assert second.left == pytest.approx(first.right)
    assert second.right == pytest.approx(1.0)


def test_earliest_of_many_stretches_are_left_out() -> None:
    busy = Busy()
    for number in range(MAX_STRETCHES + 5):
        busy.add(T0 + 10_000 * number, T0 + 10_000 * number)

    axis = busy.axis()

    assert (len(axis.stretches), axis.left_out) == (MAX_STRETCHES, 5)
    assert axis.place(T0) is None


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e4)), min_size=1, max_size=30))
def test_order_of_time_is_the_order_on_the_page(events: list[tuple[float, float]]) -> None:
    busy = Busy()
    for at, seconds in events:
        assert busy.add(T0 + at, T0 + at + seconds)

    axis = busy.axis()

    shown = [(at, axis.place(T0 + at)) for at, _ in sorted(events)]
    places = [place for _, place in shown if place is not None]
    assert places == sorted(places)
    assert all(0 <= place <= 1 for place in places)
    if not axis.left_out:
        assert len(places) == len(events)
    columns = [axis.column(T0 + at, COLUMNS) for at, _ in events]
    assert all(column is None or 0 <= column < COLUMNS for column in columns)


def test_busy_months_are_kept_in_bounded_memory() -> None:
    busy = Busy()
    for number in range(300_000):
        busy.add(T0 + 100 * number, T0 + 100 * number)

    (stretch,) = busy.axis().stretches

    assert stretch.end - stretch.begin > 29_000_000
    assert Axis([]).place(T0) is None
    assert IDLE_S > 100
