"""Runs compile commands side by side, each under the C job runner, and always says how each ended.

The pool's promise: when `run` returns or is cancelled no process of that job is left running, and it always
returns - when the command fails, hangs, eats its memory, and also when the runner itself is killed. The
subtle rule: the end of a job is the end of its *report pipe*, which only the runner holds; whatever ends the
runner closes it. What the runner could no longer do is then done here, with the group it had reported.

A pool belongs to one thread: the runner dies with the thread that started it, as the kernel counts parents.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from prefetchd.compilers.base import Command
from prefetchd.job_runner import JOB_RUNNER

# What a compile may see of the caller's environment: where things are, and nvcc's own documented variables.
# Everything else stays out, above all LD_PRELOAD and LD_LIBRARY_PATH, by which the null device gets in.
ALLOWED_VARIABLES = frozenset({
    "PATH", "HOME", "LANG", "LANGUAGE", "TZ",
    "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT",
    "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN",
    "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX",
})  # fmt: skip
# All that a message about a failed compile needs; the whole log stays in its file.
OUTPUT_TAIL_BYTES = 16384
# Templates print long traces behind "out of memory": the reason is searched further back than is shown.
REASON_TAIL_BYTES = 1 << 20
# Longer than the runner's own grace and reap limits together (2 s and 10 s): after it the runner is stuck.
RUNNER_END_LIMIT_S = 15.0
# With less than a large cubin left, a failure that explains itself by nothing is blamed on the disk.
DISK_FULL_BYTES = 1 << 20
# A shell, and nvcc for its own children, answers 128 + signal for a child that was killed.
SHELL_SIGNAL_BASE = 128
SIGNALS = signal.SIGRTMAX

_NO_MEMORY = re.compile(
    r"out of memory|bad_alloc|cannot allocate memory|virtual memory exhausted", re.IGNORECASE
)
# Output ends on terminals: what moves a cursor, or ends a C string, is shown as one that cannot be shown.
_UNPRINTABLE = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")
_NO_SPACE = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one command ended, and what it used."""

    # exit | signal | timeout | memory | disk | cancelled | parent | runner (it died, or could not start)
    reason: str
    exit_code: int | None = None
    signal: int | None = None
    # Of the command and all its descendants, as the kernel accounts them when they are waited for.
    cpu_s: float = 0.0
    wall_s: float = 0.0
    max_rss: int = 0
    # The end of what the command printed.
    output: str = ""

    @property
    def ok(self) -> bool:
        """The command ended by itself and says that it succeeded."""
        return self.reason == "exit" and self.exit_code == 0

    @property
    def retryable(self) -> bool:
        """The failure is the machine's, not the source's: the same command may succeed later."""
        return not self.ok and self.reason != "exit"

    def describe(self) -> str:
        """One line for a person: how it ended."""
        texts = {
            "exit": f"exit code {self.exit_code}",
            "signal": f"killed by {_signal_name(self.signal)}",
            "timeout": f"did not end within its time limit ({self.wall_s:.0f} s) and was ended",
            "memory": "ran out of memory",
            "disk": "no space left on the disk",
            "cancelled": "ended on request",
            "parent": "ended with the process that had started it",
            "runner": "its job runner died or did not start",
        }
        return texts[self.reason]


class Report(msgspec.Struct, frozen=True):
    """What the runner wrote: the command's group at its start, the rest at its end."""

    group: int | None = None
    # None when the runner died before the end.
    reason: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    user_s: float = 0.0
    system_s: float = 0.0
    max_rss: int = 0
    wall_s: float = 0.0


class JobPool:
    """At most `slots` commands at once, started in the order in which `run` was called."""

    def __init__(self, slots: int, *, timeout_s: float, memory_bytes: int, nice: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._stuck_s = timeout_s + RUNNER_END_LIMIT_S if timeout_s > 0 else None
        self._limits = (
            "--timeout", str(timeout_s), "--memory", str(memory_bytes), "--nice", str(nice),
        )  # fmt: skip

    async def run(self, command: Command, *, log: Path) -> JobResult:
        """Runs one command; its output goes to `log`. Raises only `OSError` for a log that cannot be opened.

        Cancelling the waiting task ends the command and its descendants, and takes effect when they are gone.
        """
        async with self._slots:
            with log.open("wb") as output:
                try:
                    running = _Running(command, self._limits, output, self._stuck_s)
                except OSError as error:
                    return JobResult(reason="runner", output=f"cannot start {JOB_RUNNER}: {error}")
            try:
                report = await running.ended()
            finally:
                running.release()
        return classify(report, log)


class _Running:
    """One runner process, from its start to the last process of its group."""

    def __init__(
        self, command: Command, limits: tuple[str, ...], output: IO[bytes], stuck_s: float | None
    ) -> None:
        self._stuck_s = stuck_s
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._received = bytearray()
        self._pipe, write_end = os.pipe()
        os.set_blocking(self._pipe, False)
        argv = [
            str(JOB_RUNNER),
            *limits,
            "--parent",
            str(os.getpid()),
            "--report",
            str(write_end),
            "--",
            *command.argv,
        ]
        try:
            # A session of its own keeps the terminal's Ctrl-C away: ending compiles is the caller's decision.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=command.environment,
                cwd=command.directory, pass_fds=(write_end,), start_new_session=True,
            )  # fmt: skip
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(write_end)
        self._loop.add_reader(self._pipe, self._read)

    async def ended(self) -> Report:
        """The runner's report, once it has ended; on cancellation ends everything first."""
        try:
            # The runner keeps the time limit, unless it is stopped itself: then it is ended here.
            await asyncio.wait_for(asyncio.shield(self._done), self._stuck_s)
        except TimeoutError:
            self._process.kill()
            await asyncio.shield(self._done)
        except asyncio.CancelledError:
            self._process.terminate()
            stuck = self._loop.call_later(RUNNER_END_LIMIT_S, self._process.kill)
            while not self._done.done():
                # Further cancellations change nothing: it is ending, and only its end may be reported.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(self._done)
            stuck.cancel()
            raise
        return self._report()

    def release(self) -> None:
        """Ends what a killed runner left, then reaps the runner."""
        self._loop.remove_reader(self._pipe)
        os.close(self._pipe)
        report = self._report()
        if report.group is not None and report.reason is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(report.group, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def _report(self) -> Report:
        """Every complete line that the runner wrote, as one."""
        lines = bytes(self._received).split(b"\n")[:-1]
        fields = [msgspec.json.decode(line, type=dict[str, int | float | str | None]) for line in lines]
        return msgspec.convert({name: value for line in fields for name, value in line.items()}, Report)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._pipe, 4096)
            self._received += chunk
            if not chunk:
                self._loop.remove_reader(self._pipe)
                self._done.set_result(None)


def compile_environment(base: Mapping[str, str], temporary: Path) -> dict[str, str]:
    """The environment of a compile: what is allowed of `base`, and temporary files inside its staging.

    Without a search path a shell still finds programs, but nvcc's preprocessor does not: it gets the shell's.
    """
    allowed = {
        name: value for name, value in base.items() if name in ALLOWED_VARIABLES or name.startswith("LC_")
    }
    return {**allowed, "PATH": allowed.get("PATH") or os.defpath, "TMPDIR": str(temporary)}


def disk_is_full(directory: Path) -> bool:
    """Whether the file system of a directory has no room left for an artifact."""
    usage = os.statvfs(directory)
    return usage.f_bavail * usage.f_frsize < DISK_FULL_BYTES


def classify(report: Report, log: Path) -> JobResult:
    """A result from the runner's report, with the reasons that only the output or the disk can tell."""
    text = _tail(log, REASON_TAIL_BYTES)
    output = _UNPRINTABLE.sub("\ufffd", text.encode()[-OUTPUT_TAIL_BYTES:].decode(errors="replace"))
    reason, code, killer = report.reason or "runner", report.exit_code, report.signal
    if reason == "exit" and code is not None and 0 < code - SHELL_SIGNAL_BASE <= SIGNALS:
        reason, killer, code = "signal", code - SHELL_SIGNAL_BASE, None
    if reason in ("exit", "signal") and code != 0:
        if _NO_SPACE.search(text) or (not text and disk_is_full(log.parent)):
            reason = "disk"
        elif _NO_MEMORY.search(text):
            reason = "memory"
    return JobResult(
        reason=reason,
        exit_code=code,
        signal=killer,
        cpu_s=report.user_s + report.system_s,
        wall_s=report.wall_s,
        max_rss=report.max_rss,
        output=output,
    )


def _tail(log: Path, size: int) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode(errors="replace")


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
