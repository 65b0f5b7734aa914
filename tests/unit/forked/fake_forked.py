"""A compiler whose jobs are Python programs, for tests of whoever runs them. It needs no library."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prefetchd.compilers.base import Capture, CompilerUnavailable, EntryState, ForkedCompiler, Job
from prefetchd.targets import Target


class FakeForked(ForkedCompiler):
    name = "fake"
    cache_variable = "FAKE_CACHE_DIR"

    def __init__(self, target: Target, environment: Mapping[str, str]) -> None:
        self._prepare = environment.get("FAKE_PREPARE", "")

    def fingerprint(self) -> Mapping[str, str]:
        return {}

    def cache_root(self) -> Path:
        raise AssertionError("a fork server publishes nothing")

    def prepare(self, scratch: Path) -> None:
        exec(self._prepare)

    @contextmanager
    def capture(self, scratch: Path) -> Iterator[Capture]:
        raise AssertionError("a fork server traces nothing")

    forbid = capture

    def modules(self, jobs: Iterable[Job]) -> frozenset[str]:
        return frozenset(job.key for job in jobs)

    def compile_here(self, job: Job, staging: Path) -> None:
        names = {"staging": staging, "hang": lambda: hang(staging), "Refuse": CompilerUnavailable}
        exec(job.payload.decode(), {**names, "os": os, "sys": sys, "subprocess": subprocess})

    def verify(self, job: Job, staging: Path) -> None:
        raise AssertionError("a fork server verifies nothing")

    def entry_path(self, key: str, root: Path) -> Path:
        raise AssertionError("a fork server knows no cache")

    def state(self, key: str, root: Path) -> EntryState:
        raise AssertionError("a fork server knows no cache")

    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        raise AssertionError("a fork server publishes nothing")


def hang(staging: Path) -> None:
    """Tells this process' number through the FIFO, which it and its program then hold open, and stays."""
    alive = os.open(staging / "alive", os.O_WRONLY)
    os.set_inheritable(alive, True)
    os.write(alive, f"{os.getpid()}\n".encode())
    subprocess.run(["sleep", "1000"], close_fds=False, check=True)
