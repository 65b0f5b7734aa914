"""How much longer our compile phase takes than the machine allows.

The bound is max(CPU seconds of the same nvcc commands run one at a time outside our code / cores, the longest
of them). Both sides run in this process, on the same machine, one after the other: first each command bare,
by subprocess and wait4, then the same jobs through the pipeline (staging, job runner, verifying, publishing).

    python bench/compile_throughput.py [--jobs 24] [--target h200] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prefetchd.compilers.base import Job
from prefetchd.compilers.deep_jit import DeepJit
from prefetchd.cores import usable_cores
from prefetchd.executors import CommandExecutor
from prefetchd.jobs import JobPool
from prefetchd.pipeline import Ending, JobOutcome, Pipeline
from prefetchd.profiles import profile_from_config
from prefetchd.provider import Limits, load_providers
from prefetchd.store import KeyLocks, Staging
from prefetchd.targets import Target, load_target
from prefetchd.tracer import Tracer

MODEL = Path(__file__).parent.parent / "examples/models/deepseek-v3.json"


async def traced_jobs(target: Target, environment: dict[str, str]) -> list[Job]:
    """Every variant of DeepSeek-V3 at TP 8, in the order of first use."""
    profile = profile_from_config(MODEL, tp=8)
    providers = load_providers(["deep_gemm"])
    sweeps = providers["deep_gemm"].universe_sweeps(profile, Limits(max_tokens=8192, target=target))
    jobs: dict[str, Job] = {}
    async with Tracer(target, ("deep_gemm",), environment, parallel=usable_cores()) as tracer:
        for report in await asyncio.gather(*(tracer.trace("deep_gemm", s, "capture") for s in sweeps)):
            jobs |= {job.key: job for job in report.jobs if job.key not in jobs}
    return list(jobs.values())


def bare(compiler: DeepJit, job: Job) -> dict[str, float]:
    """One command, alone: wall seconds, and CPU seconds of it and its descendants."""
    with tempfile.TemporaryDirectory() as folder:
        command = compiler.compile(job, Path(folder))
        begun = time.perf_counter()
        process = subprocess.Popen(command.argv, env=command.environment, cwd=command.directory)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{job.key}: the bare command failed")
        return {"wall_s": time.perf_counter() - begun, "cpu_s": usage.ru_utime + usage.ru_stime}


def ours(compiler: DeepJit, root: Path, jobs: list[Job], slots: int) -> tuple[float, list[JobOutcome]]:
    """The same jobs through the pipeline into an empty cache: wall seconds, and each outcome."""
    outcomes: list[JobOutcome] = []
    pool = JobPool(slots, timeout_s=600, memory_bytes=16 << 30, nice=0)
    variable = compiler.cache_variable
    with (
        Staging(root, variable=variable) as staging,
        contextlib.closing(KeyLocks(root, variable=variable)) as locks,
    ):
        pipeline = Pipeline(
            compiler,
            executor=CommandExecutor(compiler, pool),
            slots=slots,
            staging=staging,
            locks=locks,
            quarantined=lambda path: None,
        )
        begun = time.perf_counter()
        asyncio.run(pipeline.run(jobs, outcomes.append))
        return time.perf_counter() - begun, outcomes


def main() -> int:
    """Prints the figures; 1 if a job failed, so that a wrong figure cannot be quoted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    target, cores = load_target(arguments.target), usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "DG_JIT_CACHE_DIR": folder}
        compiler = DeepJit(target, environment)
        jobs = asyncio.run(traced_jobs(target, environment))[: arguments.jobs]
        alone = [bare(compiler, job) for job in jobs]
        wall, outcomes = ours(compiler, Path(folder), jobs, cores)
    if any(outcome.ending is not Ending.COMPILED for outcome in outcomes):
        sys.exit("a job did not compile")
    bound = max(sum(run["cpu_s"] for run in alone) / cores, max(run["wall_s"] for run in alone))
    figures: dict[str, Any] = {
        "jobs": len(jobs),
        "cores": cores,
        "target": arguments.target,
        "bare_cpu_s": round(sum(run["cpu_s"] for run in alone), 2),
        "bare_longest_s": round(max(run["wall_s"] for run in alone), 2),
        "bound_s": round(bound, 2),
        "wall_s": round(wall, 2),
        "ratio": round(wall / bound, 3),
        "job_cpu_s": round(sum(outcome.cpu_s for outcome in outcomes), 2),
    }
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
