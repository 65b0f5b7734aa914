"""The daemon's figures as people see them, whatever their terminal and whatever names and problems hold."""

from __future__ import annotations

import io
import re

import pytest
from click.testing import CliRunner
from rich.console import Console

from prefetchd import serve_commands
from prefetchd.protocol import Stats
from prefetchd.top import show_stats

COUNTS = {"planned": 1234, "hits": 1200, "late": 1, "unplanned": 2, "wasted": 30}
ENGINE = {"engine_compiles": {"unplanned": 2, "late": 1}, "engine_seconds": {"unplanned": 3.0}}
FIGURE = "prefetchd_engine_compile_seconds_total{compiler=deep_jit,rank=vllm/0,reason=unplanned}"


def helper(problem: str) -> dict[str, object]:
    return {
        "name": "sm90-0123456789ab",
        "state": "ready",
        "pid": 1234567,
        "ranks": ["vllm/0", "vllm/1"],
        "traces": 1234,
        "restarts": 10,
        "rss_bytes": 2 << 30,
        "problem": problem,
    }


def stats(problem: str = "") -> Stats:
    tables = {"helpers": [helper(problem)], "accounts": {"vllm/0": {"deep_jit": COUNTS | ENGINE}}}
    return Stats(id=1, instance="one", figures={FIGURE: 1234.5}, tables=tables)


def shown(width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    show_stats(stats(), console)
    return console.export_text()


def test_nothing_is_cut_in_a_terminal_of_eighty_columns() -> None:
    text = shown(80)

    words = text.split()
    assert "…" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    for heading in (*COUNTS, "compiler", "helper", "restarts", "memory", "compiles", "seconds", "universe"):
        assert heading in words
    assert "sm90-0123456789ab" in words


def test_what_a_narrow_terminal_has_no_room_for_goes_on_below() -> None:
    text = shown(60)

    assert "…" not in text
    assert "reason=unplanned}" in re.sub(r"\s|1234\.5", "", text)


def test_words_of_others_are_shown_as_they_are_and_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = stats("cannot import [/b] \x1b[2J\nTraceback")
    monkeypatch.setattr(serve_commands, "ask_stats", lambda _: answer)

    done = CliRunner().invoke(serve_commands.stats_command, catch_exceptions=False)

    assert "sm90-0123456789ab: cannot import [/b] ?[2J" in done.output
    assert "Traceback" not in done.output
    assert "\x1b" not in done.output


def test_names_that_engines_give_themselves_move_nothing() -> None:
    name = "vllm\x1b]0;mine\x07/0"
    tables = {
        "helpers": [helper("none") | {"name": name, "ranks": [name]}],
        "accounts": {name: {name: COUNTS | ENGINE}},
        "mismatches": {name: 1},
    }
    console = Console(width=200, file=io.StringIO())
    show_stats(Stats(id=1, instance="one", figures={name: 1}, tables=tables), console)

    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("vllm?]0;mine?/0") == 7
    assert "\x1b" not in text
    assert "\x07" not in text
