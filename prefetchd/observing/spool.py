"""What nvcc's stand-in leaves for the engine that started it, and the eight bytes by which the engine knows.

Each process has a private directory, named to its children by a variable. For every compile the stand-in
leaves three files in it (see `compilers/nvcc_stand_in.sh`): their times are the compile's exact start and
end, and the first is there while nvcc runs, for everyone to see, whatever the engine's own threads are doing.
It also overwrites the first eight bytes of `page`, which this process has mapped: comparing them costs
nanoseconds and no system call, which is all that a call of a kernel pays.

The subtle rule: a directory belongs to a process that lives while that process holds the lock on its page, so
directories of the dead can be told and removed by whoever comes next, in any pid namespace. A forked child
makes one of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from prefetchd.endpoint import EndpointError, find_endpoint

PAGE = "page"
# As many bytes as one machine word, so that they change in one step.
NOBODY = b"00000000"
# Directories without their name so far; one that stays so for a minute has lost its maker.
UNFINISHED, UNFINISHED_S = ".new-", 60.0
# Processes of one number, each in a pid namespace of its own.
MAX_NAMESAKES = 64
# What is read of a file: generated sources have a few KB, command lines less.
MAX_SOURCE = 1 << 20


class SpoolUnusable(Exception):
    """No directory can be made for nvcc's stand-in; the text names it, the reason and the fix."""


class Run(NamedTuple):
    """One run of nvcc. Times are seconds since 1970; `status` is None where its end was not told."""

    process: int
    arguments: bytes
    source: str
    began: float
    ended: float
    status: int | None

    @property
    def of_deep_gemm(self) -> bool:
        """Whether it is one that DeepGEMM's JIT starts: both its lines name the two files so."""
        arguments = self.arguments.split(b"\0")
        return any(one.endswith(b"/kernel.cu") for one in arguments) and any(
            one.endswith(b"/kernel.cubin") for one in arguments
        )

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return max(self.ended - self.began, 0.0)


class Running(NamedTuple):
    """A run of nvcc that has not ended: the engine's process, its own, since when, and its command."""

    engine: int
    process: int
    began: float
    command: str


def spool_base(environment: Mapping[str, str]) -> Path:
    """Where every process of this user has its directory. Raises `SpoolUnusable`."""
    endpoint = find_endpoint(environment)
    try:
        # Makes the directory private, or refuses one that is not.
        endpoint.prepare()
    except EndpointError as error:
        raise SpoolUnusable(str(error)) from error
    assert endpoint.directory is not None
    return endpoint.directory / "nvcc"


class Spool:
    """This process's directory. Raises `SpoolUnusable`."""

    def __init__(self, base: Path) -> None:
        self._claimed: set[str] = set()
        # Reentrant, since a signal handler of the engine's may compile too.
        self._lock = threading.RLock()
        try:
            base.mkdir(mode=0o700, exist_ok=True)
            remove_dead(base)
            self.directory, self._file = _make_directory(base)
            self._map = mmap.mmap(self._file, len(NOBODY))
        except OSError as error:
            raise SpoolUnusable(
                f"{base}: {error.strerror or error}; give XDG_RUNTIME_DIR or TMPDIR a private directory with "
                "some room"
            ) from error
        # One word, in place: `word[0]` changes when a compile begins.
        self.word: memoryview = memoryview(self._map).cast("Q")

    def finished(self) -> list[str]:
        """Runs that have ended and were not returned before, oldest first."""
        return self.finished_before(math.inf)

    def finished_before(self, moment: float) -> list[str]:
        """Of those, the ones that ended before; the others stay for the call they belong to."""
        names = [path.name for path in self.directory.iterdir()]
        with self._lock:
            ended = {name.removesuffix(".end") for name in names if name.endswith(".end")} - self._claimed
            ended = {name for name in ended if self._ended_at(name) < moment}
            self._claimed |= ended
        return sorted(ended, key=self._ended_at)

    def unfinished(self) -> list[str]:
        """Runs that have begun and not ended, as far as their stand-in could say."""
        names = {path.name for path in self.directory.iterdir()}
        return [
            name.removesuffix(".argv")
            for name in names
            if name.endswith(".argv") and f"{name.removesuffix('.argv')}.end" not in names
        ]

    def abandoned(self) -> list[str]:
        """Runs whose stand-in is gone and could not tell their end: killed, or the disk was full."""
        found = [name for name in self.unfinished() if name.isdecimal() and not _lives(int(name))]
        with self._lock:
            found = [name for name in found if name not in self._claimed]
            self._claimed.update(found)
        return found

    def began(self, name: str) -> float:
        """When that run began. Raises `OSError`."""
        return (self.directory / f"{name}.argv").stat().st_mtime

    def peek(self, name: str) -> Run:
        """What is known of a run that has not ended. Raises `OSError`."""
        path = self.directory / f"{name}.argv"
        source = path.with_suffix(".cu")
        text = _read(source).decode("utf-8", "replace") if source.exists() else ""
        return Run(int(name), _read(path), text, path.stat().st_mtime, time.time(), None)

    def take(self, name: str) -> Run | None:
        """All of a run that was returned above, whose files are gone then; None if they were already."""
        end = self.directory / f"{name}.end"
        try:
            run = self.peek(name)
            if end.exists():
                text = _read(end).strip()
                status = int(text) if text.isdigit() else None
                run = run._replace(ended=end.stat().st_mtime, status=status)
            return run
        except (OSError, ValueError):
            return None
        finally:
            for suffix in ("argv", "cu", "end"):
                with contextlib.suppress(OSError):
                    (self.directory / f"{name}.{suffix}").unlink(missing_ok=True)
            with self._lock:
                self._claimed.discard(name)

    def close(self) -> None:
        """Removes the directory, if it is still ours; the word keeps its last value."""
        if self._file >= 0:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """In a forked child: lets go of what the parent still uses; its lock stays the parent's."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def _ended_at(self, name: str) -> float:
        try:
            return (self.directory / f"{name}.end").stat().st_mtime
        except OSError:
            return 0.0


def _make_directory(base: Path) -> tuple[Path, int]:
    """A directory under this process's number, and its page, whose lock was ours before anyone saw it."""
    made = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=base))
    file = os.open(made / PAGE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Before it is mapped: on a full disk this fails, while touching the page would be fatal.
        if os.write(file, NOBODY) != len(NOBODY):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return _named(made, base), file
    except BaseException:
        os.close(file)
        shutil.rmtree(made, ignore_errors=True)
        raise


def _named(made: Path, base: Path) -> Path:
    """Its name from now on. In another pid namespace a process with our number may live."""
    for suffix in ("", *(f"-{number}" for number in range(1, MAX_NAMESAKES))):
        try:
            return made.rename(base / f"{os.getpid()}{suffix}")
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    raise OSError(errno.EEXIST, f"{MAX_NAMESAKES} processes with the number {os.getpid()} live")


def remove_dead(base: Path) -> None:
    """Removes the directories of processes that are gone."""
    for directory in list(base.iterdir()):
        with contextlib.suppress(OSError):
            if directory.name.startswith(UNFINISHED):
                # Its maker may be about to lock it.
                if time.time() - directory.stat().st_mtime > UNFINISHED_S:
                    shutil.rmtree(directory, ignore_errors=True)
                continue
            with _unheld(directory / PAGE) as dead:
                # Under the lock, so that a successor with this number does not find it half removed.
                if dead:
                    shutil.rmtree(directory, ignore_errors=True)


def running(base: Path) -> Iterator[Running]:
    """Every run of nvcc that some engine of this user waits for now, whatever that engine's threads do."""
    for directory in sorted(base.iterdir()) if base.is_dir() else ():
        with contextlib.suppress(OSError):
            engine = directory.name.partition("-")[0]
            with _unheld(directory / PAGE) as dead:
                if dead or not engine.isdecimal():
                    continue
            for path in sorted(directory.glob("*.argv")):
                if not path.with_suffix(".end").exists() and path.stem.isdecimal() and _lives(int(path.stem)):
                    command = _read(path).replace(b"\0", b" ").decode("utf-8", "replace").strip()
                    yield Running(int(engine), int(path.stem), path.stat().st_mtime, command)


@contextlib.contextmanager
def _unheld(page: Path) -> Iterator[bool]:
    """Whether nobody has the lock of that page; meanwhile we have it. Raises `OSError` without a page."""
    file = os.open(page, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(file)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_SOURCE)
