"""The C job runner: whatever ends a job, nothing of it is left and the end is reported.

A pipe that the command and all its descendants inherit tells when the last of them is gone: it reads empty.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefetchd.job_runner import JOB_RUNNER

# Two generations that ignore SIGTERM, one of them in a session of its own, behind a command that waits.
STUBBORN = "(trap '' TERM; setsid sleep 1000 & sleep 1000) & echo started; wait"
# Only a failed test waits this long.
LIMIT_S = 20.0
# As the runner has it.
FILE_LIMIT = 1 << 30


class Alive:
    """A pipe held by whoever was started with `write`; tells when all of them are gone."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()

    def all_gone(self, within_s: float = 0.0) -> bool:
        os.close(self.write)
        ready, _, _ = select.select([self._read], [], [], within_s)
        return bool(ready) and os.read(self._read, 1) == b""

    def close(self) -> None:
        os.close(self._read)


@pytest.fixture
def alive() -> Iterator[Alive]:
    pipe = Alive()
    yield pipe
    pipe.close()


class Run:
    """A started runner, its report and the command's output. REPORT in a command becomes its number."""

    def __init__(
        self,
        command: list[str],
        *options: str,
        alive: Alive | None = None,
        parent: int | None = None,
        under: tuple[str, ...] = (),
    ) -> None:
        self._report, write = os.pipe()
        command = [part.replace("REPORT", str(write)) for part in command]
        argv = [
            *under,
            str(JOB_RUNNER),
            *options,
            "--parent",
            str(parent or os.getpid()),
            "--report",
            str(write),
            "--",
            *command,
        ]
        inherited = (write,) if alive is None else (write, alive.write)
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, pass_fds=inherited
        )
        os.close(write)

    def wait_started(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "started\n"

    def result(self) -> dict[str, Any]:
        with os.fdopen(self._report) as report:
            lines = report.read().splitlines()
        assert self.process.stdout is not None
        self.output = self.process.stdout.read()
        self.process.stdout.close()
        self.process.wait(LIMIT_S)
        return json.loads(lines[-1]) if len(lines) == 2 else {}


def test_exit_code_is_reported() -> None:
    result = Run(["sh", "-c", "echo out; exit 3"]).result()

    assert (result["reason"], result["exit_code"], result["signal"]) == ("exit", 3, None)


def test_death_by_signal_is_reported() -> None:
    result = Run(["sh", "-c", "kill -SEGV $$"]).result()

    assert (result["reason"], result["exit_code"], result["signal"]) == ("signal", None, signal.SIGSEGV)


def test_a_command_that_cannot_start_is_named() -> None:
    run = Run(["/nonexistent/nvcc"])

    assert run.result()["exit_code"] == 127
    assert "cannot start /nonexistent/nvcc" in run.output


def test_what_the_command_left_behind_is_killed(alive: Alive) -> None:
    run = Run(["sh", "-c", "(trap '' TERM; sleep 1000) & setsid sleep 1000 & exit 0"], alive=alive)

    assert run.result()["exit_code"] == 0
    assert alive.all_gone()


def test_a_hanging_tree_ends_with_its_time_limit(alive: Alive) -> None:
    run = Run(["sh", "-c", f"trap '' TERM; {STUBBORN}"], "--timeout", "0.1", alive=alive)

    assert run.result()["reason"] == "timeout"
    assert alive.all_gone()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_ends_the_tree(alive: Alive, stop: signal.Signals) -> None:
    run = Run(["sh", "-c", STUBBORN], alive=alive)
    run.wait_started()

    run.process.send_signal(stop)

    assert run.result()["reason"] == "cancelled"
    assert alive.all_gone()


def test_the_tree_ends_when_the_parent_is_killed(alive: Alive) -> None:
    script = (
        "import os, subprocess, sys\n"
        f"argv = [{str(JOB_RUNNER)!r}, '--parent', str(os.getpid()), '--report', '2', '--']\n"
        f"argv += ['sh', '-c', {STUBBORN!r}]\n"
        "subprocess.run(argv, close_fds=False)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, pass_fds=(alive.write,)
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"

    parent.kill()
    parent.wait()
    parent.stdout.close()

    assert alive.all_gone(within_s=LIMIT_S)


def test_nothing_is_started_for_a_parent_that_is_gone() -> None:
    run = Run(["sh", "-c", "echo started"], parent=1)

    assert run.result() == {}
    assert run.process.returncode == 127
    assert "nothing was started" in run.output


def test_memory_limit_stops_an_allocation() -> None:
    result = Run([sys.executable, "-c", "bytearray(1 << 31)"], "--memory", str(1 << 29)).result()

    assert result["exit_code"] == 1


def test_a_command_that_writes_without_end_is_stopped(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        # Near the limit, so that the test does not write so much.
        file.truncate(FILE_LIMIT - 4096)

    result = Run(["sh", "-c", f"exec head -c 1000000 /dev/zero >>{tmp_path}/file"]).result()

    assert result["signal"] == signal.SIGXFSZ
    assert (tmp_path / "file").stat().st_size == FILE_LIMIT


def test_a_lower_limit_of_the_user_is_kept() -> None:
    lower = ("prlimit", f"--fsize={1 << 20}", f"--as={1 << 33}")

    run = Run(["sh", "-c", "ulimit -H -f; ulimit -H -v"], "--memory", str(1 << 40), under=lower)
    run.result()

    assert run.output.split() == [str(1 << 11), str(1 << 23)]


def test_time_and_memory_of_all_descendants_are_counted() -> None:
    burn = "import time; x = bytearray(64 << 20)\nwhile time.process_time() < 0.3: pass"

    result = Run(["sh", "-c", '"$0" -c "$1"; :', sys.executable, burn]).result()

    assert result["user_s"] + result["system_s"] >= 0.3
    assert result["max_rss"] >= 64 << 20
    assert result["wall_s"] >= 0.3


def test_niceness_reaches_the_command() -> None:
    run = Run(["nice"], "--nice", "7")
    run.result()

    assert int(run.output) == os.getpriority(os.PRIO_PROCESS, 0) + 7


def test_the_command_does_not_get_the_report() -> None:
    run = Run(["sh", "-c", "[ -e /proc/$$/fd/REPORT ] && echo inherited || echo closed"])
    run.result()

    assert run.output == "closed\n"


@pytest.mark.parametrize("arguments", [[], ["--report", "1"], ["--report", "x", "--", "true"], ["--bad"]])
def test_wrong_use_is_explained(arguments: list[str]) -> None:
    done = subprocess.run([JOB_RUNNER, *arguments], capture_output=True, text=True)

    assert done.returncode == 2
    assert "job_runner: " in done.stderr
