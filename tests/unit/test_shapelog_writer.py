"""Appending to a shape log: killed writers, two of one rank, a full disk, places that are not ours."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from as_user import NAMELESS, as_nameless_user
from processes import start_child

from prefetchd.shapelog import (
    LogUnusable,
    Published,
    Record,
    ShapeLog,
    Started,
    Unreadable,
    compact,
    decode_line,
    encode_record,
    log_directory,
    log_name,
    read_log,
)
from prefetchd.shapelog.reading import read_places

RECORD = Record(compiler="triton", key="k", fingerprint="f", seconds=1.5, rebuild={"source": "x" * 500})


def numbered(number: int, size: int = 0) -> Record:
    return Record(compiler="triton", key=f"k{number}", fingerprint="f", rebuild={"filler": "x" * size})


def records(path: Path) -> list[Record]:
    return [line for line in read_log(path) if isinstance(line, Record)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_record_is_signed_with_who_wrote_it(tmp_path: Path) -> None:
    log = ShapeLog(tmp_path / "state" / "logs", "node-a", 3)

    assert log.append(RECORD)

    (record,) = records(log.path)
    assert log.path == tmp_path / "state" / "logs" / "node-a.rank3.jsonl"
    assert (record.host, record.rank) == ("node-a", 3)
    assert record.process.startswith(f"{os.getpid()}-")
    assert (record.key, record.seconds, record.rebuild) == ("k", 1.5, RECORD.rebuild)


def test_log_and_its_directory_are_private(tmp_path: Path) -> None:
    log = ShapeLog(tmp_path / "logs", "node", 0)

    assert log.path.stat().st_mode & 0o777 == 0o600
    assert log.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("node-a.lan", "node-a.lan.rank0.jsonl"),
        ("../../etc/passwd", "_.._etc_passwd.rank0.jsonl"),
        ("", "unnamed.rank0.jsonl"),
        ("ü" * 100, "_" * 64 + ".rank0.jsonl"),
    ],
)
def test_name_of_a_host_is_no_path(host: str, name: str) -> None:
    assert log_name(host, 0) == name


def test_directory_is_the_users_state_unless_it_is_named(tmp_path: Path) -> None:
    assert log_directory("/logs", {}) == Path("/logs")
    assert log_directory(None, {"XDG_STATE_HOME": "/state", "HOME": "/home/u"}) == Path("/state/prefetchd")
    assert log_directory(None, {"HOME": "/home/u"}) == Path("/home/u/.local/state/prefetchd")
    with pytest.raises(LogUnusable, match="PREFETCHD_LOG_DIR"):
        log_directory(None, {})


def test_torn_last_line_of_a_predecessor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / log_name("node", 0)
    path.write_bytes(encode_record(numbered(1)) + encode_record(numbered(2))[:-9])

    ShapeLog(tmp_path, "node", 0).append(numbered(3))

    assert [record.key for record in records(path)] == ["k1", "k3"]


def test_line_that_another_process_left_open_just_before_ours_costs_only_itself(tmp_path: Path) -> None:
    log = ShapeLog(tmp_path, "node", 0)
    log.append(numbered(1))
    with log.path.open("ab") as other:
        other.write(b'{"compiler":"cut off in the midd')

    assert log.append(numbered(2))
    assert log.append(numbered(3))

    assert [record.key for record in records(log.path)] == ["k1", "k2", "k3"]


def test_killed_writers_leave_every_complete_record(tmp_path: Path) -> None:
    """1,000 appends and more by real processes that are killed at random moments, all to one file."""
    chance = random.Random(5)
    told: list[int] = []
    kills = 0
    while len(told) < 1000:
        read, write = os.pipe()

        def append(first: int = 1000 * kills, out: int = write) -> None:
            log = ShapeLog(tmp_path, "node", 0)
            for number in range(first, first + 1000):
                # Large, so that a kill meets the middle of a write.
                if log.append(numbered(number, size=chance.randrange(60_000))):
                    os.write(out, b"%d\n" % number)

        child = start_child(append)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            for _ in range(chance.randrange(1, 60)):
                told.append(int(pipe.readline()))
            os.kill(child, signal.SIGKILL)
            told += [int(line) for line in pipe if line.endswith(b"\n")]
        os.waitpid(child, 0)
        kills += 1
    found = list(read_places(tmp_path / log_name("node", 0)))
    assert {f"k{number}" for number in told} <= {line.key for line, _ in found if isinstance(line, Record)}
    # Each kill loses at most the record that was being written.
    assert sum(isinstance(line, Unreadable) for line, _ in found) <= kills


def test_processes_of_the_same_rank_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    def append(writer: int) -> None:
        log = ShapeLog(tmp_path, "node", 0)
        for number in range(200):
            assert log.append(numbered(1000 * writer + number, size=number * 97 % 9000))

    children = [start_child(lambda writer=writer: append(writer)) for writer in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4

    found = list(read_places(tmp_path / log_name("node", 0)))
    assert all(isinstance(line, Record) for line, _ in found)
    assert {line.key for line, _ in found} == {  # type: ignore[union-attr]
        f"k{1000 * writer + number}" for writer in range(4) for number in range(200)
    }


def test_threads_and_forked_children_share_a_log(tmp_path: Path) -> None:
    log = ShapeLog(tmp_path, "node", 0)
    threads = [
        threading.Thread(target=lambda first=first: [log.append(numbered(first + i)) for i in range(50)])
        for first in (0, 100, 200)
    ]
    for thread in threads:
        thread.start()
    # The child may be forked while a thread holds the lock.
    child = start_child(lambda: [log.append(numbered(300 + i)) for i in range(50)])
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0

    found = records(log.path)
    assert len(found) == 200
    assert len({record.process for record in found}) == 2


def test_full_disk_is_one_clear_line_and_room_makes_it_write_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        log = ShapeLog(disk / "logs", "node", 0)
        assert log.append(numbered(1))
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

        assert [log.append(numbered(number, size=9000)) for number in range(2, 6)] == [False] * 4
        filler.unlink()
        assert log.append(numbered(6))
        found = [record.key for record in records(log.path)]

    assert (found, log.dropped) == (["k1", "k6"], 4)
    (line,) = warnings(caplog)
    assert "disk is full" in line or "No space left" in line
    assert str(log.path) in line


def test_log_at_its_bound_stops_with_one_clear_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = ShapeLog(tmp_path, "node", 0, max_bytes=2000)

    outcomes = [log.append(numbered(number, size=400)) for number in range(8)]

    assert outcomes == [True] * 3 + [False] * 5
    assert log.path.stat().st_size <= 2000
    (line,) = warnings(caplog)
    assert "log compact" in line
    assert "PREFETCHD_LOG_MAX_MB" in line


def test_record_no_reader_would_accept_is_dropped_and_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = ShapeLog(tmp_path, "node", 0)
    bad = [
        msgspec.structs.replace(RECORD, key="k" * 2000),
        msgspec.structs.replace(RECORD, seconds=-1.0),
        msgspec.structs.replace(RECORD, seconds=float("nan")),
        msgspec.structs.replace(RECORD, rebuild={"source": "x" * (2 << 20)}),
        msgspec.structs.replace(RECORD, rebuild={"object": object()}),
    ]

    assert [log.append(record) for record in bad] == [False] * 5

    assert log.path.read_bytes() == b""
    assert len(warnings(caplog)) == 1


def test_long_texts_for_people_are_cut_and_the_record_kept(tmp_path: Path) -> None:
    log = ShapeLog(tmp_path, "node", 0)

    assert log.append(msgspec.structs.replace(RECORD, site="s" * 9000, changed="c" * 9000))

    (record,) = records(log.path)
    assert (len(record.site), len(record.changed)) == (4096, 4096)


def test_log_that_somebody_removed_is_begun_anew(tmp_path: Path) -> None:
    log = ShapeLog(tmp_path, "node", 0)
    log.append(numbered(1))
    log.path.unlink()

    assert log.append(numbered(2))

    assert [record.key for record in records(log.path)] == ["k2"]


def test_closed_log_drops_what_comes(tmp_path: Path) -> None:
    log = ShapeLog(tmp_path, "node", 0)
    log.close()

    assert not log.append(RECORD)
    assert log.path.read_bytes() == b""


def test_handler_of_the_engine_that_fails_reaches_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ShapeLog(tmp_path, "node", 0)
    log.close()

    def fail(*arguments: object) -> None:
        raise RuntimeError("a handler of the engine's")

    monkeypatch.setattr(logging.getLogger("prefetchd"), "warning", fail)
    assert not log.append(RECORD)


def test_link_in_the_place_of_a_log_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / log_name("node", 0)).symlink_to(victim)

    with pytest.raises(LogUnusable, match="rank0"):
        ShapeLog(tmp_path, "node", 0)

    assert victim.read_text() == "precious"


def test_link_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "real")

    with pytest.raises(LogUnusable, match="is a link"):
        ShapeLog(tmp_path / "logs", "node", 0)


@pytest.mark.parametrize("kind", ["fifo", "directory", "hard link"])
def test_what_is_no_plain_file_of_its_own_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / log_name("node", 0)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        (tmp_path / "other").write_text("")
        path.hardlink_to(tmp_path / "other")

    with pytest.raises(LogUnusable, match="PREFETCHD_LOG_DIR"):
        ShapeLog(tmp_path, "node", 0)


def test_directory_that_anyone_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)

    with pytest.raises(LogUnusable, match="written by anyone"):
        ShapeLog(tmp_path, "node", 0)


def test_directory_and_log_of_another_user_are_refused(tmp_path: Path) -> None:
    open_to_all, foreign, own = tmp_path / "open", tmp_path / "foreign", tmp_path / "own"
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_mode & 0o011 != 0o011 and directory.stat().st_uid == os.geteuid():
            directory.chmod(directory.stat().st_mode | 0o011)
    for directory in (open_to_all, foreign, own):
        directory.mkdir()
    open_to_all.chmod(0o777)
    if os.geteuid() == 0:
        # In a directory of its own somebody else's file lies ready, open to all.
        os.chown(own, NAMELESS, NAMELESS)
    (own / log_name("node", 0)).write_text("")
    (own / log_name("node", 0)).chmod(0o666)

    def try_all() -> list[str]:
        found = []
        for directory in (open_to_all, foreign, own):
            try:
                ShapeLog(directory, "node", 0)
            except LogUnusable as error:
                found.append(str(error))
        return found

    for_anyone, read_only, not_ours = as_nameless_user(try_all)
    assert "written by anyone" in for_anyone
    assert "make it writable for uid 12345" in read_only
    assert "belongs to user 0, not to 12345" in not_ours


def test_compaction_and_a_writer_exclude_each_other(tmp_path: Path) -> None:
    log = ShapeLog(tmp_path, "node", 0)
    log.append(numbered(1))
    log.append(numbered(1))

    with pytest.raises(LogUnusable, match="locked"):
        compact(log.path)
    log.close()
    done = compact(log.path)

    assert (done.records, done.duplicates) == (1, 1)
    assert ShapeLog(tmp_path, "node", 0).append(numbered(2))
    assert [record.key for record in records(log.path)] == ["k1", "k2"]


def test_file_system_without_locks_is_appended_to_and_never_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("prefetchd.shapelog.writer.fcntl.flock", no_locks)
    log = ShapeLog(tmp_path, "node", 0)

    assert log.append(numbered(1))
    with pytest.raises(LogUnusable, match="not implemented"):
        compact(log.path)


def test_other_kinds_of_lines_name_their_kind_first(tmp_path: Path) -> None:
    log = ShapeLog(tmp_path, "node", 0)
    log.append(Started(compiler="triton", token=7, key="k", at=1.0))
    log.append(Published(compiler="triton", key="k", at=2.0, seconds=3.0))

    first, second = log.path.read_bytes().splitlines()

    assert first.startswith(b'{"kind":"started"')
    assert json.loads(second)["kind"] == "published"
    assert isinstance(decode_line(first), Started)
