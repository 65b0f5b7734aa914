"""What is common to libraries that keep their CuTe kernels on disk themselves: what was met, lock, new file.

The library takes the same lock while it compiles, so under it nobody else writes the file we are about to
put there. The subtle rule: the lock is the library's and is asked for without blocking, up to a limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from prefetchd.compilers.base import Job

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
