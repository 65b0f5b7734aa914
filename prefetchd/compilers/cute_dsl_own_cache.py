"""What is common to libraries that keep their CuTe kernels on disk themselves: their lock, and one new file.

The library takes the same lock while it compiles, so under it nobody else writes the file we are about to
put there. The subtle rule: the lock is the library's and is asked for without blocking, up to a limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

# A library holds it while it compiles, which takes it half a minute at most.
LOCK_LIMIT_S = 120.0
LOCK_POLL_S = 0.05


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
