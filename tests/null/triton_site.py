"""An engine's cache and what works on it, for the tests of the Triton compiler, under one version of it."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answering import answer_of

from prefetchd.compilers.base import Job
from prefetchd.compilers.triton import Triton
from prefetchd.forked.executor import ForkedExecutor
from prefetchd.forked.messages import Start
from prefetchd.null_device import launcher
from prefetchd.null_device.launcher import KEEP_NO_TIMINGS, SITE
from prefetchd.pipeline import JobOutcome, Pipeline
from prefetchd.store import KeyLocks, Staging
from prefetchd.targets import load_target

HERE = Path(__file__).parent
VARIABLE = "TRITON_CACHE_DIR"
# Where another version of Triton lies, to be put on PYTHONPATH; made by the Makefile.
OTHER_VARIABLE = "PREFETCHD_TEST_TRITON"
LINES = HERE.parents[1] / ".lines"


def other_triton() -> Path:
    """The directory of the version that is not installed; skips the test without one."""
    named = os.environ.get(OTHER_VARIABLE)
    found = [Path(named)] if named else sorted(LINES.glob("triton-*"))
    if not found:
        pytest.skip(
            f"no other version of Triton: `make env` puts one into {LINES}, {OTHER_VARIABLE} names one"
        )
    return found[0]


class Site:
    """One engine's environment, with processes of any kind on it."""

    def __init__(self, place: Path, *, other: bool = False, target: str = "h200") -> None:
        self.place = place
        self.root = place / "cache"
        self.target = load_target(target)
        self._target_name = target
        paths = [str(HERE), *([str(other_triton())] if other else [])]
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "PYTHONPATH": ":".join(paths),
            VARIABLE: str(self.root),
        }
        self._count = 0

    def compiler(self) -> Triton:
        return Triton(self.target, self.environment)

    def process(self, mode: str, *arguments: str, **changes: str) -> dict[str, Any]:
        """Runs `triton_process.py`; what keeps timings off the disk is taken away, so that we must."""
        child = launcher.environment(self.target, {**self.environment, **changes}, integer_ops=True)
        for name in KEEP_NO_TIMINGS:
            del child[name]
        if mode != "engine":
            child["PYTHONPATH"] = child["PYTHONPATH"].replace(f"{SITE}:", "")
        scratch = self.scratch()
        where = ("--target", self._target_name, "--scratch", str(scratch))
        answer = answer_of((str(HERE / "triton_process.py"), mode, *where, *arguments), child)
        if "jobs" in answer:
            answer["jobs"] = msgspec.msgpack.decode(base64.b64decode(answer["jobs"]), type=list[Job])
        return answer

    def capture(self, *arguments: str) -> list[Job]:
        answer = self.process("capture", *arguments)
        assert answer["raised"] == ""
        jobs: list[Job] = answer["jobs"]
        return jobs

    def scratch(self) -> Path:
        self._count += 1
        directory = self.place / f"scratch-{self._count}"
        directory.mkdir()
        return directory

    @asynccontextmanager
    async def executor(
        self, changes: Mapping[str, str] = {}, *, timeout_s: float = 120
    ) -> AsyncIterator[ForkedExecutor]:
        start = Start(
            compiler="triton",
            target=self.target,
            providers=(),
            slots=2,
            timeout_s=timeout_s,
            memory_bytes=8 << 30,
            nice=0,
        )
        async with ForkedExecutor(start, {**self.environment, **changes}, self.scratch()) as executor:
            yield executor

    async def publish(
        self,
        executor: ForkedExecutor,
        jobs: list[Job],
        quarantined: Callable[[Path], None] = print,
    ) -> list[JobOutcome]:
        """Every job through the real pipeline into the engine's cache."""
        outcomes: list[JobOutcome] = []
        with (
            Staging(self.root, variable=VARIABLE) as staging,
            closing(KeyLocks(self.root, variable=VARIABLE)) as locks,
        ):
            pipeline = Pipeline(
                self.compiler(),
                executor=executor,
                slots=2,
                staging=staging,
                locks=locks,
                quarantined=quarantined,
            )
            await pipeline.run(jobs, outcomes.append)
        return outcomes

    def warm(
        self,
        jobs: list[Job],
        changes: Mapping[str, str] = {},
        quarantined: Callable[[Path], None] = print,
    ) -> list[JobOutcome]:
        async def main() -> list[JobOutcome]:
            async with self.executor(changes) as executor:
                return await self.publish(executor, jobs, quarantined)

        return asyncio.run(main())
