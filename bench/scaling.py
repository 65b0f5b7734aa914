"""How the parts grow: compiles with cores, traces with M and sites, hits with the cache, memory with jobs.

No GPU is needed. Each part is a command of its own and appends one run to the stored results:

    compile   wall time of the same nvcc jobs on 1, 2, 4, ... cores, against max(CPU seconds / cores, longest)
    trace     a helper's time over the largest M, and over the number of sites
    broker    requests a second, as `bench/broker.py` measures it
    hit       looking a published kernel up in a cache of up to 100,000 entries
    step      what telling the planner costs a scheduler's step, as `bench/planner.py` measures it
    call      what observing adds to a DeepGEMM call and to a compile, as `bench/observer.py` measures it
    launch    what it adds to a Triton launch, as `bench/triton_observer.py` measures it
    memory    the helper's resident memory over 1,000 traces

    python bench/scaling.py [PART ...] [--cores 1 --cores 2] [--json FILE]

`compile` pins each count of cores to cores of its own; those that fit on the machine together run at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from compile_throughput import bare, ours, traced_jobs
from tables.results import RESULTS, append, described, load_average, runs_of

from prefetchd.compilers.base import EntryState, Job
from prefetchd.compilers.deep_jit import DeepJit
from prefetchd.cores import usable_cores
from prefetchd.pipeline import Ending
from prefetchd.profiles import GemmSite, Profile
from prefetchd.protocol import Sweep
from prefetchd.provider import Limits, load_providers
from prefetchd.requests.deep_gemm import Fp8GemmNt
from prefetchd.targets import Target, load_target
from prefetchd.tracer import Tracer

BENCH = Path(__file__).parent
PROVIDER = "deep_gemm"
TRACED_M = (64, 256, 1024, 4096, 16384)
TRACED_SITES = (1, 2, 4, 8)
CACHE_SIZES = (100, 1_000, 10_000, 100_000)
# Complete entries among the others, and how often each is looked up.
LOOKED_UP, ROUNDS = 32, 20
MEMORY_TRACES, MEMORY_EVERY = 1000, 50


def scaled_compiles(options: argparse.Namespace, target: Target, place: Path) -> dict[str, Any]:
    """The same jobs on each number of cores, and once bare, one command at a time on one core."""
    cpus = sorted(os.sched_getaffinity(0))
    environment = {**os.environ, "DG_JIT_CACHE_DIR": str(place / "untouched")}
    jobs = asyncio.run(traced_jobs(target, environment))
    # Long and short ones alike.
    jobs = [jobs[at * len(jobs) // options.jobs] for at in range(options.jobs)]
    counts = sorted({count for count in options.cores if count <= len(cpus)}) or [len(cpus)]
    found: dict[str, Any] = {"jobs": len(jobs), "walls": []}
    if options.bare_as_before:
        found["bare"] = runs_of(options.json, part="compile")[-1]["figures"]["bare"]
    # Number 0 is the bare pass.
    numbered = list(enumerate([1, *counts]))[bool(options.bare_as_before) :]
    for wave in _waves(numbered, len(cpus)):
        free = iter(cpus)
        with ProcessPoolExecutor(len(wave), multiprocessing.get_context("spawn")) as pool:
            running = []
            for number, count in wave:
                mine = [next(free) for _ in range(count)]
                task = bare_pass if number == 0 else our_pass
                running.append(pool.submit(task, target, jobs, mine, place / f"{number}"))
            for (number, _), result in zip(wave, running, strict=True):
                found["bare"] = result.result() if number == 0 else found.get("bare")
                if number:
                    found["walls"].append(result.result())
    for row in found["walls"]:
        bound = max(found["bare"]["cpu_s"] / row["cores"], found["bare"]["longest_s"])
        row |= {"bound_s": round(bound, 2), "ratio": round(row["wall_s"] / bound, 3)}
    found["walls"].sort(key=lambda row: row["cores"])
    return found


def _waves(numbered: list[tuple[int, int]], cores: int) -> Iterable[list[tuple[int, int]]]:
    """The numbered counts, in groups that fit on the machine at once."""
    wave: list[tuple[int, int]] = []
    for number, count in numbered:
        if sum(used for _, used in wave) + count > cores:
            yield wave
            wave = []
        wave.append((number, count))
    yield wave


def bare_pass(target: Target, jobs: list[Job], cpus: list[int], place: Path) -> dict[str, float]:
    """In a process of its own: each command alone."""
    os.sched_setaffinity(0, cpus)
    compiler = DeepJit(target, {**os.environ, "DG_JIT_CACHE_DIR": str(place)})
    alone = [bare(compiler, job) for job in jobs]
    cpu_s, longest = sum(run["cpu_s"] for run in alone), max(run["wall_s"] for run in alone)
    return {"cpu_s": round(cpu_s, 2), "longest_s": round(longest, 2)}


def our_pass(target: Target, jobs: list[Job], cpus: list[int], place: Path) -> dict[str, Any]:
    """In a process of its own: the jobs through the pipeline into an empty cache."""
    os.sched_setaffinity(0, cpus)
    place.mkdir()
    compiler = DeepJit(target, {**os.environ, "DG_JIT_CACHE_DIR": str(place)})
    wall, outcomes = ours(compiler, place, jobs, len(cpus))
    if any(outcome.ending is not Ending.COMPILED for outcome in outcomes):
        sys.exit("a job did not compile")
    cpu_s = sum(outcome.cpu_s for outcome in outcomes)
    return {"cores": len(cpus), "wall_s": round(wall, 2), "cpu_s": round(cpu_s, 2)}


def profile_of(sites: int) -> Profile:
    """So many products, each with another N."""
    gemms = tuple(
        GemmSite(name=f"site{number}", op="fp8_gemm_nt", n=1024 * (number + 1), k=7168, m="tokens")
        for number in range(sites)
    )
    return Profile(
        model="sites", architecture="written by hand", tp=1, ep=1, dp=1, quantization="fp8",
        context_tokens=1, gemms=gemms,
    )  # fmt: skip


def scaled_traces(options: argparse.Namespace, target: Target, place: Path) -> dict[str, Any]:
    """Seconds of a trace with one helper that is up already."""
    provider = load_providers([PROVIDER])[PROVIDER]
    environment = {**os.environ, "DG_JIT_CACHE_DIR": str(place)}

    async def measure() -> dict[str, Any]:
        begun = time.perf_counter()
        async with Tracer(target, (PROVIDER,), environment, parallel=usable_cores()) as tracer:
            found: dict[str, Any] = {"helper_start_s": round(time.perf_counter() - begun, 2)}

            async def one(sites: int, most: int) -> dict[str, Any]:
                sweeps = provider.universe_sweeps(profile_of(sites), Limits(max_tokens=most, target=target))
                begun = time.perf_counter()
                reports = await asyncio.gather(*(tracer.trace(PROVIDER, s, "capture") for s in sweeps))
                seconds = time.perf_counter() - begun
                keys = {job.key for report in reports for job in report.jobs}
                return {"sites": sites, "most_m": most, "seconds": round(seconds, 3), "variants": len(keys)}

            await one(1, 16)
            found["over_m"] = [await one(1, most) for most in TRACED_M]
            found["over_sites"] = [await one(sites, 8192) for sites in TRACED_SITES]
            return found

    return asyncio.run(measure())


def scaled_hits(options: argparse.Namespace, target: Target, place: Path) -> dict[str, Any]:
    """Microseconds of one look-up, as the daemon does it before it compiles, among so many entries."""
    environment = {**os.environ, "DG_JIT_CACHE_DIR": str(place)}
    compiler = DeepJit(target, environment)
    job = asyncio.run(traced_jobs(target, environment))[0]
    our_pass(target, [job], sorted(os.sched_getaffinity(0)), place / "one")
    made = compiler.entry_path(job.key, place / "one")
    keys = [f"{job.key[:-4]}{number:04x}" for number in range(LOOKED_UP)]
    for key in keys:
        shutil.copytree(made, compiler.entry_path(key, place))
    rows, count = [], LOOKED_UP
    for size in CACHE_SIZES:
        for number in range(count, size):
            compiler.entry_path(f"{job.key[:-8]}{number:08x}", place).mkdir()
        count = size
        times = [_look_up_us(compiler, key, place) for _ in range(ROUNDS) for key in keys]
        p99 = sorted(times)[int(len(times) * 0.99)]
        rows.append({"entries": size, "p50_us": round(statistics.median(times), 1), "p99_us": round(p99, 1)})
    return {"rows": rows}


def _look_up_us(compiler: DeepJit, key: str, root: Path) -> float:
    begun = time.perf_counter()
    state = compiler.state(key, root)
    seconds = time.perf_counter() - begun
    if state is not EntryState.PUBLISHED:
        sys.exit(f"{key} is {state}, so that this is no figure of a hit")
    return seconds * 1e6


def memory_of_helper(options: argparse.Namespace, target: Target, place: Path) -> dict[str, Any]:
    """Resident MB of the helper after so many traces, each of a request nobody asked for before."""
    environment = {**os.environ, "DG_JIT_CACHE_DIR": str(place)}

    async def measure() -> dict[str, Any]:
        async with Tracer(target, (PROVIDER,), environment, parallel=usable_cores()) as tracer:
            rows = [[0, _rss_mb(tracer.ready.pid)]]
            begun = time.perf_counter()
            for first in range(0, MEMORY_TRACES, MEMORY_EVERY):
                sweeps = [
                    Sweep(Fp8GemmNt(m=number + 1, n=2048, k=7168))
                    for number in range(first, first + MEMORY_EVERY)
                ]
                await asyncio.gather(*(tracer.trace(PROVIDER, sweep, "capture") for sweep in sweeps))
                rows.append([first + MEMORY_EVERY, _rss_mb(tracer.ready.pid)])
            seconds = time.perf_counter() - begun
        return {"traces_and_mb": rows, "trace_ms": round(seconds / MEMORY_TRACES * 1e3, 1)}

    return asyncio.run(measure())


def _rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def another_script(name: str, *arguments: str, prints: bool = False) -> Callable[..., dict[str, Any]]:
    """A part that is a script of its own, whose figures are taken as they are; `prints`: it names no file."""

    def run(options: argparse.Namespace, target: Target, place: Path) -> dict[str, Any]:
        result = place / "figures.json"
        file = [] if prints else [str(result)]
        command = [sys.executable, str(BENCH / name), *arguments, "--json", *file]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        figures: dict[str, Any] = json.loads(done.stdout if prints else result.read_text())
        return {"figures": figures, "bars_met": done.returncode == 0}

    return run


PARTS: dict[str, Callable[[argparse.Namespace, Target, Path], dict[str, Any]]] = {
    "compile": scaled_compiles,
    "trace": scaled_traces,
    "broker": another_script("broker.py"),
    "hit": scaled_hits,
    "step": another_script("planner.py", "--model", "deepseek-v3"),
    "call": another_script("observer.py", prints=True),
    "launch": another_script("triton_observer.py"),
    "memory": memory_of_helper,
}


def main() -> None:
    """Appends a run for each part and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--cores", type=int, action="append", help="of `compile`; default: 1, 2, 4, ...")
    parser.add_argument("--jobs", type=int, default=24, help="of `compile`")
    parser.add_argument("--bare-as-before", action="store_true", help="of `compile`: from the last run")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--json", type=Path, default=RESULTS / "scaling.json")
    options = parser.parse_args()
    options.cores = options.cores or [1, 2, 4, 8, 16, 32, 64]
    target = load_target(options.target)
    for part in options.part or PARTS:
        run = described(null=False, part=part, target=options.target)
        run["load_average"] = {"begin": load_average()}
        with tempfile.TemporaryDirectory(prefix="ps") as folder:
            figures = PARTS[part](options, target, Path(folder))
        run |= {"figures": figures}
        run["load_average"]["end"] = load_average()
        append(options.json, run)
        print(part, json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
