"""Reading shape logs, whatever is in them: a stream of lines, and a problem for each that is none.

A log may have been cut off by a kill, filled with zeros by a lost power, written by another version or by
somebody who means harm. The promise: reading raises nothing on account of what a file *holds*, keeps no more
than one line of it in memory, and tells of each line that it could not use, with file, number and reason.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from prefetchd.shapelog.record import MAX_LINE_BYTES, Line, RecordError, UnknownKind, decode_line
from prefetchd.shapelog.writer import LOG_SUFFIX, LogUnusable

# Lies in the same directory and is no shape log.
WINNERS_NAME = "winners.jsonl"
# A reason may quote what the line holds; a person reads its beginning.
MAX_REASON = 200
# Of a line that is too long; what follows is told as another, so that a reader can be interrupted in between.
MAX_SKIPPED = 64 << 20
# Problems told one by one; a file of noise has one for each of its lines.
MAX_PROBLEMS = 100


class Unreadable(msgspec.Struct, frozen=True, kw_only=True):
    """A line that is no use to this version."""

    path: Path
    number: int
    reason: str
    # Whole, and written by a newer version: not ours to throw away.
    foreign: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.reason}"


class Place(NamedTuple):
    """Where a line stands: its first byte, how many it has with its end, and its number from 1."""

    offset: int
    size: int
    number: int


class Problems:
    """What could not be read: all counted, the first of them kept."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, problem: object) -> None:
        """Counts one; its text is kept while there is room."""
        self.count += 1
        if len(self.first) < MAX_PROBLEMS:
            self.first.append(str(problem))


def read_log(path: Path, problems: Problems | None = None) -> Iterator[Line]:
    """Each line of the file that is one; the others go to `problems`. Raises `LogUnusable` at the start."""
    for found, _ in read_places(path):
        if not isinstance(found, Unreadable):
            yield found
        elif problems is not None:
            problems.add(found)


def read_places(path: Path) -> Iterator[tuple[Line | Unreadable, Place]]:
    """Every line that is not empty, and where it stands. Raises `LogUnusable` if there is no such file."""
    with open_log(path) as file:
        offset, number = 0, 0
        while data := _read(file, path):
            number += 1
            size = len(data)
            whole = data.endswith(b"\n") or size <= MAX_LINE_BYTES
            if not whole:
                size += _skip_line(file)
            if text := data.strip(b" \t\r\n"):
                yield _decoded(text, whole, size, path, number), Place(offset, size, number)
            offset += size


def open_log(path: Path) -> BinaryIO:
    """The file for reading. Raises `LogUnusable`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise LogUnusable(f"shape log {path}: is no plain file; name one, or its directory")
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def log_files(paths: Iterable[Path]) -> list[Path]:
    """The logs that are meant: files as they are named, of a directory those in it. Raises `LogUnusable`."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            open_log(path).close()
            found[path] = None
            continue
        inside = logs_in(path)
        if not inside:
            raise LogUnusable(
                f"{path}: no shape log ({LOG_SUFFIX}) in this directory; engines write one where "
                "PREFETCHD_LOG_DIR says; name a log or another directory"
            )
        found.update(dict.fromkeys(inside))
    return list(found)


def logs_in(directory: Path) -> list[Path]:
    """The logs in a directory, which may have none. Raises `LogUnusable`."""
    try:
        return sorted(entry for entry in directory.iterdir() if _is_log(entry))
    except OSError as error:
        raise _unreadable(directory, error) from error


def _is_log(entry: Path) -> bool:
    return entry.name.endswith(LOG_SUFFIX) and entry.name != WINNERS_NAME and entry.is_file()


def _decoded(text: bytes, whole: bool, size: int, path: Path, number: int) -> Line | Unreadable:
    if not whole:
        reason = f"line of {size} bytes, more than {MAX_LINE_BYTES}"
        return Unreadable(path=path, number=number, reason=reason)
    try:
        return decode_line(text)
    except RecordError as error:
        reason = str(error)[:MAX_REASON]
        return Unreadable(path=path, number=number, reason=reason, foreign=isinstance(error, UnknownKind))


def _read(file: BinaryIO, path: Path) -> bytes:
    try:
        return file.readline(MAX_LINE_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error


def _skip_line(file: BinaryIO) -> int:
    """Reads on to the line's end, if that is not too far, and says how many bytes that were."""
    skipped = 0
    while skipped < MAX_SKIPPED and (data := file.readline(MAX_LINE_BYTES)):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped


def _unreadable(path: Path, error: OSError) -> LogUnusable:
    return LogUnusable(f"shape log {path}: cannot be read: {error.strerror}; name another file or directory")
