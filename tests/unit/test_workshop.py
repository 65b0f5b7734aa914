"""What an engine waits for compiles at normal niceness: real fork servers, a fake compiler."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from daemon_bench import eventually

from prefetchd import compilers
from prefetchd.compilers.base import Job
from prefetchd.config import Settings
from prefetchd.node.workshop import LastingExecutor, Workshop
from prefetchd.targets import load_target

FAKE = Path(__file__).parent / "forked"
NICE = 7
SHOW = "print(os.nice(0))"


@asynccontextmanager
async def workshop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Workshop]:
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setitem(compilers._CLASSES, "fake", ("fake_forked", "FakeForked"))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(FAKE), "FAKE_PREPARE": ""}
    interpreter = sys.executable
    made = Workshop(load_target("h200"), environment, interpreter, Settings(job_nice=NICE), lambda: ())
    try:
        yield made
    finally:
        await made.close()


async def niceness(made: Workshop, place: Path, *, background: bool) -> int:
    staging = place / f"job-{len(list(place.iterdir()))}"
    staging.mkdir()
    executor = made.executor("fake", background=background)
    result = await executor.run(Job(compiler="fake", key="os", payload=SHOW.encode()), staging)
    assert result.ok, result
    return int(result.output) - os.nice(0)


def servers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "prefetchd.forked.server" in child.cmdline()
    ]


def test_urgent_job_runs_at_normal_niceness_and_batch_at_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with workshop(monkeypatch) as made:
            assert await niceness(made, tmp_path, background=False) == 0
            assert await niceness(made, tmp_path, background=True) == NICE

    asyncio.run(scenario())
    assert servers() == []


def test_server_for_urgent_jobs_is_started_when_first_needed_and_nothing_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with workshop(monkeypatch) as made:
            await niceness(made, tmp_path, background=True)
            assert len(servers()) == 1
            # By the server that is warm, though that is a slow one.
            assert await niceness(made, tmp_path, background=False) == NICE
            urgent = made._executors["fake", False]
            assert isinstance(urgent, LastingExecutor)
            await eventually(lambda: urgent._current is not None and urgent._current.warm)
            assert len(servers()) == 2
            assert await niceness(made, tmp_path, background=False) == 0
            assert await niceness(made, tmp_path, background=True) == NICE

    asyncio.run(scenario())
    assert servers() == []


def test_urgent_server_that_died_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with workshop(monkeypatch) as made:
            await niceness(made, tmp_path, background=False)
            await niceness(made, tmp_path, background=True)
            urgent = made._executors["fake", False]
            assert isinstance(urgent, LastingExecutor)
            assert urgent._current is not None
            first = urgent._current
            first._servers[-1]._process.kill()
            await eventually(lambda: not first.warm)
            assert await niceness(made, tmp_path, background=False) == 0

    asyncio.run(scenario())
    assert servers() == []
