"""Runs jobs in the forked workers of a fork server, and resolves every one, whatever dies.

A worker that is killed, hangs or eats its memory is the server's to find out. A server that is killed takes
its workers with it (`worker.py`); its jobs are failed here, what is left of their process groups is
ended, and the next job gets a new server. The subtle rule: only a server that has died is replaced, and only
`RESTARTS` times, so that a library which kills it each time ends in a message and not in a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from prefetchd.compilers.base import CompilerUnavailable, Job
from prefetchd.forked.messages import (
    MAX_PACKET_BYTES,
    Begun,
    Cancel,
    Compile,
    Ended,
    Refused,
    Start,
    Up,
    encode,
    from_server,
)
from prefetchd.jobs import JobResult, classify
from prefetchd.null_device import launcher

RESTARTS = 3
# Importing torch and a kernel library takes 3-10 s here, and ten times that from a cold network disk.
START_TIMEOUT_S = 180.0
# The server ends a group with SIGKILL and reports at once; one that does not is stuck and is killed.
END_LIMIT_S = 10.0
TAIL_CHARACTERS = 2000


class ServerFailed(CompilerUnavailable):
    """The server itself did not start; a later one may."""


class ForkedExecutor:
    """An async context: inside it a server is up or coming up, and jobs may be run.

    `environment` is the engine's; `scratch` a private directory that stays as long as the context.
    `interpreter` is a Python that has the same prefetchd; its default is this process's own.
    """

    def __init__(
        self,
        start: Start,
        environment: Mapping[str, str],
        scratch: Path,
        *,
        interpreter: str = sys.executable,
    ) -> None:
        self._start = start
        self._interpreter = interpreter
        self._environment = launcher.environment(start.target, environment, integer_ops=True)
        self._scratch = scratch
        self._servers: list[_Server] = []
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._start_server()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for server in self._servers:
            await server.close()

    @property
    def warm(self) -> bool:
        """Whether a job would begin at once."""
        return bool(self._servers) and self._servers[-1].warm

    @property
    def starting(self) -> bool:
        """Whether it is not known yet if the server will be warm."""
        return bool(self._servers) and self._servers[-1].starting

    async def run(self, job: Job, staging: Path) -> JobResult:
        """See `Executor`. Raises `CompilerUnavailable` with the reason of a compiler that refuses the job.

        A server that did not start raises `ServerFailed`.
        """
        async with self._starting:
            if self._servers[-1].dead and len(self._servers) <= RESTARTS:
                await self._start_server()
            server = self._servers[-1]
        return await server.run(job, staging)

    async def _start_server(self) -> None:
        scratch = self._scratch / f"server-{len(self._servers)}"
        scratch.mkdir()
        server = _Server(self._start, scratch)
        await server.launch(self._environment, self._interpreter)
        self._servers.append(server)


class _Compile:
    """A job that a server has been asked for."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[Ended | None] = asyncio.get_running_loop().create_future()
        self.group: int | None = None


class _Server:
    """One server process, from its start to its end."""

    def __init__(self, start: Start, scratch: Path) -> None:
        self._start = start
        self._scratch = scratch
        self._pending: dict[int, _Compile] = {}
        self._count = 0
        self._up: asyncio.Future[Up] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process
        self._reader: asyncio.Task[None]

    @property
    def dead(self) -> bool:
        """Whether it has ended after it was warm; one that never was stays, for its reason."""
        return self._reader.done() and self._up.exception() is None

    @property
    def warm(self) -> bool:
        """Whether it has imported what its workers need, and lives."""
        return self._up.done() and self._up.exception() is None and not self._reader.done()

    @property
    def starting(self) -> bool:
        """Whether it has said nothing yet, and lives."""
        return not self._up.done() and not self._reader.done()

    async def launch(self, environment: dict[str, str], interpreter: str) -> None:
        """Starts the process; it gets ready in its own time."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs, (self._scratch / "log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                interpreter,
                # Not from the directory we happen to be in, which may hold packages of the same names.
                "-P",
                "-m",
                "prefetchd.forked.server",
                *("--socket", str(theirs.fileno())),
                *("--parent", str(os.getpid())),
                *("--scratch", str(self._scratch)),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._reader = asyncio.create_task(self._read())
        await self._send(encode(self._start))

    async def run(self, job: Job, staging: Path) -> JobResult:
        await self._ready()
        compile = _Compile()
        self._count += 1
        id = self._count
        if self._reader.done():
            return self._lost()
        self._pending[id] = compile
        await self._send(encode(Compile(id=id, job=job, staging=str(staging))))
        try:
            ended = await asyncio.shield(compile.ended)
        except asyncio.CancelledError:
            await self._cancel(id, compile)
            raise
        if ended is None:
            return self._lost()
        if ended.refused:
            raise CompilerUnavailable(ended.refused)
        return classify(ended.report, staging / "output.log")

    async def close(self) -> None:
        """Ends the process, which ends its workers."""
        if not self._reader.done():
            self._kill()
        await self._reader
        self._socket.close()

    async def _ready(self) -> None:
        """Waits until the server is warm. Raises `CompilerUnavailable` with its reason if it never is."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(self._up)
        except TimeoutError:
            self._kill()
            raise ServerFailed(
                f"the fork server was not ready after {START_TIMEOUT_S:.0f} s: {self._tail()}"
            ) from None

    async def _read(self) -> None:
        """Handles every message, then resolves what is left when the server is gone."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while packet := await loop.sock_recv(self._socket, MAX_PACKET_BYTES):
                self._handle(from_server.decode(packet))
        # Mostly it has ended, or is about to; asking a dead process again would lose its status.
        stuck = loop.call_later(END_LIMIT_S, self._kill)
        await self._process.wait()
        stuck.cancel()
        groups = [compile.group for compile in self._pending.values() if compile.group is not None]
        await _end_groups(groups)
        if not self._up.done():
            self._up.set_exception(ServerFailed(f"the fork server did not start: {self._tail()}"))
        # Marks a reason that no job asked for as seen.
        self._up.exception()
        for compile in self._pending.values():
            compile.ended.set_result(None)
        self._pending.clear()

    def _handle(self, message: Up | Refused | Begun | Ended) -> None:
        match message:
            case Up():
                self._up.set_result(message)
            case Refused():
                self._up.set_exception(CompilerUnavailable(message.text))
            case Begun():
                self._pending[message.id].group = message.group
            case Ended():
                self._pending.pop(message.id).ended.set_result(message)

    async def _cancel(self, id: int, compile: _Compile) -> None:
        """Returns when the compile has ended; further cancellations change nothing."""
        stuck = asyncio.get_running_loop().call_later(END_LIMIT_S, self._kill)
        ending = asyncio.create_task(self._send(encode(Cancel(id=id))))
        while not compile.ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(compile.ended)
        await ending
        stuck.cancel()

    async def _send(self, packet: bytes) -> None:
        # A server that is gone is noticed by the reader, which resolves what was asked of it.
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self._socket, packet)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _lost(self) -> JobResult:
        return JobResult(reason="runner", output=f"the fork server has ended: {self._tail()}")

    def _tail(self) -> str:
        text = (self._scratch / "log").read_text(encoding="utf-8", errors="replace").strip()
        return text[-TAIL_CHARACTERS:] or f"it printed nothing; status {self._process.returncode}"


async def _end_groups(groups: list[int]) -> None:
    """Ends process groups of workers whose server is gone, and waits until they are."""
    # The kernel has sent them the same already; waiting is only for their numbers to vanish.
    for _ in range(100):
        left = []
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
                left.append(group)
        if not left:
            return
        groups = left
        await asyncio.sleep(0.01)
