"""Reading what may be anything: every good line comes through, every other one is told with its place."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import start_child

from prefetchd.shapelog import (
    MAX_LINE_BYTES,
    LogUnusable,
    Problems,
    Record,
    Started,
    Unreadable,
    decode_line,
    encode_line,
    encode_record,
    log_files,
    read_log,
)
from prefetchd.shapelog.reading import read_places
from prefetchd.shapelog.record import RecordError

GOOD = Record(compiler="triton", key="good", fingerprint="f")
GOOD_LINE = encode_record(GOOD)


def read(path: Path, data: bytes) -> tuple[list[object], list[str]]:
    path.write_bytes(data)
    problems = Problems()
    lines = list(read_log(path, problems))
    return list(lines), problems.first


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (GOOD_LINE[: len(GOOD_LINE) // 2], "truncated"),
        (b"\0" * 500, "malformed"),
        (b'{"compiler":"\xff\xfe","key":"k","fingerprint":"f"}', "UTF-8"),
        (b'{"compiler":"a","key":"k","fingerprint":"f","request":' + b'{"a":' * 9999, "recursion"),
        (b"[" * 100_000, "array|malformed|recursion|truncated"),
        (b'"text"', "object"),
        (b'{"compiler":"a","key":"k","fingerprint":"f","rank":99999999999999999999}', "rank"),
        (b'{"compiler":"a","key":"k","fingerprint":"f","seconds":1e400}', "seconds"),
        (b'{"compiler":"a","key":"k","fingerprint":"f","cause":"whim"}', "cause"),
        (b'{"compiler":"a","key":"' + b"k" * 2000 + b'","fingerprint":"f"}', "1024.*key"),
        (b'{"kind":"weather","text":"fine"}', "kind"),
        (b'{"kind":"started"}', "compiler"),
        (b"x" * (3 * MAX_LINE_BYTES), f"{3 * MAX_LINE_BYTES + 1} bytes"),
    ],
)
def test_bad_line_is_told_with_its_place_and_costs_no_other(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(GOOD_LINE + line + b"\n" + GOOD_LINE)

    found = [line for line, _ in read_places(path)]

    first, bad, last = found
    assert (first, last) == (GOOD, GOOD)
    assert isinstance(bad, Unreadable)
    assert (bad.path, bad.number) == (path, 2)
    assert re.search(reason, bad.reason)
    assert str(bad).startswith(f"{path}:2: ")
    assert len(bad.reason) <= 200


def test_only_a_whole_line_of_an_unknown_kind_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"kind":"weather"}\n{"kind":"started"}\n{"kind":"weath')

    found = [line for line, _ in read_places(path) if isinstance(line, Unreadable)]

    assert [line.foreign for line in found] == [True, False, False]


def test_last_line_without_its_end_is_read_if_it_is_whole(tmp_path: Path) -> None:
    assert read(tmp_path / "log.jsonl", GOOD_LINE + GOOD_LINE.rstrip()) == ([GOOD, GOOD], [])


def test_empty_lines_and_other_systems_line_ends_are_no_problem(tmp_path: Path) -> None:
    assert read(tmp_path / "log.jsonl", b"\n \r\n" + GOOD_LINE.rstrip() + b"\r\n") == ([GOOD], [])


def test_places_say_where_each_line_stands(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n" + GOOD_LINE + b"x" * (MAX_LINE_BYTES * 2) + b"\n" + GOOD_LINE)
    data = path.read_bytes()

    for line, place in read_places(path):
        if isinstance(line, Record):
            assert data[place.offset : place.offset + place.size] == GOOD_LINE
    assert [place.number for _, place in read_places(path)] == [2, 3, 4]


def test_a_long_log_and_an_endless_line_need_little_memory(tmp_path: Path) -> None:
    long, endless = tmp_path / "long.jsonl", tmp_path / "endless.jsonl"
    with long.open("wb") as file:
        for _ in range(200):
            file.write(GOOD_LINE * 1000)
    with endless.open("wb") as file:
        file.truncate(64 << 20)

    def count() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert sum(1 for _ in read_log(long)) == 200_000
        (unreadable,) = [line for line, _ in read_places(endless)]
        assert isinstance(unreadable, Unreadable)
        assert unreadable.reason == f"line of {64 << 20} bytes, more than {MAX_LINE_BYTES}"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10

    assert os.waitpid(start_child(count), 0)[1] == 0


def test_problems_are_all_counted_and_the_first_kept(tmp_path: Path) -> None:
    problems = Problems()
    path = tmp_path / "noise.jsonl"
    path.write_bytes(b"noise\n" * 5000)

    assert list(read_log(path, problems)) == []

    assert problems.count == 5000
    assert len(problems.first) == 100


def test_directory_stands_for_its_logs_and_winners_are_none(tmp_path: Path) -> None:
    for name in ("b.rank1.jsonl", "a.rank0.jsonl", "winners.jsonl", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "c.jsonl").mkdir()

    assert [path.name for path in log_files([tmp_path, tmp_path / "b.rank1.jsonl"])] == [
        "a.rank0.jsonl",
        "b.rank1.jsonl",
    ]


@pytest.mark.parametrize("what", ["missing", "fifo", "empty directory"])
def test_what_is_no_log_is_refused_with_a_fix(tmp_path: Path, what: str) -> None:
    path = tmp_path / "log"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "empty directory":
        path.mkdir()

    with pytest.raises(LogUnusable, match="name "):
        log_files([path])


@settings(max_examples=300)
@given(st.lists(st.one_of(st.binary(max_size=80), st.sampled_from([GOOD_LINE, b"\n", b"\0", b'{"kind":"']))))
def test_any_bytes_give_each_good_line_that_stands_alone(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    data = b"".join(pieces)
    path.write_bytes(data)

    found = list(read_places(path))

    good = sum(line.strip(b" \t\r\n") == GOOD_LINE.strip() for line in data.split(b"\n"))
    assert sum(line == GOOD for line, _ in found) == good
    assert len(found) == sum(bool(line.strip(b" \t\r\n")) for line in data.split(b"\n"))


@given(st.integers(0, len(GOOD_LINE) - 2))
def test_log_cut_at_any_byte_loses_at_most_the_last_record(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.write_bytes(GOOD_LINE * 2 + GOOD_LINE[:cut])

    found = [line for line, _ in read_places(path)]

    assert found[:2] == [GOOD, GOOD]
    assert all(isinstance(line, Unreadable) for line in found[2:])


texts = st.text(max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
any_records = st.builds(
    Record,
    compiler=texts,
    key=texts,
    fingerprint=texts,
    seconds=st.floats(0, 1e9),
    at=st.floats(allow_nan=False, allow_infinity=False),
    site=texts,
    request=st.none() | st.dictionaries(texts, json_values, max_size=4),
    rebuild=st.none() | st.dictionaries(texts, json_values, max_size=4),
)
any_starts = st.builds(Started, compiler=texts, token=st.integers(0, 2**53), site=texts)


@given(any_records | any_starts)
def test_whatever_is_written_is_read_back(line: Record | Started) -> None:
    data = encode_line(line)

    assert data.count(b"\n") == 1
    assert decode_line(data) == line


@given(st.binary(max_size=200))
def test_noise_is_a_record_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode_line(data)
