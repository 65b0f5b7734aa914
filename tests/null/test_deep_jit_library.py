"""The real library on the null device, the real nvcc, both lines: trace, compile, publish, prove."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from deep_gemm_tracing import LINES

from prefetchd.compilers.base import EntryState, Job
from prefetchd.compilers.deep_gemm_package import find_package
from prefetchd.compilers.deep_jit import DeepJit
from prefetchd.elf import cubin_architecture
from prefetchd.executors import CommandExecutor
from prefetchd.jobs import JobPool
from prefetchd.null_device.launcher import environment
from prefetchd.pipeline import Ending, JobOutcome, Pipeline
from prefetchd.store import KeyLocks, Staging
from prefetchd.targets import load_target

FAILING_NVCC = '#!/bin/sh\n[ "$1" = --version ] && exec {nvcc} --version\ntouch {started}; exit 1\n'


class Site:
    """One line of the library with an empty cache, for one target."""

    def __init__(self, directory: Path, line: str, target: str) -> None:
        older = LINES[line]
        self._directory = directory
        self._target = target
        self.root = directory / "root"
        self.environment = {**os.environ, "DG_JIT_CACHE_DIR": str(self.root)}
        if older is not None:
            assert older.is_dir(), f"{older} is missing: run `make env`"
            self.environment["PYTHONPATH"] = f"{older}:{self.environment.get('PYTHONPATH', '')}"
        package = find_package(None if older is None else older / "deep_gemm").directory
        self.compiler = DeepJit(load_target(target), self.environment, package_directory=package)

    def run(self, mode: str, m: int, **variables: str) -> tuple[list[Job], str]:
        """The jobs that a process on the null device reports, and what the library raised in it."""
        program = Path(__file__).with_name("deep_jit_engine.py")
        scratch = self._directory / f"{mode}-{m}"
        done = subprocess.run(
            [sys.executable, program, mode, self._target, scratch, str(m)],
            env=environment(load_target(self._target), self.environment) | variables,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
        return msgspec.msgpack.decode(base64.b64decode(answer["jobs"]), type=list[Job]), answer["raised"]

    def warm(self, jobs: list[Job]) -> list[JobOutcome]:
        outcomes: list[JobOutcome] = []
        with Staging(self.root, variable="X") as staging, closing(KeyLocks(self.root, variable="X")) as locks:
            pipeline = Pipeline(
                self.compiler,
                executor=CommandExecutor(
                    self.compiler, JobPool(2, timeout_s=300, memory_bytes=8 << 30, nice=0)
                ),
                slots=2,
                staging=staging,
                locks=locks,
                quarantined=lambda _: None,
            )
            asyncio.run(pipeline.run(jobs, outcomes.append))
        return outcomes


@pytest.mark.parametrize("line", LINES)
def test_a_trace_names_the_gemm_and_its_layout_kernel_and_compiles_nothing(tmp_path: Path, line: str) -> None:
    site = Site(tmp_path, line, "h200")

    jobs, raised = site.run("capture", 64)

    assert raised == ""
    names = [job.key.removeprefix("kernel.").split(".")[0] for job in jobs]
    assert sorted(names) == ["sm90_fp8_gemm_1d2d", "transpose_fp32"]
    assert not site.root.exists()


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("line", "target"), [("new", "h200"), ("old", "h200"), ("new", "b200"), ("old", "b200")]
)
def test_compiled_ahead_an_engine_needs_no_nvcc(tmp_path: Path, line: str, target: str) -> None:
    site = Site(tmp_path, line, target)
    jobs, _ = site.run("capture", 64)

    assert [outcome.ending for outcome in site.warm(jobs)] == [Ending.COMPILED] * len(jobs)

    assert {site.compiler.look_up(job.key) for job in jobs} == {EntryState.PUBLISHED}
    for job in jobs:
        cubin = site.compiler.entry_path(job.key, site.root) / "kernel.cubin"
        assert cubin_architecture(cubin) == load_target(target).capability
    assert site.run("forbid", 64) == ([], "")
    before = sorted(site.root.rglob("*"))
    started, failing = tmp_path / "started", tmp_path / "nvcc"
    failing.write_text(FAILING_NVCC.format(nvcc=site.compiler.nvcc.path, started=started))
    failing.chmod(0o755)
    assert site.run("engine", 64, DG_JIT_NVCC_COMPILER=str(failing)) == ([], "")
    assert not started.exists()
    assert sorted(site.root.rglob("*")) == before

    # Another M is another variant of the GEMM, while the layout kernel is the same.
    [miss], raised = site.run("forbid", 4096)

    assert raised != ""
    assert miss.key.startswith("miss.")
    assert site.compiler.digest(miss) not in {site.compiler.digest(job) for job in jobs}
    assert sorted(site.root.rglob("*")) == before
