"""The job pool: at most so many at once, an end for each, and nothing left of any."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import LIMIT_S, LifeSign

from prefetchd import jobs
from prefetchd.compilers.base import Command
from prefetchd.job_runner import JOB_RUNNER
from prefetchd.jobs import OUTPUT_TAIL_BYTES, JobPool, JobResult, compile_environment

# Two generations, of which the younger ignores SIGTERM.
HANG = "(trap '' TERM; sleep 1000 & sleep 1000) & wait"


def shell(directory: Path, script: str) -> Command:
    return Command(argv=("sh", "-c", script), environment={"PATH": os.environ["PATH"]}, directory=directory)


def pool(slots: int = 1, *, timeout_s: float = 0, memory_bytes: int = 0) -> JobPool:
    return JobPool(slots, timeout_s=timeout_s, memory_bytes=memory_bytes, nice=0)


def run(directory: Path, script: str, **limits: float) -> JobResult:
    return asyncio.run(pool(**limits).run(shell(directory, script), log=directory / "log"))  # type: ignore[arg-type]


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[LifeSign]:
    sign = LifeSign(tmp_path / "alive")
    yield sign
    sign.close()


def runner_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.exe() == str(JOB_RUNNER)]


def test_a_success_carries_output_time_and_memory(tmp_path: Path) -> None:
    result = run(tmp_path, "echo to stdout; echo to stderr >&2")

    assert result.ok
    assert not result.retryable
    assert result.output == "to stdout\nto stderr\n"
    assert result.wall_s > 0
    assert result.max_rss > 0


def test_a_compile_error_is_not_retryable(tmp_path: Path) -> None:
    result = run(tmp_path, "echo 'kernel.cu(3): error'; exit 2")

    assert (result.reason, result.exit_code, result.ok, result.retryable) == ("exit", 2, False, False)
    assert result.describe() == "exit code 2"


def test_only_the_end_of_a_long_output_is_kept(tmp_path: Path) -> None:
    result = run(tmp_path, "yes filler | head -c 100000; echo last")

    assert len(result.output) == OUTPUT_TAIL_BYTES
    assert result.output.endswith("last\n")
    assert (tmp_path / "log").stat().st_size > 100000


def test_the_command_sees_its_own_environment_only(tmp_path: Path) -> None:
    result = run(tmp_path, "env | cut -d= -f1 | sort")

    assert result.output.split() == ["PATH", "PWD"]


def test_a_hanging_job_is_ended_and_retryable(tmp_path: Path, alive: LifeSign) -> None:
    async def scenario() -> JobResult:
        result = asyncio.create_task(
            pool(timeout_s=1.0).run(shell(tmp_path, f"{alive.shell}; {HANG}"), log=tmp_path / "log")
        )
        await asyncio.to_thread(alive.wait_begun)
        return await result

    result = asyncio.run(scenario())

    assert (result.reason, result.retryable) == ("timeout", True)
    assert "time limit" in result.describe()
    assert alive.all_gone()


def test_a_killed_job_is_retryable(tmp_path: Path) -> None:
    result = run(tmp_path, "kill -9 $$")

    assert (result.reason, result.signal, result.retryable) == ("signal", signal.SIGKILL, True)
    assert "SIGKILL" in result.describe()


def test_a_killed_child_of_the_command_is_retryable(tmp_path: Path) -> None:
    result = run(tmp_path, "sh -c 'kill -9 $$'; exit $?")

    assert (result.reason, result.signal, result.retryable) == ("signal", signal.SIGKILL, True)


def test_a_reason_behind_a_long_trace_is_found(tmp_path: Path) -> None:
    result = run(tmp_path, "echo 'catastrophic error: out of memory'; yes trace | head -c 100000; exit 1")

    assert result.reason == "memory"
    assert "memory" not in result.output


@pytest.mark.parametrize(
    ("text", "reason"),
    [("cc1plus: out of memory allocating 65536 bytes", "memory"), ("write: No space left on device", "disk")],
)
def test_what_the_machine_lacks_is_retryable(tmp_path: Path, text: str, reason: str) -> None:
    result = run(tmp_path, f"echo '{text}'; exit 1")

    assert (result.reason, result.retryable) == (reason, True)


def test_the_memory_limit_holds(tmp_path: Path) -> None:
    # dash prints what it could not allocate.
    result = run(tmp_path, 'x=0123456789abcdef; while :; do x="$x$x"; done', memory_bytes=1 << 28)

    assert not result.ok
    assert result.max_rss < 1 << 28


def test_a_command_that_died_before_it_began_is_resolved(tmp_path: Path) -> None:
    # Too little memory for any program: the process ends before it can report its group.
    result = run(tmp_path, "echo never", memory_bytes=4096)

    assert not result.ok
    assert result.output == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_silent_failure_on_a_full_disk_is_blamed_on_the_disk(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=True)
    try:
        result = run(tmp_path, "cat /dev/zero > filler 2>/dev/null; echo lost; exit 1")
    finally:
        subprocess.run(["umount", tmp_path], check=True)

    assert (result.reason, result.retryable) == ("disk", True)


def test_cancelling_ends_the_whole_tree_first(tmp_path: Path, alive: LifeSign) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(
            pool().run(shell(tmp_path, f"{alive.shell}; {HANG}"), log=tmp_path / "log")
        )
        await asyncio.to_thread(alive.wait_begun)
        task.cancel()
        await asyncio.sleep(0)
        # Impatience changes nothing: the task still ends only when the tree has.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert alive.all_gone()
        assert runner_processes() == []

    asyncio.run(scenario())


def test_a_killed_runner_resolves_its_job_and_leaves_nothing(tmp_path: Path, alive: LifeSign) -> None:
    async def scenario() -> JobResult:
        task = asyncio.create_task(
            pool().run(shell(tmp_path, f"{alive.shell}; {HANG}"), log=tmp_path / "log")
        )
        await asyncio.to_thread(alive.wait_begun)
        for runner in runner_processes():
            runner.kill()
        return await asyncio.wait_for(task, LIMIT_S)

    result = asyncio.run(scenario())

    assert (result.reason, result.retryable) == ("runner", True)
    assert alive.all_gone()


def test_a_stopped_runner_resolves_its_job_and_leaves_nothing(
    tmp_path: Path, alive: LifeSign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RUNNER_END_LIMIT_S", 0.2)

    async def scenario() -> JobResult:
        task = asyncio.create_task(
            pool(timeout_s=0.5).run(shell(tmp_path, f"{alive.shell}; {HANG}"), log=tmp_path / "log")
        )
        await asyncio.to_thread(alive.wait_begun)
        for runner in runner_processes():
            runner.suspend()
        return await asyncio.wait_for(task, LIMIT_S)

    result = asyncio.run(scenario())

    assert (result.reason, result.retryable) == ("runner", True)
    assert alive.all_gone()


@pytest.mark.parametrize(
    ("code", "reason", "killer"),
    [(128 + signal.SIGTERM, "signal", signal.SIGTERM), (128, "exit", None), (255, "exit", None)],
)
def test_only_a_code_that_stands_for_a_signal_is_read_as_one(
    tmp_path: Path, code: int, reason: str, killer: int | None
) -> None:
    result = run(tmp_path, f"exit {code}")

    assert (result.reason, result.signal) == (reason, killer)


def test_output_holds_nothing_that_a_terminal_would_obey(tmp_path: Path) -> None:
    result = run(tmp_path, r"printf 'a\033[2J\000\rb\tc\n'; exit 1")

    assert result.output.replace("\N{REPLACEMENT CHARACTER}", "?") == "a?[2J??b\tc\n"


def test_a_missing_runner_resolves_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "JOB_RUNNER", tmp_path / "absent")

    result = run(tmp_path, "true")

    assert result.reason == "runner"
    assert "absent" in result.output


def test_no_more_jobs_than_slots_run_at_once(tmp_path: Path, alive: LifeSign) -> None:
    os.mkfifo(tmp_path / "go")

    async def scenario() -> list[JobResult]:
        two = pool(slots=1)
        first = asyncio.create_task(two.run(shell(tmp_path, f"{alive.shell}; cat go"), log=tmp_path / "1"))
        second = asyncio.create_task(two.run(shell(tmp_path, "echo second"), log=tmp_path / "2"))
        await asyncio.to_thread(alive.wait_begun)
        assert not (tmp_path / "2").exists()
        (tmp_path / "go").write_text("first")
        return [await first, await second]

    assert [result.output for result in asyncio.run(scenario())] == ["first", "second\n"]


def test_a_cancelled_job_gives_its_slot_back(tmp_path: Path, alive: LifeSign) -> None:
    async def scenario() -> JobResult:
        one = pool(slots=1)
        task = asyncio.create_task(one.run(shell(tmp_path, f"{alive.shell}; {HANG}"), log=tmp_path / "1"))
        await asyncio.to_thread(alive.wait_begun)
        task.cancel()
        return await one.run(shell(tmp_path, "echo next"), log=tmp_path / "2")

    assert asyncio.run(scenario()).output == "next\n"


def test_compile_environment_is_an_allow_list() -> None:
    base = {
        "PATH": "/bin", "HOME": "/root", "LC_ALL": "C", "NVCC_APPEND_FLAGS": "-g", "CUDA_HOME": "/cuda",
        "LD_PRELOAD": "shim.so", "LD_LIBRARY_PATH": "/shim", "PYTHONPATH": "/x", "TMPDIR": "/tmp",
    }  # fmt: skip

    environment = compile_environment(base, Path("/staging/tmp"))

    kept = {name: base[name] for name in ("PATH", "HOME", "LC_ALL", "NVCC_APPEND_FLAGS", "CUDA_HOME")}
    assert environment == {**kept, "TMPDIR": "/staging/tmp"}


@pytest.mark.parametrize("base", [{}, {"PATH": ""}])
def test_a_compile_has_a_search_path_where_the_caller_has_none(base: dict[str, str]) -> None:
    # nvcc finds the host compiler's own programs by it; execvp would look there, they do not.
    assert compile_environment(base, Path("/tmp"))["PATH"] == os.defpath
