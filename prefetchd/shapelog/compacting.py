"""Writing a merged log: to a new place, or over the log itself while nobody appends to it.

What a stranger can observe under the name is the old log or the new one, whole, at any moment. The subtle
rule: an engine that has the old file open would go on writing into what nobody reads any more. It holds a
shared lock as long as it may append, so compaction takes the exclusive one or does not take place.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prefetchd.shapelog.merging import Merged
from prefetchd.shapelog.reading import open_log
from prefetchd.shapelog.record import encode_line
from prefetchd.shapelog.writer import LogUnusable, open_locked


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a log: bytes before and after, the records that are left, lines that were none."""

    path: str
    before: int
    after: int
    records: int
    duplicates: int
    unreadable: int


def write_merged(merged: Merged, out: Path) -> int:
    """Replaces `out` by the merged log in one step; says how many records it has. Raises `LogUnusable`."""
    count = 0
    try:
        handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                for line, _ in merged.lines():
                    file.write(line + b"\n")
                    count += 1
                file.writelines(_others(merged))
                file.flush()
                os.fsync(handle)
            temporary.replace(out)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise LogUnusable(
            f"{out}: cannot be written: {error.strerror}; name a file in a directory of your own"
        ) from error
    return count


def compact(path: Path) -> Compacted:
    """Keeps of a log one record a variant. Raises `LogUnusable`, also while an engine may append to it."""
    # Never creates the file, as the locking would.
    open_log(path).close()
    lock = open_locked(path, fcntl.LOCK_EX, attempts=1)
    try:
        before = os.fstat(lock).st_size
        merged = Merged([path])
        if merged.left_out:
            raise LogUnusable(
                f"shape log {path}: has {merged.left_out} variants more than fit into one log; merge its "
                "parts one by one"
            )
        records = write_merged(merged, path)
    finally:
        os.close(lock)
    return Compacted(
        path=str(path),
        before=before,
        after=path.stat().st_size,
        records=records,
        duplicates=merged.duplicates,
        unreadable=merged.problems.count - len(merged.foreign),
    )


def _others(merged: Merged) -> Iterator[bytes]:
    """The lines that are no records and still say something: unended compiles, and what we cannot read."""
    for started in merged.unfinished:
        yield encode_line(started)
    for line in merged.foreign_lines():
        yield line + b"\n"
