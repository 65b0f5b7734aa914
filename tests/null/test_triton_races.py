"""Engines and we on one key at once: a group is one writer's alone, and a dead compile leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytest.importorskip("triton")

from triton_site import HERE, Site

from prefetchd.compilers.base import EntryState, Job
from prefetchd.null_device import launcher
from prefetchd.pipeline import Ending

ENGINES = 16
BLOCKS = [16, 32, 64, 128, 256, 512]
LIMIT_S = 60.0


@contextmanager
def engines(site: Site, blocks: list[int]) -> Iterator[subprocess.Popen[str]]:
    """Sixteen engines that wait for a line."""
    process = subprocess.Popen(
        [
            sys.executable,
            str(HERE / "triton_race.py"),
            "--engines",
            str(ENGINES),
            "--blocks",
            json.dumps(blocks),
        ],
        env=launcher.environment(site.target, site.environment, integer_ops=True),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """A job for each of `BLOCKS`, in their order."""
    return Site(tmp_path_factory.mktemp("captured")).capture("--blocks", json.dumps(BLOCKS))


async def compile_unpublished(site: Site, jobs: list[Job]) -> list[Path]:
    """A staging directory with a finished artifact for each job."""
    stagings = []
    async with site.executor() as executor:
        for job in jobs:
            staging = site.scratch()
            result = await executor.run(job, staging)
            assert result.ok, result.output
            stagings.append(staging)
    return stagings


def answers_of(process: subprocess.Popen[str]) -> list[tuple[int, list[dict[str, list[int]]]]]:
    assert process.stdout is not None
    answers: list[tuple[int, list[dict[str, list[int]]]]] = json.loads(process.stdout.readline())
    return answers


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
@pytest.mark.ci
def test_published_group_is_never_mixed_with_an_engines(captured: list[Job], tmp_path: Path) -> None:
    """Half of the keys are published before any engine looks, half at the moment when the first one has."""
    site = Site(tmp_path)
    site.root.mkdir()
    compiler = site.compiler()
    ahead, late = captured[:3], captured[3:]
    staged = dict(
        zip([job.key for job in captured], asyncio.run(compile_unpublished(site, captured)), strict=True)
    )

    # So that publishing has nothing to wait for between an engine's look-up and its first file.
    os.sync()
    with engines(site, BLOCKS) as process:
        for job in ahead:
            assert compiler.publish(job, staged[job.key], site.root)
        go(process)
        waiting = list(late)
        while waiting:
            for job in [job for job in waiting if (site.root / job.key).exists()]:
                waiting.remove(job)
                assert not compiler.publish(job, staged[job.key], site.root)
        answers = answers_of(process)

    assert len(answers) == ENGINES
    whole_ours = 0
    for _, read in answers:
        assert len(read) == len(BLOCKS)
        for group in read:
            marked = [bool(writers) for writers in group.values()]
            assert all(marked) or not any(marked), group
            whole_ours += not any(marked)
    assert whole_ours == ENGINES * len(ahead)
    for job in captured:
        assert compiler.look_up(job.key) is EntryState.PUBLISHED


@pytest.mark.slow
@pytest.mark.ci
def test_pipeline_and_cold_engines_on_one_key_leave_one_whole_group(
    captured: list[Job], tmp_path: Path
) -> None:
    site = Site(tmp_path)
    site.root.mkdir()
    (job,) = captured[:1]

    async def main() -> None:
        async with site.executor() as executor:
            # Warm before the race begins.
            assert (await executor.run(captured[1], site.scratch())).ok
            go(process)
            (outcome,) = await site.publish(executor, [job])
            assert outcome.ending in (Ending.COMPILED, Ending.FOUND), outcome.text

    with engines(site, BLOCKS[:1]) as process:
        asyncio.run(main())
        answers = answers_of(process)

    assert len(answers) == ENGINES
    for _, (group,) in answers:
        marked = [bool(writers) for writers in group.values()]
        assert all(marked) or not any(marked), group
    assert len(list((site.root / job.key).glob("__grp__*.json"))) == 1
    assert site.compiler().look_up(job.key) is EntryState.PUBLISHED


class SlowPtxas:
    """A ptxas that answers for its version and otherwise hangs, holding a FIFO open."""

    def __init__(self, place: Path) -> None:
        import triton

        real = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        self.path, fifo = place / "ptxas", place / "alive"
        os.mkfifo(fifo)
        self._alive = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.path.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\n'
            f"exec 9>{fifo}\necho $$ >&9\nexec sleep 1000\n"
        )
        self.path.chmod(0o755)

    async def _readable(self) -> bytes:
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._alive, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), LIMIT_S)
            return os.read(self._alive, 100)
        finally:
            loop.remove_reader(self._alive)

    async def begun(self) -> None:
        assert int(await self._readable()) > 0

    async def gone(self) -> None:
        assert await self._readable() == b""


def fork_server() -> psutil.Process:
    (server,) = (
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "prefetchd.forked.server" in child.cmdline()
    )
    return server


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", pytest.param("server", marks=pytest.mark.ci), "ptxas"])
def test_kill_in_mid_compile_leaves_nothing_and_the_next_run_compiles(
    captured: list[Job], victim: str, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    ptxas = SlowPtxas(tmp_path)
    (job,) = captured[:1]

    async def main() -> None:
        async with site.executor({"TRITON_PTXAS_PATH": str(ptxas.path)}) as executor:
            running = asyncio.create_task(site.publish(executor, [job]))
            await ptxas.begun()
            server = fork_server()
            (worker,) = server.children()
            {"worker": worker, "server": server, "ptxas": worker.children()[0]}[victim].send_signal(
                signal.SIGKILL
            )
            (outcome,) = await running

            assert outcome.ending is Ending.FAILED
            assert outcome.text
            await ptxas.gone()
            assert site.compiler().look_up(job.key) is EntryState.MISSING
            assert {path.name for path in site.root.iterdir()} == {".prefetchd"}
            # Orphans are reaped by whoever is init here, in its own time.
            assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE

    asyncio.run(main())
    (outcome,) = site.warm([job])
    assert outcome.ending is Ending.COMPILED
