"""What compiles for one group: its compilers, and an executor for each, started at its first job.

Which interpreter, which environment and which packages they use was decided from the daemon's allow-list
before. The subtle rule: a fork server that has died is thrown away with all that belongs to it, and the next
job gets a new one; whether that job is tried again at all is the broker's business, so nothing loops here.

Niceness is fixed at a process's start, and a forked worker has its server's. So what an engine waits for has
a fork server of its own, which is started in the background when the first such job comes: while it is coming
up, such jobs run at once by the server that is warm.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from prefetchd.compilers import load_compiler
from prefetchd.compilers.base import CommandCompiler, Compiler, CompilerUnavailable, ForkedCompiler, Job
from prefetchd.config import Settings
from prefetchd.executors import CommandExecutor, Executor
from prefetchd.forked.executor import ForkedExecutor, ServerFailed
from prefetchd.forked.messages import Start
from prefetchd.jobs import JobPool, JobResult
from prefetchd.null_device.guard import NullDeviceBroken
from prefetchd.store import Staging, StoreUnwritable
from prefetchd.targets import Target
from prefetchd.tracer import HelperFailed, private_root

# Who may run how many at a time is decided by the broker for the whole node; this is only above it.
MANY = 1024
# What a server's start may raise.
NOT_STARTED = (CompilerUnavailable, HelperFailed, NullDeviceBroken, StoreUnwritable, OSError)


class Workshop:
    """Compilers and executors of one target in one environment."""

    def __init__(
        self,
        target: Target,
        environment: Mapping[str, str],
        interpreter: str,
        settings: Settings,
        providers: Callable[[], tuple[str, ...]],
    ) -> None:
        self.target = target
        self.environment = dict(environment)
        self.interpreter = interpreter
        self._settings = settings
        self._providers = providers
        self._compilers: dict[str, Compiler] = {}
        self._executors: dict[tuple[str, bool], Executor] = {}
        memory = settings.job_memory_mb << 20
        self._pools = {
            background: JobPool(
                MANY,
                timeout_s=settings.job_timeout_s,
                memory_bytes=memory,
                nice=settings.job_nice if background else 0,
            )
            for background in (True, False)
        }

    def compiler(self, name: str) -> Compiler:
        """The compiler. Raises `CompilerUnavailable`."""
        if name not in self._compilers:
            try:
                self._compilers[name] = load_compiler(name, self.target, self.environment)
            except KeyError:
                raise CompilerUnavailable(f"no compiler is called {name!r} in this prefetchd") from None
        return self._compilers[name]

    def executor(self, name: str, *, background: bool) -> Executor:
        """What runs the compiler's jobs. Raises `CompilerUnavailable`."""
        compiler = self.compiler(name)
        if (name, background) not in self._executors:
            made: Executor
            if isinstance(compiler, ForkedCompiler):
                nice = self._settings.job_nice if background else 0
                made = LastingExecutor(self._new_server(name, nice=nice))
            elif isinstance(compiler, CommandCompiler):
                made = CommandExecutor(compiler, self._pools[background])
            else:
                raise CompilerUnavailable(f"compiler {name!r} has neither commands nor a library to run")
            self._executors[name, background] = made
        executor = self._executors[name, background]
        other = self._executors.get((name, True))
        if not background and isinstance(executor, LastingExecutor) and isinstance(other, LastingExecutor):
            return executor.or_while_it_starts(other)
        return executor

    async def close(self) -> None:
        """Ends every server."""
        for executor in self._executors.values():
            if isinstance(executor, LastingExecutor):
                await executor.close()
        self._executors.clear()

    def _new_server(self, name: str, *, nice: int) -> Callable[[Path], ForkedExecutor]:
        def make(scratch: Path) -> ForkedExecutor:
            start = Start(
                compiler=name,
                target=self.target,
                providers=self._providers(),
                slots=MANY,
                timeout_s=self._settings.job_timeout_s,
                memory_bytes=self._settings.job_memory_mb << 20,
                nice=nice,
            )
            return ForkedExecutor(start, self.environment, scratch, interpreter=self.interpreter)

        return make


class LastingExecutor:
    """A `ForkedExecutor` that is made anew when its server is lost."""

    def __init__(self, make: Callable[[Path], ForkedExecutor]) -> None:
        self._make = make
        self._opening = asyncio.Lock()
        self._current: ForkedExecutor | None = None
        self._stack = AsyncExitStack()
        self._warming: asyncio.Task[None] | None = None

    def or_while_it_starts(self, other: LastingExecutor) -> LastingExecutor:
        """This one, but `other` while that is warm and this one's server, started here, is not yet."""
        if other._current is None or not other._current.warm:
            return self
        if self._current is not None:
            # One that has failed is left to the next job, which hears why.
            return other if self._current.starting else self
        if self._warming is None or self._warming.done():
            self._warming = asyncio.create_task(self._warm_up())
        return other

    async def run(self, job: Job, staging: Path) -> JobResult:
        """See `Executor`. Raises `CompilerUnavailable`, `HelperFailed` and `StoreUnwritable`."""
        executor = await self._open()
        try:
            result = await executor.run(job, staging)
        except ServerFailed:
            await self._leave(executor)
            raise
        if result.reason == "runner":
            await self._leave(executor)
        return result

    async def close(self) -> None:
        """Ends the server."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        self._current = None
        await self._stack.aclose()

    async def _warm_up(self) -> None:
        # What keeps it from starting is told to the next job that needs it.
        with contextlib.suppress(*NOT_STARTED):
            await self._open()

    async def _open(self) -> ForkedExecutor:
        async with self._opening:
            if self._current is None:
                scratch = self._stack.enter_context(Staging(private_root(), variable="TMPDIR")).directory
                self._current = await self._stack.enter_async_context(self._make(scratch))
            return self._current

    async def _leave(self, executor: ForkedExecutor) -> None:
        """Whoever still waits for the lost server is answered by its end."""
        async with self._opening:
            if self._current is executor:
                self._current = None
                await self._stack.aclose()
                self._stack = AsyncExitStack()
