"""`prefetchd explain`: a variant's story from the logs, and what the daemon says of it now."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_daemon import FakeDaemon

from prefetchd.cli import main
from prefetchd.endpoint import find_endpoint
from prefetchd.explain import ask_states
from prefetchd.node.lock import sole_daemon
from prefetchd.protocol import Answer, Hello, KeyName, Query, State
from prefetchd.shapelog import Line, Published, Record, Started, encode_line


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PREFETCHD_ENDPOINT", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, arguments)])


def record(key: str, **fields: object) -> Record:
    return Record(**{"compiler": "triton", "key": key, "fingerprint": "f", **fields})  # type: ignore[arg-type]


def written(path: Path, *lines: Line) -> Path:
    path.write_bytes(b"".join(map(encode_line, lines)))
    return path


@contextlib.contextmanager
def daemon_that_says(*states: State) -> Iterator[list[Query]]:
    """A daemon at this user's endpoint; the queries it heard."""
    endpoint = find_endpoint()
    heard: list[Query] = []
    with sole_daemon(endpoint):
        daemon = FakeDaemon(endpoint.address)

        def serve() -> None:
            hello = daemon.next(Hello)
            assert hello.target is None
            query = daemon.next(Query)
            heard.append(query)
            daemon.send(Answer(id=query.id, keys=states))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard
        finally:
            thread.join()
            daemon.close()


def test_story_of_an_unplanned_variant(tmp_path: Path) -> None:
    log = written(
        tmp_path / "a.jsonl",
        record("KEYONE", seconds=6.4, host="n", rank=3, site="kda.py:211", changed="T%16 differs"),
        record("KEYTWO", seconds=9.0),
        record(
            "KEYONE", seconds=1.0, host="n", rank=4, request={"op": "chunk_kda", "tokens": 5}, provider="kda"
        ),
    )

    result = run("KEYO", "--log", log)

    assert result.exit_code == 0
    assert "triton KEYONE" in result.output
    assert "KEYTWO" not in result.output
    for told in (
        "chunk_kda tokens=5",
        "by nobody; provider kda knows the request",
        "2 engine compiles on 2 ranks, 7.400 s",
        "n:3",
        "called from kda.py:211",
        "T%16 differs",
        "nobody had asked for it: no provider names it for this model. Replay this log",
        "by its request, where provider kda is installed",
        "no daemon answers here",
    ):
        assert told in result.output, told


@pytest.mark.parametrize(
    ("cause", "told"),
    [("late", "not published yet"), ("mismatch", "their keys differ"), ("planned", "it was ready")],
)
def test_reason_follows_from_the_cause(tmp_path: Path, cause: str, told: str) -> None:
    log = written(tmp_path / "a.jsonl", record("KEY", cause=cause, rebuild={"function": "fla.ops.kda"}))

    result = run("KEY", "--log", log)

    assert told in result.output
    assert "ahead of the engine" in result.output
    assert "function=fla.ops.kda" in result.output
    assert "from the record alone" in result.output


def test_what_cannot_be_replayed_is_not_advised_to_be(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", record("KEY"))

    result = run("KEY", "--log", log)

    assert "nobody had asked for it" in result.output
    assert "Replay this log" not in result.output
    assert "replay: cannot be" in result.output


def test_whole_key_is_meant_though_another_begins_with_it(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", record("KEY"), record("KEY.longer"))

    result = run("KEY", "--log", log, "--json")

    assert [story["key"] for story in json.loads(result.output)["variants"]] == ["KEY"]


def test_beginning_of_several_keys_lists_them(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", record("KEY1"), record("KEY2"))

    result = run("KEY", "--log", log)

    assert result.exit_code == 2
    assert "KEY1" in result.output
    assert "KEY2" in result.output


def test_beginning_of_too_many_keys_is_refused(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", *(record(f"K{number}") for number in range(1000)))

    result = run("K", "--log", log)

    assert result.exit_code == 2
    assert "give more of the key" in result.output


def test_unknown_key_says_how_to_find_those_there_are(tmp_path: Path) -> None:
    result = run("absent", "--log", written(tmp_path / "a.jsonl", record("KEY")))

    assert result.exit_code == 2
    assert "prefetchd log show" in result.output


def test_same_key_under_two_compilers_is_two_stories(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", record("KEY"), record("KEY", compiler="deep_jit"))

    shown = json.loads(run("KEY", "--log", log, "--json").output)

    assert sorted(story["compiler"] for story in shown["variants"]) == ["deep_jit", "triton"]


def test_compile_known_by_its_digest_alone_is_found(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", record("", job_digest="d1gest", seconds=2.0))

    assert "1 engine compiles" in run("d1g", "--log", log).output


def test_log_tells_what_never_ended_and_then_the_dearest(tmp_path: Path) -> None:
    log = written(
        tmp_path / "a.jsonl",
        record("cheap", seconds=0.1),
        record("dear", seconds=9),
        Published(compiler="triton", key="dear"),
        Started(compiler="triton", token=1, key="hangs", host="n", process="7-1", site="suspend.py:3"),
    )

    result = run(log, "--limit", "2", "--json")

    hangs, dear = json.loads(result.output)["variants"]
    assert (hangs["key"], hangs["unfinished"][0]["site"]) == ("hangs", "suspend.py:3")
    assert (dear["key"], dear["publications"]) == ("dear", 1)
    assert "it hangs there, or the process was killed in it" in run(log).output


def test_daemon_says_how_it_is_now(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", record("KEY"), record("KEY", compiler="deep_jit"))

    with daemon_that_says(State.PUBLISHED, State.COMPILING) as heard:
        result = run("KEY", "--log", log)

    assert heard[0].keys == (KeyName("triton", "KEY"), KeyName("deep_jit", "KEY"))
    assert heard[0].priority is None
    assert "the daemon has published it" in result.output
    assert "the daemon is compiling it" in result.output


def test_no_daemon_is_found_out_at_once() -> None:
    assert ask_states(find_endpoint(), [KeyName("triton", "KEY")]) is None


def test_terminal_obeys_nothing_of_a_log(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\r\n"
    log = written(
        tmp_path / "a.jsonl",
        record("KEY", site=evil, host=evil, changed=evil, provider=evil, request={evil: evil}),
        Started(compiler="triton", token=1, key="KEY", site=evil, process=evil),
    )

    result = run("KEY", "--log", log)

    assert result.exit_code == 0
    assert not [character for character in result.output if not character.isprintable() and character != "\n"]
