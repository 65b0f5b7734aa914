"""Processes of a test: children that never return into it, and a FIFO that tells of a process tree's life."""

from __future__ import annotations

import os
import select
import traceback
from collections.abc import Callable
from pathlib import Path

# Only a failed test waits this long.
LIMIT_S = 20.0


def start_child(function: Callable[[], object]) -> int:
    """The id of a forked child that runs the function and ends, with status 0 if it returned."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


class LifeSign:
    """A FIFO that a tree of processes opens: a line says that it has begun, the end that all are gone."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # Shell text that opens it, for the shell that runs it and all that it starts.
        self.shell = f'exec 9>"{path}"; echo begun >&9'

    def wait_begun(self) -> None:
        assert self._read() == b"begun\n"

    def all_gone(self) -> bool:
        return self._read() == b""

    def close(self) -> None:
        os.close(self._file)

    def _read(self) -> bytes | None:
        ready, _, _ = select.select([self._file], [], [], LIMIT_S)
        return os.read(self._file, 64) if ready else None
