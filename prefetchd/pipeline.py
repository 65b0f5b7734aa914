"""From jobs to published artifacts: compile in staging, verify, publish, each key once on this machine.

One rule is subtle: another process (a second `warm`, a daemon) may be compiling the same key. Its lock says
so; such a job is put aside, the others go on, and when the lock is free the cache is looked at again. So a
key is compiled once, and a holder that dies only costs its own work: the kernel frees its lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

import msgspec

from prefetchd.compilers.base import ArtifactInvalid, Compiler, CompilerUnavailable, EntryState, Job
from prefetchd.executors import Executor
from prefetchd.store import KeyLocks, Staging, quarantine

# How often a key that another process compiles is looked at; a compile takes seconds.
FOREIGN_POLL_S = 0.1


class Ending(StrEnum):
    """How a job ended."""

    COMPILED = "compiled"
    # Another process published it first: nothing was lost, nothing was overwritten.
    FOUND = "found"
    FAILED = "failed"


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One job's end. `cpu_s` and `wall_s` are the compile's own, as the job runner accounted them."""

    job: Job
    ending: Ending
    text: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Pipeline:
    """Compiles jobs of one compiler into its cache with a bounded number of processes.

    `quarantined` hears where each corrupt entry that stood in the way lies now.
    """

    def __init__(
        self,
        compiler: Compiler,
        *,
        executor: Executor,
        slots: int,
        staging: Staging,
        locks: KeyLocks,
        quarantined: Callable[[Path], None],
    ) -> None:
        self._compiler = compiler
        self._root = compiler.cache_root()
        self._executor = executor
        self._slots = slots
        self._staging = staging
        self._locks = locks
        self._quarantined = quarantined

    async def run(self, jobs: Iterable[Job], done: Callable[[JobOutcome], None]) -> None:
        """Compiles all jobs, longest first; `done` hears of each end. Cancelling ends every compile."""
        queue = deque(sorted(jobs, key=lambda job: -job.cost))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._slots, len(queue))):
                group.create_task(self._worker(queue, done))

    async def _worker(self, queue: deque[Job], done: Callable[[JobOutcome], None]) -> None:
        deferred = 0
        while queue:
            job = queue.popleft()
            if not self._locks.try_acquire(job.key):
                queue.append(job)
                deferred += 1
                if deferred >= len(queue):
                    deferred = 0
                    await asyncio.sleep(FOREIGN_POLL_S)
                continue
            deferred = 0
            try:
                done(await self._compile(job))
            finally:
                self._locks.release(job.key)

    async def _compile(self, job: Job) -> JobOutcome:
        try:
            state = self._compiler.look_up(job.key)
            if state is EntryState.PUBLISHED:
                return JobOutcome(job=job, ending=Ending.FOUND)
            if state is EntryState.CORRUPT:
                self._quarantine(job)
            with self._staging.entry(job.key) as entry:
                result = await self._executor.run(job, entry)
                cpu_s, wall_s = result.cpu_s, result.wall_s
                if not result.ok:
                    cause = _no_space(self._root) if result.reason == "disk" else result.describe()
                    text = f"{cause}\n{result.output}".strip()
                    return JobOutcome(job=job, ending=Ending.FAILED, text=text, cpu_s=cpu_s, wall_s=wall_s)
                self._compiler.verify(job, entry)
                published = self._compiler.publish(job, entry, self._root)
                ending = Ending.COMPILED if published else Ending.FOUND
                return JobOutcome(job=job, ending=ending, cpu_s=cpu_s, wall_s=wall_s)
        except (ArtifactInvalid, CompilerUnavailable) as error:
            return JobOutcome(job=job, ending=Ending.FAILED, text=str(error))
        except OSError as error:
            return JobOutcome(job=job, ending=Ending.FAILED, text=_advice(error, self._root))

    def _quarantine(self, job: Job) -> None:
        """Moves what an engine would fail on out of its way; we hold the key, so nobody published since."""
        with contextlib.suppress(FileNotFoundError):
            self._quarantined(quarantine(self._root, self._compiler.entry_path(job.key, self._root)))


def _advice(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(root)
    return f"{root}: {error}"


def _no_space(root: Path) -> str:
    return f"no space left for {root}: free some, or name another directory; what is published stays"
