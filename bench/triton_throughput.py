"""How much longer our compiles of Triton kernels take than the machine allows.

The bound is max(CPU seconds of the same jobs run one at a time / cores, the longest of them). Both sides run
in this process, on the same machine, one after the other, each into an empty cache: first through a fork
server with one slot, then through one with a slot a core, as `warm` has it (staging, verifying, publishing).
What a server takes to get warm is reported apart: it compiles one more job first, which is in neither figure.
Where `elsewhere_cpu_s` is not small, the machine had other work meanwhile and the ratio is that work's.

    python bench/triton_throughput.py [--jobs 48] [--target h200] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from prefetchd.compilers.base import Job
from prefetchd.compilers.triton import Triton
from prefetchd.cores import usable_cores
from prefetchd.forked.executor import ForkedExecutor
from prefetchd.forked.messages import Start
from prefetchd.pipeline import Ending, JobOutcome, Pipeline
from prefetchd.profiles import KernelSite, Profile
from prefetchd.provider import Limits, load_providers
from prefetchd.store import KeyLocks, Staging
from prefetchd.targets import Target, load_target
from prefetchd.tracer import Tracer

PROVIDER = "kda"
# A rank of Kimi-Linear at TP 8: the prefill has 110 variants there, of 0.2 to 6 seconds each.
KDA = KernelSite(
    name="kda.chunk",
    op="chunk_kda",
    sizes={"heads": 4, "key_dim": 128, "value_dim": 128},
    flags={"set": "vllm"},
)
PROFILE = Profile(
    model="one layer",
    architecture="written by hand",
    tp=1,
    ep=1,
    dp=1,
    quantization="bf16",
    context_tokens=1,
    kernels=(KDA,),
)


class Pass(msgspec.Struct, frozen=True):
    """One way through all jobs: until the server was warm, then the wall time of the jobs, and each end.

    `busy_s` is what all processors of the machine worked in that time, for whomever.
    """

    warm_up_s: float
    wall_s: float
    busy_s: float
    outcomes: list[JobOutcome]

    @property
    def cpu_s(self) -> float:
        """As wait4 has it, of every worker and its programs."""
        return sum(outcome.cpu_s for outcome in self.outcomes)


def busy_s() -> float:
    """CPU seconds that this machine has worked since its start."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


async def traced_jobs(target: Target, environment: dict[str, str]) -> list[Job]:
    """Every variant of the layer's prefill, in the order of first use."""
    sweeps = load_providers([PROVIDER])[PROVIDER].universe_sweeps(
        PROFILE, Limits(max_tokens=8192, target=target)
    )
    async with Tracer(target, (PROVIDER,), environment) as tracer:
        reports = [await tracer.trace(PROVIDER, sweep, "capture") for sweep in sweeps]
    return [job for report in reports for job in report.jobs]


def spread(jobs: list[Job], count: int) -> list[Job]:
    """So many of them, from all kernels: neighbours in the order of first use are one kernel's candidates."""
    return [jobs[at * len(jobs) // count] for at in range(count)]


async def through_the_pipeline(
    target: Target, place: Path, jobs: list[Job], first: Job, slots: int, workers: int
) -> Pass:
    """The jobs into an empty cache, with so many compiles at a time and so many jobs in the pipeline."""
    root, scratch = place / "cache", place / "scratch"
    scratch.mkdir(parents=True)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(root)}
    compiler = Triton(target, environment)
    start = Start(
        compiler=compiler.name,
        target=target,
        providers=(PROVIDER,),
        slots=slots,
        timeout_s=600,
        memory_bytes=16 << 30,
        # Not lower: on a machine with other work the figure would be that work's.
        nice=0,
    )
    variable, outcomes = compiler.cache_variable, list[JobOutcome]()
    begun = time.perf_counter()
    with (
        Staging(root, variable=variable) as staging,
        contextlib.closing(KeyLocks(root, variable=variable)) as locks,
    ):
        async with ForkedExecutor(start, environment, scratch) as executor:
            with staging.entry(first.key) as entry:
                warmed = await executor.run(first, entry)
            warm_up_s = time.perf_counter() - begun - warmed.wall_s
            pipeline = Pipeline(
                compiler,
                executor=executor,
                slots=workers,
                staging=staging,
                locks=locks,
                quarantined=lambda path: None,
            )
            begun, busy = time.perf_counter(), busy_s()
            await pipeline.run(jobs, outcomes.append)
            return Pass(warm_up_s, time.perf_counter() - begun, busy_s() - busy, outcomes)


def figures_of(jobs: list[Job], cores: int, target: str, alone: Pass, ours: Pass) -> dict[str, Any]:
    longest = max(outcome.wall_s for outcome in alone.outcomes)
    bound = max(alone.cpu_s / cores, longest)
    seconds = {
        "one_at_a_time_cpu_s": alone.cpu_s,
        "one_at_a_time_wall_s": alone.wall_s,
        "longest_s": longest,
        "bound_s": bound,
        "wall_s": ours.wall_s,
        "job_cpu_s": ours.cpu_s,
        "elsewhere_cpu_s": ours.busy_s - ours.cpu_s,
        "warm_up_s": ours.warm_up_s,
    }
    return {
        "jobs": len(jobs),
        "cores": cores,
        "target": target,
        **{name: round(value, 2) for name, value in seconds.items()},
        "ratio": round(ours.wall_s / bound, 3),
    }


def main() -> int:
    """Prints the figures; ends with a message if a job failed, so that a wrong figure cannot be quoted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=48)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    target, cores = load_target(arguments.target), usable_cores()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        environment = {**os.environ, "TRITON_CACHE_DIR": str(place / "untouched")}
        found = asyncio.run(traced_jobs(target, environment))
        # One more, with which each server gets warm.
        first, *jobs = spread(found, min(arguments.jobs + 1, len(found)))
        alone = asyncio.run(through_the_pipeline(target, place / "alone", jobs, first, 1, 1))
        # As `warm` does: one more than may run is ready when another's result is being published.
        ours = asyncio.run(through_the_pipeline(target, place / "ours", jobs, first, cores, cores + 1))
    for outcome in (*alone.outcomes, *ours.outcomes):
        if outcome.ending is not Ending.COMPILED:
            sys.exit(f"{outcome.job.key} did not compile: {outcome.text}")
    figures = figures_of(jobs, cores, arguments.target, alone, ours)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
