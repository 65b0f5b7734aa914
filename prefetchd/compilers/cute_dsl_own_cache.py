"""What is common to libraries that keep their CuTe kernels on disk themselves: jobs, what was met, locks.

The library takes the same lock while it compiles, so under it nobody else writes the file we are about to
put there. The subtle rule: the lock is the library's and is asked for without blocking, up to a limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from prefetchd.compilers.base import CompilerUnavailable, ForkedCompiler, Job, NotRebuildable
from prefetchd.cute.fingerprint import architecture_of
from prefetchd.shapelog import Record
from prefetchd.targets import Target

# A library holds it while it compiles, which takes it half a minute at most.
LOCK_LIMIT_S = 120.0
LOCK_POLL_S = 0.05


class Keyed(Protocol):
    """A library's kernel as data."""

    @property
    def key(self) -> str:
        """Its name below the library's directory."""
        ...


K = TypeVar("K", bound=Keyed)


class Met(Generic[K]):
    """Kernels met so far, each once, kept in a file as well: a successor of a crashed trace goes on."""

    def __init__(self, path: Path, kind: type[K], job: Callable[[K], Job]) -> None:
        self._path, self._job = path, job
        self._kernels: dict[str, K] = {}
        # The last line may be half a kernel: a crash came while it was written.
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
            kernel = msgspec.json.decode(line, type=kind)
            self._kernels[kernel.key] = kernel

    def add(self, kernel: K | None) -> None:
        """One that was met; None has no form as data."""
        if kernel is not None and kernel.key not in self._kernels:
            self._kernels[kernel.key] = kernel
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(kernel) + b"\n")

    def jobs(self) -> list[Job]:
        """See `Capture`."""
        return [self._job(kernel) for kernel in self._kernels.values()]


class OwnCache(ForkedCompiler, Generic[K]):
    """The compiler behind such a library's cache; a job's payload is the kernel as data, of type `kind`."""

    kind: type[K]
    # What one of its compiles usually takes.
    usual_seconds: ClassVar[float]
    # The library's directory.
    _root: Path

    def __init__(self, target: Target, environment: Mapping[str, str]) -> None:
        self.target = target
        try:
            self.architecture = architecture_of(target, environment)
        except ValueError as error:
            raise CompilerUnavailable(str(error)) from error

    def cache_root(self) -> Path:
        """See `Compiler`."""
        return self._root

    def job(self, kernel: K) -> Job:
        """The job that compiles a kernel."""
        payload = msgspec.msgpack.encode(kernel)
        return Job(compiler=self.name, key=kernel.key, payload=payload, cost=self.usual_seconds)

    def kernel(self, job: Job) -> K:
        """The kernel of one of this compiler's jobs."""
        return msgspec.msgpack.decode(job.payload, type=self.kind)

    def recorded(self, record: Record, absent: str) -> K:
        """The kernel of a record; `absent` says why there may be none. Raises `NotRebuildable`."""
        if record.rebuild is None:
            raise NotRebuildable(f"rebuild: absent: {absent}")
        try:
            return msgspec.convert(record.rebuild, self.kind)
        except msgspec.ValidationError as error:
            raise NotRebuildable(f"rebuild: {error}") from error


@contextlib.contextmanager
def library_lock(path: Path) -> Iterator[None]:
    """Holds a library's lock file. Raises `TimeoutError` where it does not become free, and `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    limit = time.monotonic() + LOCK_LIMIT_S
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    text = f"{path}: the library holds its lock for {LOCK_LIMIT_S:.0f} s"
                    raise TimeoutError(text) from None
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(file)


def link(staged: Path, final: Path) -> bool:
    """A finished file under its final name in one step; False where there is one. Raises `OSError`."""
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    try:
        os.link(staged, final)
    except FileExistsError:
        return False
    return True
