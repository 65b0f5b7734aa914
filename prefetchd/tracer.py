"""The near side of a helper: starts it on the null device, sends it orders, resolves every report.

Whatever happens to the helper - it refuses, it is killed, it never answers - each waiting trace gets a
report, with the reason as its failure. All its files lie in one staging directory, so that what a killed
process leaves is removed by the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from prefetchd.null_device import launcher
from prefetchd.protocol import PROTOCOL_VERSION, Sweep, encode_sweeps
from prefetchd.store import Staging
from prefetchd.targets import Target
from prefetchd.trace import (
    MAX_FRAME_BYTES,
    Failure,
    Hello,
    Mode,
    Order,
    Ping,
    Pong,
    Ready,
    Refused,
    Report,
    Start,
    encode,
    from_helper,
    label_of,
    size_of,
)
from prefetchd.winners import Given

# Importing torch and a kernel library takes 3-6 s here, and ten times that from a cold network disk.
START_TIMEOUT_S = 180.0
# sockaddr_un holds 107 bytes; a longer TMPDIR cannot carry a socket.
MAX_SOCKET_PATH = 107
# What is put behind the temporary directory: /prefetchd-<uid>/.prefetchd/owner-<pid>-<8 hex>/helper
SOCKET_NAME_LENGTH = 62
# A report sent just before the helper's end may still be on its way through the socket.
DRAIN_S = 0.2


class HelperFailed(Exception):
    """The helper did not start or refused to work; the text is its own reason."""


class Tracer:
    """An async context: inside it a helper for `target` and `providers` is up, and `trace` may be called.

    `given` is what is known of the choices of the engine's tuners; None for nothing. `interpreter` is a
    Python that has the same prefetchd; its default is this process's own.
    """

    def __init__(
        self,
        target: Target,
        providers: tuple[str, ...],
        environment: Mapping[str, str],
        *,
        parallel: int = 1,
        timeout_s: float = 300.0,
        given: Given | None = None,
        interpreter: str = sys.executable,
    ) -> None:
        self._start = Start(
            target=target,
            providers=providers,
            parallel=parallel,
            timeout_s=timeout_s,
            given=given or Given(),
        )
        self._environment = environment
        self._interpreter = interpreter
        self._heard = asyncio.Event()
        self._pending: dict[int, asyncio.Future[Report]] = {}
        self._sweeps: dict[int, Sequence[Sweep]] = {}
        self._next_id = 0
        self.ready: Ready

    async def __aenter__(self) -> Self:
        environment = launcher.environment(self._start.target, self._environment, integer_ops=True)
        launcher.verify(environment)
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(Staging(private_root(), variable="TMPDIR")).directory
            try:
                await self._launch(environment)
                self.ready = await self._handshake()
            except BaseException:
                await self._close()
                raise
            self._staging = stack.pop_all()
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reader.cancel()
        self._watcher.cancel()
        await asyncio.gather(self._reader, self._watcher, return_exceptions=True)
        with self._staging:
            await self._close()

    async def trace(self, provider: str, sweep: Sweep, mode: Mode) -> Report:
        """Runs one sweep; see `trace_all`."""
        return await self.trace_all(provider, (sweep,), mode)

    async def trace_all(self, provider: str, sweeps: Sequence[Sweep], mode: Mode) -> Report:
        """Runs sweeps in one process. Raises nothing of its own: a lost helper is a failure in the report."""
        order = Order(id=self._next_id, provider=provider, mode=mode, sweeps=encode_sweeps(sweeps))
        self._next_id += 1
        future: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        if self._watcher.done():
            return _lost(order.id, sweeps, "the helper has ended")
        self._pending[order.id] = future
        self._sweeps[order.id] = sweeps
        # Where its connection is gone the helper has ended, and `_watch` will answer this order too.
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([self._identity, encode(order)])
        return await future

    async def answers(self, limit_s: float) -> bool:
        """Whether the helper reads its messages: asked now, it answers within the limit."""
        self._heard.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._socket.send_multipart([self._identity, encode(Ping())])
                await self._heard.wait()
        except (TimeoutError, zmq.ZMQError):
            return False
        return True

    async def ended(self) -> None:
        """Returns once the helper's process is gone and every trace has its report."""
        await asyncio.shield(self._watcher)

    async def _launch(self, environment: dict[str, str]) -> None:
        endpoint = f"ipc://{self._folder}/helper"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(endpoint)
        self._identity = b"helper"
        arguments = ["--endpoint", endpoint, "--parent", str(os.getpid()), "--scratch", str(self._folder)]
        self._log = (self._folder / "helper.log").open("wb")
        self._process = await asyncio.create_subprocess_exec(
            self._interpreter,
            # Without the working directory on its path, which may be a checkout of the library itself.
            "-P",
            "-m",
            "prefetchd.helper",
            *arguments,
            env=environment,
            cwd=_directory(instead=self._folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    async def _handshake(self) -> Ready:
        hello = asyncio.create_task(self._greet())
        ended = asyncio.create_task(self._process.wait())
        done, _ = await asyncio.wait(
            {hello, ended}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if hello in done:
            ended.cancel()
            return hello.result()
        hello.cancel()
        if ended in done:
            raise HelperFailed(
                f"the helper ended with status {self._process.returncode} before it was ready: {self._tail()}"
            )
        raise HelperFailed(f"the helper was not ready after {START_TIMEOUT_S:.0f} s: {self._tail()}")

    async def _greet(self) -> Ready:
        self._identity, frame = await self._socket.recv_multipart()
        hello = from_helper.decode(frame)
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL_VERSION:
            raise HelperFailed(
                f"the helper greeted with {hello}, not protocol {PROTOCOL_VERSION}; reinstall prefetchd"
            )
        await self._socket.send_multipart([self._identity, encode(self._start)])
        _, frame = await self._socket.recv_multipart()
        message = from_helper.decode(frame)
        if isinstance(message, Refused):
            raise HelperFailed(message.text)
        if not isinstance(message, Ready):
            raise HelperFailed(f"the helper answered {type(message).__name__} instead of Ready")
        return message

    async def _read(self) -> None:
        while True:
            _, frame = await self._socket.recv_multipart()
            message = from_helper.decode(frame)
            if isinstance(message, Report):
                self._resolve(message)
            elif isinstance(message, Pong):
                self._heard.set()

    async def _watch(self) -> None:
        status = await self._process.wait()
        await asyncio.sleep(DRAIN_S)
        for id in list(self._pending):
            self._resolve(
                _lost(id, self._sweeps[id], f"the helper ended with status {status}: {self._tail()}")
            )

    def _resolve(self, report: Report) -> None:
        future = self._pending.pop(report.id, None)
        self._sweeps.pop(report.id, None)
        if future is not None and not future.done():
            future.set_result(report)

    async def _close(self) -> None:
        with contextlib.suppress(ProcessLookupError, AttributeError):
            # Its group: traces, and what they started, must be gone before their directory is removed.
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        self._socket.close()
        self._context.term()
        self._log.close()

    def _tail(self) -> str:
        text = (self._folder / "helper.log").read_text(encoding="utf-8", errors="replace").strip()
        return text[-2000:] or "it printed nothing"


def _directory(*, instead: Path) -> Path | None:
    """None, for this process's working directory; `instead` where that was removed: torch fails in it."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return instead
    return None


def _lost(id: int, sweeps: Sequence[Sweep], text: str) -> Report:
    failure = Failure(request=label_of(sweeps), kind="crash", text=text, requests=size_of(sweeps))
    return Report(id=id, seconds=0.0, failures=(failure,), lost=True)


def private_root() -> Path:
    """This user's own directory for temporary files. Raises `HelperFailed` where others could write to it.

    Programs are started from there, so its owner must be us, whoever made it first.
    """
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) + SOCKET_NAME_LENGTH > MAX_SOCKET_PATH:
        parent = Path("/tmp")
    root = parent / f"prefetchd-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise HelperFailed(
            f"{root}: cannot hold temporary files ({error.strerror}); set TMPDIR to a writable directory"
        ) from error
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        raise HelperFailed(
            f"{root}: not a directory that only uid {os.getuid()} may write to; remove it, or set TMPDIR to "
            "a directory of your own"
        )
    return root
