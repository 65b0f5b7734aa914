"""Counting an engine's compiles from outside the engine and its libraries.

An nvcc that notes when each compile starts and ends and is otherwise the real one; a watcher that lists a
DeepJIT cache and keeps when each entry was first seen; and what a Triton cache holds.
"""

from __future__ import annotations

import contextlib
import stat
import threading
import time
from pathlib import Path
from typing import NamedTuple

# Entries appear a few a second; so often a look is cheap and its error small beside a compile.
LOOK_S = 0.02


class Span(NamedTuple):
    """One compile: seconds since the epoch."""

    begin: float
    end: float


class CountingNvcc:
    """The program at `path`. It notes nothing for `--version`."""

    def __init__(self, folder: Path, real: str) -> None:
        self.path, self._notes = folder / "nvcc", folder / "compiles"
        self.path.write_text(
            "#!/bin/sh\n"
            f'case "$*" in *--version*) exec {real} "$@" ;; esac\n'
            "begin=$(date +%s.%N)\n"
            f'{real} "$@"\n'
            "status=$?\n"
            f'echo "$begin $(date +%s.%N)" >> {self._notes}\n'
            "exit $status\n"
        )
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    def spans(self) -> list[Span]:
        """Every compile so far that has ended, in the order of their ends."""
        if not self._notes.exists():
            return []
        return [Span(*map(float, line.split())) for line in self._notes.read_text().splitlines()]


class CacheWatch:
    """While it is open, keeps when each entry of a DeepJIT cache was first seen (seconds since the epoch)."""

    def __init__(self, root: Path) -> None:
        self.seen: dict[str, float] = {}
        self._place = root / "cache"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cache-watch")

    def __enter__(self) -> CacheWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Notes what is new."""
        now = time.time()
        for name in entries(self._place.parent):
            self.seen.setdefault(name, now)


def entries(root: Path) -> set[str]:
    """The complete entries of a DeepJIT cache, of either line."""
    with contextlib.suppress(OSError):
        return {path.parent.name for path in (root / "cache").glob("*/kernel.cubin")}
    return set()


def first_uses(root: Path, published: dict[str, float]) -> dict[str, float]:
    """When a process first took entries it found there: the library touches the marker of one it finds.

    What nobody took, and what the process compiled itself, is not among them.
    """
    found = {}
    for name, moment in published.items():
        with contextlib.suppress(OSError):
            touched = (root / "cache" / name / ".committed").stat().st_mtime
            # Until then the marker has the time at which it was written, just before it was published.
            if touched > moment + LOOK_S:
                found[name] = touched
    return found


def triton_kernels(cache: Path) -> set[str]:
    """The keys of the complete kernels of a Triton cache."""
    return {path.parent.name for path in cache.glob("*/__grp__*.json")}
