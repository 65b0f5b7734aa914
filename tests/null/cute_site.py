"""An engine's environment with a store of CuTe kernels, and what works on it, under one line of the DSL."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefetchd.compilers.base import ForkedCompiler, Job
from prefetchd.compilers.cute_dsl import CuteDsl
from prefetchd.forked.executor import ForkedExecutor
from prefetchd.forked.messages import Start
from prefetchd.null_device import launcher
from prefetchd.pipeline import JobOutcome, Pipeline
from prefetchd.store import KeyLocks, Staging
from prefetchd.targets import load_target

HERE = Path(__file__).parent
LINES = HERE.parents[1] / ".lines"
# Where another version of the DSL lies; made by the Makefile.
OTHER_VARIABLE = "PREFETCHD_TEST_CUTE"
LIMIT_S = 300
FUNCTIONS = "cute_kernels:compile_scale"
DICTS = "cute_kernels:decode_cache,cute_kernels:prefill_cache@2"
VARIABLE = "PREFETCHD_CUTE_STORE"


def other_dsl() -> str:
    """PYTHONPATH of the version that is not installed; skips the test without one."""
    named = os.environ.get(OTHER_VARIABLE)
    found = [Path(named)] if named else sorted(LINES.glob("cutlass-dsl-*"))
    if not found:
        pytest.skip(
            f"no other version of the DSL: `make env` puts one into {LINES}, {OTHER_VARIABLE} names one"
        )
    return f"{found[0]}:{found[0]}/nvidia_cutlass_dsl/python_packages"


class Site:
    """One engine's environment, with processes of any kind on it."""

    def __init__(self, place: Path, *, other: bool = False, target: str = "h200") -> None:
        self.place = place
        place.mkdir(exist_ok=True)
        self.root = place / "store"
        self.target = load_target(target)
        self._target_name = target
        paths = [*([other_dsl()] if other else []), str(HERE)]
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "PYTHONPATH": ":".join(paths),
            VARIABLE: str(self.root),
            "PREFETCHD_CUTE_FUNCTIONS": FUNCTIONS,
            "PREFETCHD_CUTE_DICTS": DICTS,
        }
        self._count = 0

    def compiler(self) -> CuteDsl:
        return CuteDsl(self.target, self.environment)

    def process(self, mode: str, *calls: str, **changes: str) -> dict[str, Any]:
        """Runs `cute_process.py`; its answer, jobs decoded."""
        child = launcher.environment(self.target, {**self.environment, **changes}, integer_ops=True)
        scratch = self.scratch()
        where = ("--target", self._target_name, "--scratch", str(scratch))
        done = subprocess.run(
            [sys.executable, str(HERE / "cute_process.py"), mode, *where, *calls],
            env=child,
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "jobs" in answer:
            answer["jobs"] = msgspec.msgpack.decode(base64.b64decode(answer["jobs"]), type=list[Job])
        return answer

    def capture(self, *calls: str) -> list[Job]:
        answer = self.process("capture", *calls)
        assert answer["raised"] == []
        jobs: list[Job] = answer["jobs"]
        return jobs

    def scratch(self) -> Path:
        self._count += 1
        directory = self.place / f"scratch-{self._count}"
        directory.mkdir()
        return directory

    def warm(self, jobs: list[Job], changes: Mapping[str, str] = {}) -> list[JobOutcome]:
        """Every job through the real pipeline into the store."""
        return run_jobs(self.compiler(), jobs, {**self.environment, **changes}, self.scratch())


def run_jobs(
    compiler: ForkedCompiler, jobs: list[Job], environment: Mapping[str, str], scratch: Path
) -> list[JobOutcome]:
    """Every job through the real pipeline into the compiler's directory."""
    scratch.mkdir(exist_ok=True)
    root, variable = compiler.cache_root(), compiler.cache_variable
    start = Start(
        compiler=compiler.name,
        target=compiler.target,
        providers=(),
        slots=1,
        timeout_s=LIMIT_S,
        memory_bytes=8 << 30,
        nice=0,
    )

    async def main() -> list[JobOutcome]:
        outcomes: list[JobOutcome] = []
        async with ForkedExecutor(start, environment, scratch) as executor:
            with (
                Staging(root, variable=variable) as staging,
                closing(KeyLocks(root, variable=variable)) as locks,
            ):
                pipeline = Pipeline(
                    compiler, executor=executor, slots=1, staging=staging, locks=locks, quarantined=print
                )
                await pipeline.run(jobs, outcomes.append)
        return outcomes

    return asyncio.run(main())


@contextmanager
def read_only_store(site: Site, content: Path, *, without: str = "") -> Iterator[None]:
    """The site's store is a file system that nobody can write to; even root is refused.

    It holds a copy of `content` but for one entry. Skips the test where none can be mounted.
    """
    site.root.mkdir(mode=0o700)
    mounting = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", str(site.root)]
    if subprocess.run(mounting, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        left_out = shutil.ignore_patterns(".prefetchd", without)
        shutil.copytree(content, site.root, ignore=left_out, copy_function=shutil.copy2, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", str(site.root)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(site.root)], check=True)
