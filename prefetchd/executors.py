"""What runs a job: a command under the job runner, or a worker forked from a warm process.

The pipeline knows only this interface. Its promise, whoever implements it: `run` always comes to an end with
a result, and when it returned or was cancelled no process of that job is left running.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from prefetchd.compilers.base import CommandCompiler, Job
from prefetchd.jobs import JobPool, JobResult


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
