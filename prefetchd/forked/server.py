"""The fork server: a warm, clean process on the null device in whose forked children kernels are compiled.

Importing torch and a kernel library takes seconds, a compile often less than one. So this process imports
each kernel's module once and forks a worker a job (`worker.py`). It never traces and never compiles:
a worker starts with a library that nobody has used. The promise: every compile is answered, and when this
process ends, by whatever, its workers end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import select
import socket
import sys
import time
from collections import deque
from importlib import import_module
from pathlib import Path

from prefetchd.compilers import load_compiler
from prefetchd.compilers.base import CompilerUnavailable, ForkedCompiler
from prefetchd.forked.messages import (
    MAX_PACKET_BYTES,
    Cancel,
    Compile,
    Ended,
    Refused,
    Start,
    Up,
    encode,
    to_server,
)
from prefetchd.forked.worker import CompileWorker
from prefetchd.jobs import Report
from prefetchd.null_device.guard import NullDeviceBroken, require_null_device
from prefetchd.parent_death import end_with_parent
from prefetchd.provider import Unavailable, UnknownProvider, load_providers


class ForkServer:
    """Takes compiles from a packet socket, forks a worker for each in turn, and sends one `Ended` each."""

    def __init__(self, connection: socket.socket, start: Start, scratch: Path) -> None:
        self._connection = connection
        self._start = start
        self._scratch = scratch
        self._compiler: ForkedCompiler
        self._workers: dict[int, CompileWorker] = {}
        # Kept here and not by the executor, which is busy publishing whenever a worker ends.
        self._waiting: deque[Compile] = deque()

    def prepare(self) -> None:
        """Imports what workers need. Raises `CompilerUnavailable` and `NullDeviceBroken`.

        A provider that cannot be imported here is passed over: the helper says so, and its jobs will too.
        """
        compiler = load_compiler(self._start.compiler, self._start.target, dict(os.environ))
        if not isinstance(compiler, ForkedCompiler):
            raise CompilerUnavailable(f"{self._start.compiler} compiles by commands, not in forked workers")
        compiler.prepare(self._scratch)
        self._compiler = compiler
        for name in self._start.providers:
            with contextlib.suppress(Unavailable, UnknownProvider, ValueError):
                load_providers([name])[name].warm_up()
        require_null_device()
        _freeze()

    def serve(self) -> None:
        """Returns when the executor has closed its end; then no worker is left."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            if self._connection.fileno() in ready:
                packet = self._connection.recv(MAX_PACKET_BYTES)
                if not packet:
                    break
                self._obey(packet)
            now = time.monotonic()
            for worker in list(self._workers.values()):
                if worker.fd in ready:
                    del self._workers[worker.fd]
                    poll.unregister(worker.fd)
                    self._connection.send(encode(worker.finish()))
                elif now > worker.deadline:
                    worker.end("timeout")
            while self._waiting and len(self._workers) < self._start.slots:
                self._begin(self._waiting.popleft(), poll)
        for worker in self._workers.values():
            worker.end("cancelled")
            worker.finish()

    def _obey(self, packet: bytes) -> None:
        order = to_server.decode(packet)
        if isinstance(order, Compile):
            self._waiting.append(order)
        elif isinstance(order, Cancel):
            for worker in self._workers.values():
                if worker.order.id == order.id:
                    worker.end("cancelled")
            for waiting in [each for each in self._waiting if each.id == order.id]:
                self._waiting.remove(waiting)
                self._connection.send(encode(Ended(id=order.id, report=Report(reason="cancelled"))))

    def _begin(self, order: Compile, poll: select.poll) -> None:
        self._import(order)
        worker = CompileWorker(order, self._start, self._compiler, self._connection.fileno())
        self._workers[worker.fd] = worker
        poll.register(worker.fd, select.POLLIN)
        self._connection.send(encode(worker.begun))

    def _import(self, order: Compile) -> None:
        """Imports a kernel's module before the fork; the worker says why if it cannot be imported."""
        for name in self._compiler.modules([order.job]) - sys.modules.keys():
            with contextlib.suppress(Exception):
                import_module(name)
                _freeze()

    def _patience_ms(self) -> float | None:
        if not self._workers:
            return None
        nearest = min(worker.deadline for worker in self._workers.values())
        return max(0.0, nearest - time.monotonic()) * 1000 + 1


def _freeze() -> None:
    """Keeps the collector of every worker off what they share: touching it would copy it."""
    gc.collect()
    gc.freeze()


def main(argv: list[str] | None = None) -> int:
    """`python -m prefetchd.forked.server --socket FD --parent PID --scratch DIRECTORY`."""
    parser = argparse.ArgumentParser(prog="prefetchd.forked.server")
    parser.add_argument("--socket", required=True, type=int)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--scratch", required=True, type=Path)
    arguments = parser.parse_args(argv)
    end_with_parent(arguments.parent)
    with socket.socket(fileno=arguments.socket) as connection:
        # Made inheritable to get here; no program of ours shall have it.
        connection.set_inheritable(False)
        packet = connection.recv(MAX_PACKET_BYTES)
        start = to_server.decode(packet) if packet else None
        if not isinstance(start, Start):
            return 1
        try:
            require_null_device()
            server = ForkServer(connection, start, arguments.scratch)
            server.prepare()
            connection.send(encode(Up()))
        except (CompilerUnavailable, NullDeviceBroken) as error:
            connection.send(encode(Refused(text=str(error))))
            return 1
        server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
