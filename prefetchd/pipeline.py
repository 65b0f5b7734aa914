"""From jobs to published artifacts: each key once on this machine, the longest first.

One rule is subtle: another process (a second `warm`, a daemon) may be compiling the same key. Its lock says
so; such a job is put aside, the others go on, and when the lock is free the cache is looked at again. So a
key is compiled once, and a holder that dies only costs its own work: the kernel frees its lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from prefetchd.compilers.base import Compiler, Job
from prefetchd.executors import Executor
from prefetchd.jobs import JobResult
from prefetchd.store import KeyLocks, Staging
from prefetchd.workplace import Ending, JobOutcome, Workplace

__all__ = ["Ending", "JobOutcome", "Pipeline", "compile_all"]

# How often a key that another process compiles is looked at; a compile takes seconds.
FOREIGN_POLL_S = 0.1


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
        self._workplace = Workplace(compiler, compiler.cache_root(), staging, quarantined)
        self._executor = executor
        self._slots = slots
        self._locks = locks
        self._last_taken = asyncio.Event()
        self._last_taken.set()

    async def run(self, jobs: Iterable[Job], done: Callable[[JobOutcome], None]) -> None:
        """Compiles all jobs, longest first; `done` hears of each end. Cancelling ends every compile."""
        queue = deque(sorted(jobs, key=lambda job: -job.cost))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._slots, len(queue))):
                    group.create_task(self._worker(queue, done))
        except ExceptionGroup as failures:
            # What stopped one worker stopped the others; callers expect the error itself.
            raise failures.exceptions[0] from failures

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
            before, self._last_taken = self._last_taken, asyncio.Event()
            in_turn = _InTurn(self._executor, before, self._last_taken)
            try:
                done(await self._workplace.compile(job, in_turn))
            finally:
                in_turn.entered.set()
                self._locks.release(job.key)


class _InTurn:
    """One job's way to the executor: never before the one that was taken before it, however that dawdles."""

    def __init__(self, executor: Executor, before: asyncio.Event, entered: asyncio.Event) -> None:
        self._executor, self._before, self.entered = executor, before, entered

    async def run(self, job: Job, staging: Path) -> JobResult:
        """See `Executor`."""
        await self._before.wait()
        self.entered.set()
        return await self._executor.run(job, staging)


async def compile_all(
    jobs: Sequence[Job],
    compilers: Mapping[str, Compiler],
    executors: Mapping[str, Executor],
    *,
    slots: int,
    done: Callable[[JobOutcome], None],
    quarantined: Callable[[Path], None],
) -> None:
    """Compiles jobs of several compilers, each into its own cache. Raises `StoreUnwritable`."""
    with ExitStack() as stack:
        for name, compiler in compilers.items():
            own = [job for job in jobs if job.compiler == name]
            if own:
                root, variable = compiler.cache_root(), compiler.cache_variable
                staging = stack.enter_context(Staging(root, variable=variable))
                locks = stack.enter_context(closing(KeyLocks(root, variable=variable)))
                pipeline = Pipeline(
                    compiler,
                    executor=executors[name],
                    # One more than may run: its job is ready when another's result is being published.
                    slots=slots + 1,
                    staging=staging,
                    locks=locks,
                    quarantined=quarantined,
                )
                await pipeline.run(own, done)
