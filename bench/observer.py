"""What observing costs an engine: a deep_gemm call, a variant first seen, a compile by nvcc, an import.

Nothing but the observer is measured: the entry point is an empty function, nvcc is a program that exits. A
call takes less than the machine's other work disturbs, so its figure is the least of many short rounds; the
others are medians. Exits with 1 where a bound is broken.

    python bench/observer.py [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from prefetchd.compilers.nvcc import STAND_IN
from prefetchd.observer import Observer
from prefetchd.observing.call_site import call_site
from prefetchd.observing.deep_gemm_calls import Call, Cells, Wrappers
from prefetchd.observing.recorder import Origin, Recorder
from prefetchd.observing.spool import Spool

ROUNDS = 7
CALL_ROUNDS, CALLS = 200, 5_000
VARIANTS = 500
COMPILES = 40
# The bounds that the project promises.
CALL_US, VARIANT_MS, COMPILE_MS = 0.5, 0.5, 10.0
PARTS = {"kernel": "f", **{f"field{number}": str(number) for number in range(20)}}
REBUILD = {"source": "x" * 1500, "arguments": ["--cubin"] * 15, "meta": {"config": {}}}
REQUEST = {"op": "fp8_gemm_nt", "m": 7, "n": 512, "k": 1024}


def per_call(function: Callable[..., Any]) -> float:
    """Microseconds of one call as engines make it: two pairs and a tensor, one argument by name."""
    left, right, out = (object(), object()), (object(), object()), object()
    begin = time.perf_counter()
    for _ in range(CALLS):
        function(left, right, out, c=None)
    return (time.perf_counter() - begin) / CALLS * 1e6


def call_us(spool: Spool) -> tuple[float, float]:
    """What the wrapper adds to a call, and the bare call."""

    def fp8_gemm_nt(a: object, b: object, d: object, c: object = None) -> None:
        return None

    def unexpected(call: Call, failing: bool) -> None:
        raise AssertionError("nothing was compiled")

    module = ModuleType("deep_gemm")
    module.fp8_gemm_nt = fp8_gemm_nt  # type: ignore[attr-defined]
    Wrappers(module, Cells(spool.word), unexpected)
    pairs = [(per_call(fp8_gemm_nt), per_call(module.fp8_gemm_nt)) for _ in range(CALL_ROUNDS)]
    bare = min(pair[0] for pair in pairs)
    return min(pair[1] for pair in pairs) - bare, bare


def deep(depth: int, function: Callable[[], Any]) -> Any:
    """As deep in a stack as engines call kernels."""
    return deep(depth - 1, function) if depth else function()


def variant_ms(folder: Path) -> tuple[float, float]:
    """The engine's thread for one variant first seen, median and the worst of all."""
    recorder = Recorder(folder, Origin, lambda: 0, max_bytes=1 << 30, max_queue=1 << 20)
    logging.getLogger("prefetchd").setLevel(logging.ERROR)
    observer = Observer(recorder, site=call_site)
    recorder.start()
    taken = []

    def one(number: int) -> None:
        begin = time.perf_counter()
        token = observer.started("triton", key=f"k{number}")
        half = time.perf_counter() - begin
        begin = time.perf_counter()
        parts = {**PARTS, "field3": str(number)}
        observer.ended(token, seconds=1.0, request=REQUEST, rebuild=REBUILD, parts=parts)
        taken.append(half + time.perf_counter() - begin)

    for number in range(VARIANTS):
        deep(50, partial(one, number))
        # Compiles are seconds apart; the recorder's thread is done with one when the next comes.
        settled = threading.Event()
        recorder.submit(settled.set)
        settled.wait()
    recorder.close(60)
    return statistics.median(taken) * 1e3, max(taken) * 1e3


def compile_ms(folder: Path, spool: Spool) -> tuple[float, float]:
    """What the stand-in adds to a run of nvcc, and the run itself."""
    nvcc, source = folder / "nvcc", folder / "kernel.cu"
    nvcc.write_text("#!/bin/sh\nexit 0\n")
    nvcc.chmod(0o755)
    source.write_text("x" * 1500)
    environment = {
        "PATH": os.environ["PATH"],
        "PREFETCHD_NVCC_MODE": "observe",
        "PREFETCHD_REAL_NVCC": str(nvcc),
        "PREFETCHD_NVCC_SPOOL": str(spool.directory),
    }

    def run(program: Path) -> float:
        begin = time.perf_counter()
        command = [str(program), str(source), "--cubin", "-o", f"{folder}/kernel.cubin", *["--flag"] * 12]
        subprocess.run(command, env=environment, check=True)
        return (time.perf_counter() - begin) * 1e3

    pairs = []
    for _ in range(COMPILES):
        pairs.append((run(nvcc), run(STAND_IN)))
        for name in spool.finished():
            spool.take(name)
    return statistics.median(seen - bare for bare, seen in pairs), statistics.median(
        bare for bare, _ in pairs
    )


def import_ms() -> float:
    """What the first library that is observed waits for, in a process that has imported nothing of ours."""
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); b = time.perf_counter(); "
        "import prefetchd.observing.watch, prefetchd.observing.nvcc; print(time.perf_counter() - b)"
    )
    root = str(Path(__file__).parents[1])
    found = [
        float(subprocess.run([sys.executable, "-c", program, root], capture_output=True, check=True).stdout)
        for _ in range(ROUNDS)
    ]
    return statistics.median(found) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    as_json = parser.parse_args().json
    with TemporaryDirectory() as folder:
        place = Path(folder)
        spool = Spool(place / "nvcc-spool")
        wrapper, bare_call = call_us(spool)
        variant, worst = variant_ms(place / "log")
        stand_in, bare_run = compile_ms(place, spool)
        spool.close()
    figures = {
        "call_added_us": wrapper,
        "call_bare_us": bare_call,
        "variant_ms": variant,
        "variant_worst_ms": worst,
        "nvcc_added_ms": stand_in,
        "nvcc_bare_ms": bare_run,
        "import_ms": import_ms(),
    }
    if as_json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:18} {value:9.3f}")
    bounds = ((wrapper, CALL_US), (variant, VARIANT_MS), (stand_in, COMPILE_MS))
    return int(any(value > bound for value, bound in bounds))


if __name__ == "__main__":
    sys.exit(main())
