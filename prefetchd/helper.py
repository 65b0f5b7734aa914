"""The helper: a CPU-only process on the null device that traces requests and compiles nothing itself.

It imports each provider's library once and then never uses it: every trace runs in a child forked from this
warm parent (`trace_child.py`), because a library's in-memory cache would hide every key after its first use.
So what a child captures is the complete key set of its sweeps, a crash costs one request, and memory
returns. The helper ends when its parent ends, and refuses to work where a real driver could be reached.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from pathlib import Path

import zmq

from prefetchd.compilers import load_compiler
from prefetchd.compilers.base import Compiler, CompilerUnavailable, TunedCompiler
from prefetchd.null_device.forks import survive_forks
from prefetchd.null_device.guard import NullDeviceBroken, require_null_device
from prefetchd.parent_death import end_with_parent
from prefetchd.protocol import decode_sweeps
from prefetchd.provider import Provider, Unavailable, UnknownProvider, load_providers
from prefetchd.trace import (
    MAX_FRAME_BYTES,
    Failure,
    Hello,
    Order,
    Ping,
    Pong,
    Ready,
    Refused,
    Report,
    Start,
    encode,
    label_of,
    size_of,
    to_helper,
)
from prefetchd.trace_child import Trace, TraceChild

# How long a poll may sleep while traces run: only deadlines depend on it, results wake it.
POLL_MS = 200


class Helper:
    """Takes orders from a DEALER socket, runs at most `parallel` traces, sends one report an order."""

    def __init__(self, socket: zmq.Socket[bytes], start: Start, scratch: Path) -> None:
        self._socket = socket
        self._start = start
        self._scratch = scratch
        # As the engine has it: compilers change this process's own.
        self._environment = dict(os.environ)
        self._providers: dict[str, Provider] = {}
        self._compilers: dict[str, Compiler] = {}
        self._fingerprints: dict[str, dict[str, str]] = {}
        self._unavailable: dict[str, str] = {}
        self._waiting: deque[Order] = deque()
        self._running: dict[int, TraceChild] = {}

    def prepare(self) -> Ready:
        """Imports the providers' libraries. A provider that cannot run is named in the answer, not fatal."""
        for name in self._start.providers:
            try:
                (provider,) = load_providers([name]).values()
                for compiler in provider.compilers:
                    self._load(compiler)
                provider.warm_up()
                self._providers[name] = provider
            except (Unavailable, UnknownProvider, CompilerUnavailable, ValueError) as error:
                self._unavailable[name] = str(error)
        survive_forks()
        return Ready(pid=os.getpid(), unavailable=self._unavailable, fingerprints=self._fingerprints)

    def serve(self) -> None:
        """Runs until the socket's peer ends this process; never returns a pending order unanswered."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(POLL_MS if self._running else None))
            if self._socket in ready:
                message = to_helper.decode(self._socket.recv())
                if isinstance(message, Order):
                    self._waiting.append(message)
                elif isinstance(message, Ping):
                    self._socket.send(encode(Pong()))
            for child in [
                child for fd, child in self._running.items() if fd in ready or child.expired(time.monotonic())
            ]:
                poller.unregister(child.fd)
                del self._running[child.fd]
                report = child.finish()
                if report is None:
                    child.go_on()
                    self._track(child, poller)
                else:
                    self._send(report)
            while self._waiting and len(self._running) < self._start.parallel:
                self._begin(self._waiting.popleft(), poller)

    def _load(self, name: str) -> None:
        """Raises `CompilerUnavailable`, also for one that is there but lacks a tool."""
        if name not in self._compilers:
            compiler = load_compiler(name, self._start.target, self._environment)
            if isinstance(compiler, TunedCompiler):
                compiler.use_winners(self._start.given)
            compiler.prepare(self._scratch)
            self._fingerprints[name] = dict(compiler.fingerprint())
            self._compilers[name] = compiler

    def _begin(self, order: Order, poller: zmq.Poller) -> None:
        try:
            sweeps = decode_sweeps(order.sweeps)
        except ValueError as error:
            self._refuse(order, Failure(request=f"order {order.id}", kind="error", text=str(error)))
            return
        provider = self._providers.get(order.provider)
        if provider is None:
            why = self._unavailable.get(order.provider, f"provider {order.provider!r} was not started here")
            label, size = label_of(sweeps), size_of(sweeps)
            self._refuse(order, Failure(request=label, kind="unavailable", text=why, requests=size))
            return
        compilers = [self._compilers[name] for name in provider.compilers]
        trace = Trace(order.id, order.mode, sweeps, provider, compilers, self._scratch / f"trace-{order.id}")
        self._track(TraceChild(trace, self._start.timeout_s), poller)

    def _refuse(self, order: Order, failure: Failure) -> None:
        self._send(Report(id=order.id, seconds=0.0, failures=(failure,)))

    def _track(self, child: TraceChild, poller: zmq.Poller) -> None:
        self._running[child.fd] = child
        poller.register(child.fd, zmq.POLLIN)

    def _send(self, report: Report) -> None:
        self._socket.send(encode(report))


def main(argv: list[str] | None = None) -> int:
    """`python -m prefetchd.helper --endpoint ipc://... --parent PID`; exits 1 after saying why it refused."""
    parser = argparse.ArgumentParser(prog="prefetchd.helper")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--scratch", required=True)
    arguments = parser.parse_args(argv)
    end_with_parent(arguments.parent)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 5000)
    socket.connect(arguments.endpoint)
    socket.send(encode(Hello(pid=os.getpid())))
    start = to_helper.decode(socket.recv())
    if not isinstance(start, Start):
        return 1
    try:
        require_null_device()
        helper = Helper(socket, start, Path(arguments.scratch))
        socket.send(encode(helper.prepare()))
        helper.serve()
    except NullDeviceBroken as error:
        socket.send(encode(Refused(text=str(error))))
        context.term()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
