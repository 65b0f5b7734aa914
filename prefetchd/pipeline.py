"""From jobs to published artifacts: compile in staging, verify, publish, each key once on this machine.

One rule is subtle: another process (a second `warm`, a daemon) may be compiling the same key. Its lock says
so; such a job is put aside, the others go on, and when the lock is free the cache is looked at again. So a
key is compiled once, and a holder that dies only costs its own work: the kernel frees its lock.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

import msgspec

from prefetchd.compilers.base import ArtifactInvalid, Compiler, EntryState, Job
from prefetchd.jobs import JobPool
from prefetchd.store import KeyLocks, Staging

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
    """Compiles jobs of one compiler into one cache root with a bounded number of processes."""

    def __init__(
        self, compiler: Compiler, root: Path, pool: JobPool, staging: Staging, locks: KeyLocks
    ) -> None:
        self._compiler = compiler
        self._root = root
        self._pool = pool
        self._staging = staging
        self._locks = locks

    async def run(self, jobs: Iterable[Job], done: Callable[[JobOutcome], None]) -> None:
        """Compiles all jobs, longest first; `done` hears of each as it ends. Cancelling it ends every compile."""
        queue = deque(sorted(jobs, key=lambda job: -job.cost))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._pool.slots, len(queue))):
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
        if self._compiler.state(job.key, self._root) is EntryState.PUBLISHED:
            return JobOutcome(job=job, ending=Ending.FOUND)
        try:
            with self._staging.entry(job.key) as entry:
                result = await self._pool.run(self._compiler.compile(job, entry), log=entry / "output.log")
                cost = {"cpu_s": result.cpu_s, "wall_s": result.wall_s}
                if not result.ok:
                    return JobOutcome(job=job, ending=Ending.FAILED, text=result.describe(), **cost)
                self._compiler.verify(job, entry)
                published = self._compiler.publish(job, entry, self._root)
                ending = Ending.COMPILED if published else Ending.FOUND
                return JobOutcome(job=job, ending=ending, **cost)
        except ArtifactInvalid as error:
            return JobOutcome(job=job, ending=Ending.FAILED, text=str(error))
        except OSError as error:
            return JobOutcome(job=job, ending=Ending.FAILED, text=_advice(error, self._root))


def _advice(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for {root}: free some, or name another directory; what is published stays"
    return f"{root}: {error}"
