"""What runs a job: a command under the job runner, or a worker forked from a warm process.

The pipeline knows only this interface. Its promise, whoever implements it: `run` always comes to an end with
a result, and when it returned or was cancelled no process of that job is left running.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

from prefetchd.compilers.base import CommandCompiler, Compiler, ForkedCompiler, Job
from prefetchd.config import Settings
from prefetchd.forked.executor import ForkedExecutor
from prefetchd.forked.messages import Start
from prefetchd.jobs import JobPool, JobResult
from prefetchd.provider import Provider
from prefetchd.store import Staging
from prefetchd.targets import Target
from prefetchd.tracer import private_root


class Executor(Protocol):
    """Runs one job at a time for each caller."""

    async def run(self, job: Job, staging: Path) -> JobResult:
        """Compiles the job into `staging`. Raises `CompilerUnavailable` for one that cannot be run at all."""
        ...


class CommandExecutor:
    """Runs a compiler's commands in a pool."""

    def __init__(self, compiler: CommandCompiler, pool: JobPool) -> None:
        self._compiler = compiler
        self._pool = pool

    async def run(self, job: Job, staging: Path) -> JobResult:
        """See `Executor`."""
        return await self._pool.run(self._compiler.compile(job, staging), log=staging / "output.log")


@asynccontextmanager
async def open_executors(
    compilers: Mapping[str, Compiler],
    target: Target,
    providers: Mapping[str, Provider],
    environment: Mapping[str, str],
    settings: Settings,
    slots: int,
) -> AsyncIterator[dict[str, Executor]]:
    """An executor for each compiler, by its name. Fork servers get warm in their own time meanwhile.

    Raises `HelperFailed` and `StoreUnwritable` where no temporary files can be kept.
    """
    memory_bytes = settings.job_memory_mb << 20
    pool = JobPool(slots, timeout_s=settings.job_timeout_s, memory_bytes=memory_bytes, nice=settings.job_nice)
    executors: dict[str, Executor] = {}
    async with AsyncExitStack() as stack:
        for name, compiler in compilers.items():
            if isinstance(compiler, ForkedCompiler):
                scratch = stack.enter_context(Staging(private_root(), variable="TMPDIR")).directory
                start = Start(
                    compiler=name,
                    target=target,
                    providers=tuple(
                        each for each, provider in providers.items() if name in provider.compilers
                    ),
                    slots=slots,
                    timeout_s=settings.job_timeout_s,
                    memory_bytes=memory_bytes,
                    nice=settings.job_nice,
                )
                executors[name] = await stack.enter_async_context(ForkedExecutor(start, environment, scratch))
            elif isinstance(compiler, CommandCompiler):
                executors[name] = CommandExecutor(compiler, pool)
        yield executors
