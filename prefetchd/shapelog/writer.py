"""Appending to a rank's shape log, from inside the engine: whole lines, or nothing that harms.

What a reader can observe, whatever happened to the writers (killed at any moment, a full disk, two engines of
the same rank): every line whose append returned True is there, whole and on a line of its own; what was cut
off stands on a line that is no record. A line is one `write` to a file opened for appending, which the kernel
never mixes with another. The subtle rule: a write that was cut off leaves its line open, and the next one,
perhaps another process's, would be glued to it. So each append looks at the byte before its own line, and if
that ended no line, writes the line once more.

Whoever appends holds a shared lock on the file, so that compaction, which replaces it, can tell. Only opening
waits, and not long: for the end of a compaction that runs just then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import msgspec

from prefetchd.shapelog.record import MAX_TEXT, Line, encode_line

log = logging.getLogger("prefetchd")

LOG_SUFFIX = ".jsonl"
# Without the setting `log_max_mb`.
DEFAULT_MAX_BYTES = 64 << 20
# Host names are at most 64 bytes on Linux; the name that was given may be anything.
MAX_HOST = 64
# Compacting a full log takes about a second.
OPEN_ATTEMPTS, OPEN_INTERVAL_S = 100, 0.02
# Another thread's append takes microseconds; one that takes longer was suspended in the middle, or forked.
LOCK_LIMIT_S = 0.05

# What file systems without locks answer, as Lustre does unless it is told to have them.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_MODE = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LogUnusable(Exception):
    """Nothing can be written to a shape log; the text names the place, the reason and the fix."""


def log_directory(named: str | None, environment: Mapping[str, str]) -> Path:
    """Where shape logs lie: the setting `log_dir`, else the user's state directory. Raises `LogUnusable`."""
    if named:
        return Path(named).absolute()
    home = environment.get("HOME")
    base = environment.get("XDG_STATE_HOME") or (f"{home}/.local/state" if home else None)
    if base is None or not Path(base).is_absolute():
        raise LogUnusable("no place for shape logs: HOME is not set; set PREFETCHD_LOG_DIR to a directory")
    return Path(base) / "prefetchd"


def log_name(host: str, rank: int) -> str:
    """The name of a rank's log; a host's name is not trusted to be one of a file."""
    plain = _NOT_IN_NAMES.sub("_", host)[:MAX_HOST].lstrip(".")
    return f"{plain or 'unnamed'}.rank{rank}{LOG_SUFFIX}"


class ShapeLog:
    """One rank's log, open for appending. Raises `LogUnusable` at the start; `append` raises nothing.

    Host, rank and process are filled in here, so that nobody else need know them. Threads may share it, and
    so may forked children.
    """

    def __init__(self, directory: Path, host: str, rank: int, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.path = directory / log_name(host, rank)
        self.written = self.dropped = 0
        self._host, self._rank, self._max_bytes = host[:MAX_HOST], rank, max_bytes
        self._lock = threading.Lock()
        self._complained = False
        _make_private(directory)
        self._file, self._closed = -1, False
        # In a forked child, until it has opened the file itself.
        self._inherited = False
        self._open()
        _logs.add(self)

    def append(self, line: Line) -> bool:
        """Whether the line is in the file now. The first failure is one line of the program's own log."""
        try:
            self._append(line)
        except Exception as error:
            # Of whatever kind: the engine goes on as if there were no log.
            self._complain(getattr(error, "strerror", None) or str(error))
            return False
        self.written += 1
        return True

    def close(self) -> None:
        """Lets the file go; what is appended afterwards is dropped."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)

    def _append(self, line: Line) -> None:
        data = encode_line(self._signed(line))
        if not self._lock.acquire(timeout=LOCK_LIMIT_S):
            raise TimeoutError("another thread's append does not end")
        try:
            self._append_bytes(data)
        finally:
            self._lock.release()

    def forget_parent(self) -> None:
        """In a forked child: a thread that is not here may have held the lock, and the position is shared."""
        self._lock, self._inherited = threading.Lock(), True

    def _signed(self, line: Line) -> Line:
        texts = {name: getattr(line, name, "")[:MAX_TEXT] for name in ("site", "changed")}
        known = {name: text for name, text in texts.items() if name in line.__struct_fields__}
        return msgspec.structs.replace(
            line, host=self._host, rank=self._rank, process=process_name(), **known
        )

    def _append_bytes(self, data: bytes) -> None:
        if self._closed:
            raise ValueError("it is closed")
        found = os.fstat(self._file)
        if found.st_nlink == 0 or self._inherited:
            # Someone removed it, so that this engine's records would be lost with its end; or the parent's
            # writes would move the position behind ours.
            self._open()
            found = os.fstat(self._file)
        if found.st_size + len(data) > self._max_bytes:
            raise ValueError(
                f"it has reached {self._max_bytes / (1 << 20):.4g} MiB; run `prefetchd log compact` while no "
                "engine writes to it, or raise PREFETCHD_LOG_MAX_MB"
            )
        if not self._write(b"\n" + data if self._torn else data, len(data)) and not self._write(
            # Somebody's line was cut off right before ours and swallowed it.
            b"\n" + data,
            len(data),
        ):
            raise OSError("other processes' writes to it are cut off again and again")

    def _open(self) -> None:
        file = open_locked(self.path, fcntl.LOCK_SH)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._inherited = file, False
        # What a predecessor was writing when it was killed, or when the disk was full.
        self._torn = _is_torn(file, os.fstat(file).st_size)

    def _write(self, data: bytes, length: int) -> bool:
        """Whether the last `length` bytes of it are in the file as lines of their own. Raises `OSError`."""
        written = os.write(self._file, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError("the disk is full")
        # The kernel has left the position behind what it appended, wherever that was.
        return not _is_torn(self._file, os.lseek(self._file, 0, os.SEEK_CUR) - length)

    def _complain(self, problem: str) -> None:
        self.dropped += 1
        if self._complained:
            return
        self._complained = True
        with contextlib.suppress(Exception):
            # A handler of the engine's that fails is not ours to repair.
            log.warning(
                "prefetchd: shape log %s: %s; what this engine compiles is not kept", self.path, problem
            )


def process_name() -> str:
    """This process, told from earlier ones with its number; a fork's child is another."""
    pid = os.getpid()
    if _names.get("pid") != str(pid):
        _names["name"] = f"{pid}-{_start_ticks()}"
        _names["pid"] = str(pid)
    return _names["name"]


def open_locked(path: Path, lock: int, attempts: int = OPEN_ATTEMPTS) -> int:
    """The file under that name, created if absent, with a lock that was free. Raises `LogUnusable`."""
    for left in reversed(range(attempts)):
        try:
            file = os.open(path, _MODE, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            if problem := _not_a_log(os.fstat(file)):
                raise LogUnusable(f"shape log {path}: {problem}; remove it, or set PREFETCHD_LOG_DIR")
            _take(file, lock)
            if path.lstat().st_ino == os.fstat(file).st_ino:
                kept, file = file, -1
                return kept
        except BlockingIOError:
            if left:
                time.sleep(OPEN_INTERVAL_S)
        except FileNotFoundError:
            # Replaced or removed just now.
            continue
        except OSError as error:
            raise _unusable(path, error) from error
        finally:
            if file >= 0:
                os.close(file)
    raise LogUnusable(f"shape log {path}: it is locked; end the engine or the compaction that uses it")


def _take(file: int, lock: int) -> None:
    """The lock, if it is free. Raises `BlockingIOError` if not, `OSError` if there are none."""
    try:
        fcntl.flock(file, lock | fcntl.LOCK_NB)
    except OSError as error:
        # Appending is safe without a lock; compaction needs one, and will find none there either.
        if error.errno not in NO_LOCKS or lock != fcntl.LOCK_SH:
            raise


_names: dict[str, str] = {}
_logs: weakref.WeakSet[ShapeLog] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_logs):
        one.forget_parent()


os.register_at_fork(after_in_child=_after_fork)


def _start_ticks() -> str:
    """When this process began, in the kernel's count since the machine did."""
    try:
        # The program's name, in parentheses, may hold anything; the start is the 20th field behind it.
        return Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        # Without /proc the number alone must do.
        return "0"


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise _unusable(directory, error) from error
    if not stat.S_ISDIR(found.st_mode):
        problem = "is a link or a file"
    elif found.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    elif found.st_mode & stat.S_IWOTH:
        problem = f"may be written by anyone (mode {stat.S_IMODE(found.st_mode):#o})"
    else:
        return
    raise LogUnusable(f"directory of shape logs {directory} {problem}; correct it, or set PREFETCHD_LOG_DIR")


def _not_a_log(found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "it is no plain file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
    if found.st_nlink > 1:
        return "it has another name elsewhere"
    return ""


def _is_torn(file: int, end: int) -> bool:
    """Whether what precedes `end` is a line that nobody has ended."""
    return end > 0 and os.pread(file, 1, end - 1) != b"\n"


def _unusable(path: Path, error: OSError) -> LogUnusable:
    return LogUnusable(
        f"shape log {path}: {error.strerror}; make it writable for uid {os.geteuid()}, or set "
        "PREFETCHD_LOG_DIR to a directory that is"
    )
