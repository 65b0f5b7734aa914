"""`prefetchd log`: what each command prints, its exit status, and that a terminal obeys no log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prefetchd import log_commands
from prefetchd.cli import main
from prefetchd.shapelog import Ended, Line, Record, ShapeLog, Started, encode_line, read_log


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PREFETCHD_LOG_DIR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["log", *map(str, arguments)])


def record(key: str, seconds: float = 1.0, **fields: object) -> Record:
    return Record(compiler="triton", key=key, fingerprint="f", seconds=seconds, **fields)  # type: ignore[arg-type]


def written(path: Path, *lines: Line, noise: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(encode_line, lines)) + noise)
    return path


def test_show_tells_the_dearest_first_and_how_many_there_are(tmp_path: Path) -> None:
    log = written(
        tmp_path / "a.jsonl",
        record("cheap", 0.5, site="moe.py:1"),
        record("dear", 6.4, request={"op": "chunk_kda", "tokens": 300}, cause="late"),
        Started(compiler="triton", token=1, key="hangs", site="suspend.py:9"),
    )

    result = run("show", log, "--limit", "1")

    assert result.exit_code == 0
    first, second, *rest = result.output.splitlines()
    assert first.split() == ["6.400", "s", "late", "triton", "dear"]
    assert "chunk_kda tokens=300" in second
    assert rest[0] == "1 of 2 variants of 2 records in 1 logs"
    assert rest[1].startswith("never ended: triton hangs")
    assert "suspend.py:9" in rest[1]


def test_show_as_json_holds_every_variant_whatever_the_limit(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", *(record(f"k{number}") for number in range(5)), noise=b"noise\n")

    result = run("show", log, "--limit", "1", "--json")

    shown = json.loads(result.output)
    assert (len(shown["records"]), shown["unreadable"], shown["unfinished"]) == (5, 1, [])
    assert f"{log}:6: " in shown["problems"][0]


def test_default_is_the_directory_where_engines_write(tmp_path: Path) -> None:
    ShapeLog(tmp_path / "state" / "prefetchd", "node", 0).append(record("mine"))

    assert "mine" in run("show").output


def test_without_any_log_it_says_where_it_looked(tmp_path: Path) -> None:
    result = run("show")

    assert result.exit_code == 2
    assert f"{tmp_path}/state/prefetchd" in result.output
    assert "PREFETCHD_LOG_DIR" in result.output


def test_what_a_terminal_would_obey_is_not_printed(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\r\n"
    log = written(
        tmp_path / "a.jsonl",
        record(evil, site=evil, host=evil, request={evil: evil}),
        Started(compiler=evil, token=1, site=evil, process=evil),
        noise=b'{"kind":"\x1b[2J"}\n',
    )

    for command in ("show", "stats"):
        result = run(command, log)
        assert result.exit_code == 0
        bad = [character for character in result.output if not character.isprintable() and character != "\n"]
        assert not bad


def test_merge_puts_ranks_together_and_keeps_foreign_fingerprints(tmp_path: Path) -> None:
    written(tmp_path / "logs/n.rank0.jsonl", record("a", 1.0), record("b", 2.0), noise=b"torn")
    written(tmp_path / "logs/n.rank1.jsonl", record("a", 3.0), record("c", 0.1))
    foreign = Record(compiler="triton", key="a", fingerprint="other", seconds=9.0)
    written(tmp_path / "logs/m.rank0.jsonl", foreign)
    out = tmp_path / "all.jsonl"

    result = run("merge", tmp_path / "logs", "-o", out, "--json")

    assert result.exit_code == 0
    figures = json.loads(result.output)
    assert (figures["files"], figures["records"], figures["variants"], figures["duplicates"]) == (3, 5, 4, 1)
    assert figures["unreadable"] == 1
    kept = [line for line in read_log(out) if isinstance(line, Record)]
    assert [(line.key, line.fingerprint, line.seconds) for line in kept] == [
        ("a", "other", 9.0),
        ("a", "f", 3.0),
        ("b", "f", 2.0),
        ("c", "f", 0.1),
    ]


def test_merge_never_writes_over_what_it_reads(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", record("a"))
    before = log.read_bytes()

    result = run("merge", log, "-o", log)

    assert (result.exit_code, log.read_bytes()) == (2, before)
    assert "log compact" in result.output


def test_merge_that_left_something_out_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetchd.shapelog.merging.MAX_VARIANTS", 1)
    log = written(tmp_path / "a.jsonl", record("a"), record("b"))

    result = run("merge", log, "-o", tmp_path / "out.jsonl")

    assert result.exit_code == 1
    assert "1 records left out" in result.output


def test_stats_count_by_compiler_rank_and_fingerprint(tmp_path: Path) -> None:
    log = written(
        tmp_path / "a.jsonl",
        record("a", 2.0, cause="late", host="n", rank=1),
        record("a", 1.0, host="n", rank=0),
        record("b", 0.0, cause="planned", host="n", rank=0, rebuild={"x": 1}),
        record("c", 4.0, ok=False, host="n", rank=0),
        Started(compiler="triton", token=1),
        Started(compiler="triton", token=2),
        Ended(token=1),
        noise=b"noise\n",
    )

    stats = json.loads(run("stats", log, "--json").output)

    total = stats["total"]
    assert (total["records"], total["variants"], total["hits"], total["late"]) == (4, 3, 1, 1)
    assert (total["unplanned"], total["failed"], total["seconds"], total["replayable"]) == (2, 1, 7.0, 1)
    assert (stats["unfinished"], stats["unreadable"]) == (1, 1)
    assert set(stats["ranks"]) == {"n:0", "n:1"}
    assert stats["ranks"]["n:1"]["seconds"] == 2.0
    assert "rank n:0: " in run("stats", log).output


def test_compact_leaves_a_log_that_an_engine_has_open(tmp_path: Path) -> None:
    written(tmp_path / "free.jsonl", record("a"), record("a"))
    held = ShapeLog(tmp_path, "node", 0)
    held.append(record("a"))
    held.append(record("a"))
    before = held.path.read_bytes()

    result = run("compact", tmp_path, "--json")

    assert result.exit_code == 1
    shown = json.loads(result.output)
    assert [log["records"] for log in shown["compacted"]] == [1]
    assert len(shown["refused"]) == 1
    assert "locked" in shown["refused"][0]
    assert held.path.read_bytes() == before
    held.close()
    assert run("compact", tmp_path).exit_code == 0


def test_long_reading_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 100))
    monkeypatch.setattr("prefetchd.log_commands.time.monotonic", lambda: float(next(now)))
    log = written(tmp_path / "a.jsonl", *(record(f"k{number}") for number in range(10)))

    advance = log_commands.progress([log], quiet=False)
    for _ in range(10):
        advance(log.stat().st_size // 10)

    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) < 10
    assert lines[0] == "reading: 0 of 0 MiB"
