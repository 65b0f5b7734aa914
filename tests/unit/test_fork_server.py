"""Forked workers, with the real server on the null device: an end for each job, and nothing left of any.

A FIFO that a worker and its program hold open tells when they have begun and, by its end of file, that both
are gone. The compiler is a fake whose jobs are Python programs (`forked/`), so that no library is needed.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from prefetchd.compilers.base import CompilerUnavailable, Job
from prefetchd.forked import executor as forked_executor
from prefetchd.forked.executor import ForkedExecutor
from prefetchd.forked.messages import Start
from prefetchd.jobs import JobResult
from prefetchd.null_device import guard
from prefetchd.targets import load_target

FAKE = Path(__file__).parent / "forked"
# Only a failed test waits this long.
LIMIT_S = 30.0


class Bench:
    """An executor and places for its jobs."""

    def __init__(self, executor: ForkedExecutor, place: Path) -> None:
        self.executor = executor
        self._place = place
        self._count = 0

    def staging(self) -> Path:
        self._count += 1
        directory = self._place / f"job-{self._count}"
        directory.mkdir()
        return directory

    async def run(self, program: str, staging: Path | None = None, key: str = "os") -> JobResult:
        job = Job(compiler="fake", key=key, payload=program.encode())
        async with asyncio.timeout(LIMIT_S):
            return await self.executor.run(job, staging or self.staging())

    def server(self) -> psutil.Process:
        (server,) = (
            child
            for child in psutil.Process().children()
            if child.status() != psutil.STATUS_ZOMBIE and "prefetchd.forked.server" in child.cmdline()
        )
        return server


class Hanging:
    """A job that hangs with a program of its own, once `begun` has returned."""

    def __init__(self, bench: Bench) -> None:
        self.directory = bench.staging()
        os.mkfifo(self.directory / "alive")
        self._alive = os.open(self.directory / "alive", os.O_RDONLY | os.O_NONBLOCK)
        self._bench = bench

    async def begin(self) -> asyncio.Task[JobResult]:
        self.task = asyncio.create_task(self._bench.run("hang()", self.directory))
        self.worker = int(await self._read())
        return self.task

    async def gone(self) -> None:
        """Returns when neither the worker nor its program is left."""
        assert await self._read() == b""
        os.close(self._alive)

    async def _read(self) -> bytes:
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._alive, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), LIMIT_S)
            return os.read(self._alive, 100)
        finally:
            loop.remove_reader(self._alive)


@asynccontextmanager
async def bench(
    place: Path,
    *,
    slots: int = 2,
    timeout_s: float = 60,
    memory_bytes: int = 0,
    nice: int = 0,
    prepare: str = "",
) -> AsyncIterator[Bench]:
    target = load_target("h200")
    start = Start(
        compiler="fake",
        target=target,
        providers=(),
        slots=slots,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        nice=nice,
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(FAKE), "FAKE_PREPARE": prepare}
    scratch = place / "scratch"
    scratch.mkdir()
    async with ForkedExecutor(start, environment, scratch) as executor:
        yield Bench(executor, place)


def test_job_compiles_into_its_staging_and_its_programs_are_accounted(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path) as made:
            staging = made.staging()
            burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
            result = await made.run(
                f"(staging / 'out').write_text('good')\nsubprocess.run([sys.executable, '-c', {burn!r}])",
                staging,
            )

            assert result.ok, result
            assert (staging / "out").read_text() == "good"
            assert result.cpu_s >= 0.3
            assert result.wall_s >= 0.3
            assert result.max_rss > 1 << 20

    asyncio.run(main())


def test_workers_start_from_a_process_that_no_job_has_changed(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path) as made:
            assert (await made.run("sys.modules['left_behind'] = sys; os.environ['LEFT'] = '1'")).ok
            assert (await made.run("assert 'left_behind' not in sys.modules and 'LEFT' not in os.environ")).ok

    asyncio.run(main())


def test_kernels_module_is_imported_once_before_the_fork(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path) as made:
            for _ in range(2):
                result = await made.run(
                    "assert 'colorsys' in sys.modules; print(os.getppid())", key="colorsys"
                )
                assert result.ok, result.output

    asyncio.run(main())


def test_job_runs_beside_the_null_device_not_on_it(tmp_path: Path) -> None:
    program = """
import tempfile
print(*map(os.environ.get, ("LD_PRELOAD", "LD_LIBRARY_PATH")), os.nice(0), os.getpgrp() == os.getpid())
print(tempfile.mkdtemp())
"""

    async def main() -> None:
        async with bench(tmp_path, nice=7) as made:
            staging = made.staging()
            result = await made.run(program, staging)

            first, second = result.output.splitlines()
            assert first == "None None 7 True"
            assert Path(second).parent == staging / "tmp"
            assert str(guard.CUDA) not in result.output

    asyncio.run(main())


def test_error_of_the_library_is_the_jobs_output(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path) as made:
            result = await made.run("print('before'); raise ValueError('no such layout')")

            assert (result.reason, result.exit_code) == ("exit", 1)
            assert result.output.splitlines() == ["before", "ValueError: no such layout"]

    asyncio.run(main())


def test_refusal_of_the_compiler_is_raised_with_its_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path) as made:
            with pytest.raises(CompilerUnavailable, match="recorded for another device"):
                await made.run("raise Refuse('recorded for another device')")

    asyncio.run(main())


def test_killed_worker_fails_its_job_alone_and_takes_its_program_along(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path) as made:
            victim, other = Hanging(made), Hanging(made)
            task = await victim.begin()
            await other.begin()

            os.kill(victim.worker, signal.SIGKILL)
            result = await task

            assert (result.reason, result.signal) == ("signal", signal.SIGKILL)
            await victim.gone()
            assert not other.task.done()
            assert (await made.run("print('next')")).ok
            other.task.cancel()
            await other.gone()

    asyncio.run(main())


def test_killed_server_fails_its_jobs_leaves_nothing_and_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path) as made:
            jobs = [Hanging(made), Hanging(made)]
            tasks = [await job.begin() for job in jobs]

            made.server().kill()
            results = await asyncio.gather(*tasks)

            assert [result.reason for result in results] == ["runner", "runner"]
            assert "the fork server has ended" in results[0].output
            for job in jobs:
                await job.gone()
            assert (await made.run("print('next')")).ok

    asyncio.run(main())


def test_server_that_dies_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_executor, "RESTARTS", 1)
    kill_parent = "os.kill(os.getppid(), 9)"

    async def main() -> None:
        async with bench(tmp_path) as made:
            results = [await made.run(kill_parent) for _ in range(3)]

            assert [result.reason for result in results] == ["runner"] * 3
            assert len(list((tmp_path / "scratch").iterdir())) == 2

    asyncio.run(main())


def test_hanging_job_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path, timeout_s=1.0) as made:
            job = Hanging(made)
            result = await (await job.begin())

            assert result.reason == "timeout"
            assert result.wall_s >= 1.0
            await job.gone()

    asyncio.run(main())


def test_job_that_eats_its_memory_is_told_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path, memory_bytes=256 << 20) as made:
            assert (await made.run("bytearray(64 << 20)")).ok
            assert (await made.run("bytearray(1 << 30)")).reason == "memory"

    asyncio.run(main())


def test_cancelled_job_is_ended_before_its_caller_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path) as made:
            job = Hanging(made)
            task = await job.begin()

            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            await job.gone()
            assert (await made.run("print('next')")).ok

    asyncio.run(main())


def test_job_beyond_the_slots_waits_and_can_be_cancelled_before_it_began(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path, slots=1) as made:
            first = Hanging(made)
            await first.begin()
            staging = made.staging()
            waiting = asyncio.create_task(made.run("(staging / 'begun').touch()", staging))
            behind = asyncio.create_task(made.run("print('behind')"))
            while len(made.executor._servers[0]._pending) < 3:
                await asyncio.sleep(0)

            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            first.task.cancel()

            assert (await behind).ok
            assert not (staging / "begun").exists()
            await first.gone()

    asyncio.run(main())


def test_leaving_the_context_ends_the_server_and_its_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(tmp_path) as made:
            job = Hanging(made)
            await job.begin()
            server = made.server()

        assert (await job.task).reason == "runner"
        await job.gone()
        assert not server.is_running()

    asyncio.run(main())


def test_server_that_refuses_gives_every_job_its_reason(tmp_path: Path) -> None:
    prepare = "raise CompilerUnavailable('Triton needs torch; install it')"

    async def main() -> None:
        async with bench(tmp_path, prepare=prepare) as made:
            for _ in range(2):
                with pytest.raises(CompilerUnavailable, match="Triton needs torch"):
                    await made.run("pass")

    asyncio.run(main())


def test_server_that_dies_at_its_start_gives_every_job_its_last_words(tmp_path: Path) -> None:
    prepare = "print('libtriton.so: undefined symbol', flush=True); os._exit(3)"

    async def main() -> None:
        async with bench(tmp_path, prepare=prepare) as made:
            for _ in range(2):
                with pytest.raises(CompilerUnavailable, match="undefined symbol"):
                    await made.run("pass")

    asyncio.run(main())


def test_killed_executor_leaves_neither_server_nor_worker_nor_program(tmp_path: Path) -> None:
    """The executor lives in a process of its own here, which is killed with a job running."""
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_fork_server import Job, bench

async def main():
    async with bench(Path({str(tmp_path)!r})) as made:
        await made.executor.run(Job(compiler="fake", key="os", payload=b"hang()"), Path({str(tmp_path)!r}))

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program]) as executor:
        waiting = select.poll()
        waiting.register(alive, select.POLLIN)
        assert waiting.poll(LIMIT_S * 1000)
        os.set_blocking(alive, True)
        with os.fdopen(alive, "rb") as told:
            assert int(told.readline()) > 0
            executor.kill()

            assert told.read() == b""


def test_messages_survive_the_wire() -> None:
    start = Start(
        compiler="x",
        target=load_target("b200"),
        providers=("a",),
        slots=4,
        timeout_s=1.5,
        memory_bytes=3,
        nice=2,
    )

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=Start) == start
