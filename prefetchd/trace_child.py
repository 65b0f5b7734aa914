"""One trace: a child forked from the helper's warm parent runs sweeps and reports what it captured.

The child counts its progress in shared memory, so that after a crash or a hang the parent knows which
request did it, writes that one off and forks a successor that goes on behind it, in the same scratch
directory: the keys found before are still there. A trace that crashes again and again is given up with the
rest counted as failed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NoReturn

import msgspec

from prefetchd.compilers.base import Capture, Compiler, CompilerUnavailable, Job, TuningCapture
from prefetchd.parent_death import end_with_parent
from prefetchd.protocol import Request, Sweep, expand
from prefetchd.provider import Provider, Unavailable
from prefetchd.trace import Failure, FailureKind, Mode, Report, label_of, size_of
from prefetchd.winners import Tuning

# A library that crashes on one shape crashes on a few; one that crashes on more is broken for this site.
MAX_CRASHES = 16
# Failures are reported one by one up to here; those that follow say nothing new and are only counted.
MAX_FAILURES = 64
# A refused compile costs up to 0.1 s. A sweep that keeps failing is counted exactly for this long; then the
# rest counts as failed too, since nothing has shown that it works.
FAILING_S = 20.0
MAX_TEXT = 2000


class _Outcome(msgspec.Struct):
    """What a child writes to its pipe when it got to the end of its sweeps."""

    seconds: float
    jobs: list[Job]
    failures: list[Failure]
    tunings: list[Tuning]


@dataclass(frozen=True)
class Trace:
    """What to trace, how, and with what. `scratch` is this trace's own directory, made and removed by it."""

    id: int
    mode: Mode
    sweeps: Sequence[Sweep]
    provider: Provider
    compilers: Sequence[Compiler]
    scratch: Path

    @property
    def label(self) -> str:
        """For people."""
        return label_of(self.sweeps)

    @property
    def size(self) -> int:
        """How many requests it runs."""
        return size_of(self.sweeps)


class TraceChild:
    """A running trace. `fd` becomes readable when its process ended, for whatever reason."""

    def __init__(self, trace: Trace, timeout_s: float) -> None:
        self._trace = trace
        self._timeout_s = timeout_s
        self._log = trace.scratch.with_suffix(".log")
        self._progress = mmap.mmap(-1, mmap.PAGESIZE)
        self._first = 0
        self._lost: list[Failure] = []
        trace.scratch.mkdir(parents=True)
        self.go_on()

    def expired(self, now: float) -> bool:
        """Whether the running process has had its time (monotonic seconds)."""
        return now - self._begun > self._timeout_s

    def finish(self) -> Report | None:
        """The report, once `fd` is readable or the time is up; None when `go_on` must follow a crash."""
        hung = self.expired(time.monotonic())
        if hung:
            os.kill(self._pid, signal.SIGKILL)
        outcome = self._read()
        _, status = os.waitpid(self._pid, 0)
        if outcome is None:
            self._write_off("hang" if hung else "crash", status)
            return None
        shutil.rmtree(self._trace.scratch, ignore_errors=True)
        self._log.unlink(missing_ok=True)
        return Report(
            id=self._trace.id,
            seconds=outcome.seconds,
            jobs=tuple(outcome.jobs),
            tunings=tuple(outcome.tunings),
            failures=(*self._lost, *outcome.failures),
        )

    def go_on(self) -> None:
        """Forks the process that runs it from its start, or from behind the request written off."""
        reader, writer = os.pipe()
        self._begun = time.monotonic()
        struct.pack_into("<q", self._progress, 0, self._first)
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reader)
            self._child(writer, parent)
        os.close(writer)
        self.fd = reader

    def _write_off(self, kind: FailureKind, status: int) -> None:
        (index,) = struct.unpack_from("<q", self._progress)
        total = self._trace.size
        request = next(islice(expand(self._trace.sweeps), index, None), None)
        label = Sweep(request).label() if request is not None else self._trace.label
        if kind == "hang":
            text = f"no result within {self._timeout_s:.0f} s; the process was ended"
        else:
            text = f"the process ended in the library: {_death(status)}{self._last_words()}"
        given_up = len(self._lost) + 1 >= MAX_CRASHES or index >= total
        count = max(total - index, 1) if given_up else 1
        self._lost.append(Failure(request=label, kind=kind, text=text, requests=count))
        self._first = total if given_up else index + 1

    def _child(self, writer: int, parent: int) -> NoReturn:
        status = 1
        try:
            end_with_parent(parent)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._redirect_output()
            outcome = self._run()
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(outcome))
            status = 0
        finally:
            # Not sys.exit: the parent's sockets and exit handlers are not this child's to close.
            os._exit(status)

    def _redirect_output(self) -> None:
        """What the library prints is only of interest when it dies."""
        sys.stdout.flush()
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)

    def _run(self) -> _Outcome:
        failures: list[Failure] = []
        jobs: list[Job] = []
        tunings: list[Tuning] = []
        begun = time.perf_counter()
        try:
            with contextlib.ExitStack() as stack:
                captures = [
                    stack.enter_context(self._context(compiler)) for compiler in self._trace.compilers
                ]
                self._run_requests(captures, failures)
                jobs = [job for capture in captures for job in capture.jobs()]
                tuned = [capture for capture in captures if isinstance(capture, TuningCapture)]
                tunings = [tuning for capture in tuned for tuning in capture.tunings()]
        except CompilerUnavailable as error:
            failures = [self._unavailable(str(error))]
        return _Outcome(seconds=time.perf_counter() - begun, jobs=jobs, failures=failures, tunings=tunings)

    def _run_requests(self, captures: Sequence[Capture], failures: list[Failure]) -> None:
        first_failure = 0.0
        for index, request in self._remaining():
            struct.pack_into("<q", self._progress, 0, index)
            failure = self._attempt(request, captures)
            if failure is None:
                continue
            first_failure = first_failure or time.monotonic()
            listed = len(failures) < MAX_FAILURES
            given_up = not listed and time.monotonic() - first_failure > FAILING_S
            ends = failure.kind == "unavailable" or given_up
            count = self._trace.size - index if ends else 1
            if listed:
                failures.append(msgspec.structs.replace(failure, requests=count))
            else:
                failures[-1] = msgspec.structs.replace(failures[-1], requests=failures[-1].requests + count)
            if ends:
                return

    def _unavailable(self, text: str) -> Failure:
        rest = self._trace.size - self._first
        return Failure(request=self._trace.label, kind="unavailable", text=text, requests=rest)

    def _context(self, compiler: Compiler) -> contextlib.AbstractContextManager[Capture]:
        return (
            compiler.capture(self._trace.scratch)
            if self._trace.mode == "capture"
            else compiler.forbid(self._trace.scratch)
        )

    def _remaining(self) -> Iterator[tuple[int, Request]]:
        return islice(enumerate(expand(self._trace.sweeps)), self._first, None)

    def _attempt(self, request: Request, captures: Sequence[Capture]) -> Failure | None:
        try:
            self._trace.provider.run(request)
        except Unavailable as error:
            return Failure(request=Sweep(request).label(), kind="unavailable", text=str(error)[:MAX_TEXT])
        except Exception as error:
            missed = self._trace.mode == "forbid" and any(capture.jobs() for capture in captures)
            kind: FailureKind = "miss" if missed else "error"
            return Failure(
                request=Sweep(request).label(), kind=kind, text=f"{type(error).__name__}: {error}"[:MAX_TEXT]
            )
        return None

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            printed = self._log.read_text(encoding="utf-8", errors="replace").strip()
            return f"; it printed: {printed[-MAX_TEXT:]}" if printed else ""
        return ""

    def _read(self) -> _Outcome | None:
        with os.fdopen(self.fd, "rb") as pipe:
            data = pipe.read()
        return msgspec.msgpack.decode(data, type=_Outcome) if data else None


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit status {os.waitstatus_to_exitcode(status)}"
