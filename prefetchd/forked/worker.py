"""One compile: a child forked from the fork server's warm process, with limits, in a group of its own.

The library starts programs (ptxas), and these must not outlive their compile whatever ends it. So everything
below the server asks the kernel to be ended with its parent: the worker, and each program the worker starts.
The subtle rule: the group is ended before its leader is waited for, while its number cannot be anyone else's.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from prefetchd.compilers.base import CompilerUnavailable, ForkedCompiler
from prefetchd.forked.messages import Begun, Compile, Ended, Start
from prefetchd.jobs import Report
from prefetchd.null_device import guard
from prefetchd.parent_death import end_with_parent

# A reason is read by people, and the pipe must take it whole without a reader.
MAX_REASON_BYTES = 16384


class CompileWorker:
    """A running compile. `fd` becomes readable when the worker has ended, however it did."""

    def __init__(self, order: Compile, start: Start, compiler: ForkedCompiler, server_socket: int) -> None:
        self.order = order
        self._start = start
        self._compiler = compiler
        self._begun = time.monotonic()
        self._reason = ""
        sys.stdout.flush()
        sys.stderr.flush()
        self.fd, writer = os.pipe()
        server = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            # An open end of the server's socket would hide the server's death from the executor.
            os.close(server_socket)
            os.close(self.fd)
            self._child(writer, server)
        os.close(writer)
        _own_group(self._pid)

    @property
    def begun(self) -> Begun:
        """The message that says that this compile runs."""
        return Begun(id=self.order.id, group=self._pid)

    @property
    def deadline(self) -> float:
        """When its time is up, on the monotonic clock."""
        return self._begun + self._start.timeout_s

    def end(self, reason: str) -> None:
        """Ends all its processes; `reason` is what the report will say. The first reason stands."""
        self._reason = self._reason or reason
        os.killpg(self._pid, signal.SIGKILL)

    def finish(self) -> Ended:
        """Waits for the worker, which has ended or is about to, and says how."""
        with os.fdopen(self.fd, "rb") as pipe:
            refused = pipe.read().decode(errors="replace")
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        os.killpg(self._pid, signal.SIGKILL)
        _, status, used = os.wait4(self._pid, 0)
        killed = os.WIFSIGNALED(status)
        report = Report(
            group=self._pid,
            reason=self._reason or ("signal" if killed else "exit"),
            exit_code=None if killed else os.waitstatus_to_exitcode(status),
            signal=os.WTERMSIG(status) if killed else None,
            user_s=used.ru_utime,
            system_s=used.ru_stime,
            max_rss=used.ru_maxrss * 1024,
            wall_s=time.monotonic() - self._begun,
        )
        return Ended(id=self.order.id, report=report, refused=refused)

    def _child(self, writer: int, server: int) -> NoReturn:
        status = 1
        try:
            end_with_parent(server)
            _own_group(0)
            staging = Path(self.order.staging)
            _redirect_output(staging / "output.log")
            _settle_in(staging)
            _limit(self._start.memory_bytes, self._start.nice)
            subprocess.Popen = _EndingWithUs  # type: ignore[misc]
            self._compiler.compile_here(self.order.job, staging)
            status = 0
        except CompilerUnavailable as error:
            os.write(writer, str(error).encode()[:MAX_REASON_BYTES])
        except MemoryError:
            _conclude("out of memory\n")
        except BaseException as error:
            # The library's own frames say nothing to whoever reads the job's log.
            _conclude("".join(traceback.format_exception_only(error)))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: exit handlers and buffers are the server's.
            os._exit(status)


class _EndingWithUs(subprocess.Popen[Any]):
    """A program that the kernel ends with the worker that started it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        worker = os.getpid()
        kwargs["preexec_fn"] = lambda: end_with_parent(worker)
        super().__init__(*args, **kwargs)


def _conclude(text: str) -> None:
    """The reason of a failure, behind all that was printed before."""
    sys.stdout.flush()
    sys.stderr.write(text)


def _own_group(pid: int) -> None:
    """Done on both sides of the fork, so that neither can be too early."""
    try:
        os.setpgid(pid, 0)
    except (PermissionError, ProcessLookupError):
        # The child has been quicker: it is its own leader, or has ended.
        return


def _redirect_output(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _settle_in(staging: Path) -> None:
    """Temporary files go to `staging`; programs are started as if there were no null device."""
    temporary = staging / "tmp"
    temporary.mkdir()
    tempfile.tempdir = None
    os.environ["TMPDIR"] = str(temporary)
    for name, ours in (("LD_PRELOAD", guard.CUDA), ("LD_LIBRARY_PATH", guard.LIBRARIES)):
        others = [entry for entry in os.environ.get(name, "").split(":") if entry not in ("", str(ours))]
        if others:
            os.environ[name] = ":".join(others)
        else:
            os.environ.pop(name, None)


def _limit(memory_bytes: int, nice: int) -> None:
    os.nice(nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        # What the server has mapped is shared and mostly never touched: the limit is on what a compile adds.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
