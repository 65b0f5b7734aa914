"""What a shape log costs: an append in the engine, and reading, merging, reporting and compacting logs.

An append is timed one by one, as the observer's thread pays it, with records of the size that DeepGEMM's
generated sources give; also while a second process appends to the same file, and where the bound is reached.
Logs to read have lines of 700 to 3,700 bytes, four fifths of them repeats of one variant in fifty. Each
figure of memory is that of a process of its own.

    python bench/shapelog.py [--appends 20000] [--lines 1000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefetchd.report.gathering import gather
from prefetchd.report.page import page
from prefetchd.shapelog import (
    Ended,
    Merged,
    Record,
    ShapeLog,
    Started,
    compact,
    encode_record,
    log_files,
    read_log,
    write_merged,
)

# The bar of a first-seen variant in milliseconds, which the log shares with the observer.
BAR_MS = 0.5
MIB = 1 << 20


def record(number: int, size: int, chance: random.Random) -> Record:
    """A record such as an engine's, of about `size` bytes."""
    return Record(
        compiler="deep_jit",
        key=f"kernel.sm90_fp8_gemm_1d2d.{number:032x}",
        fingerprint="0123456789abcdef",
        cause="unplanned",
        seconds=chance.random() * 9,
        at=1.79e9 + number,
        gpu="NVIDIA H200",
        capability=90,
        sm_count=132,
        site="vllm/model_executor/layers/quantization/fp8.py:411 apply",
        changed="num_warps same, M tile differs",
        provider="deep_gemm",
        request={"op": "fp8_gemm_nt", "m": number % 8192 + 1, "n": 2112, "k": 7168},
        rebuild={"source": "x" * size},
    )


def appends(directory: Path, count: int) -> dict[str, float]:
    """Microseconds for the three lines of a first-seen variant: began, ended, record."""
    log = ShapeLog(directory, "bench", 0, max_bytes=1 << 40)
    chance = random.Random(1)
    records = [record(number, 3000, chance) for number in range(200)]
    taken = []
    for number in range(count):
        line = records[number % len(records)]
        begun = time.perf_counter()
        log.append(Started(compiler=line.compiler, token=number, site=line.site, at=line.at))
        log.append(Ended(token=number, at=line.at))
        log.append(line)
        taken.append((time.perf_counter() - begun) * 1e6)
    assert log.dropped == 0
    log.close()
    taken.sort()
    return {
        "median_us": statistics.median(taken),
        "p99_us": taken[int(len(taken) * 0.99)],
        "max_us": taken[-1],
    }


def beside_another(directory: Path, count: int) -> dict[str, float]:
    """The same while another process appends to the same log."""
    child = os.fork()
    if child == 0:
        appends(directory, count)
        os._exit(0)
    found = appends(directory, count)
    os.waitpid(child, 0)
    return found


def refused(directory: Path, count: int) -> dict[str, float]:
    """Microseconds of an append that the log's bound refuses, after the first."""
    log = ShapeLog(directory, "full", 0, max_bytes=1)
    line = record(1, 3000, random.Random(1))
    log.append(line)
    begun = time.perf_counter()
    for _ in range(count):
        log.append(line)
    return {"mean_us": (time.perf_counter() - begun) / count * 1e6}


def make_logs(directory: Path, lines: int) -> int:
    """Eight ranks' logs with so many lines in all; says how many bytes they have."""
    chance = random.Random(2)
    variants = [
        encode_record(record(n, chance.randrange(200, 3200), chance)) for n in range(max(lines // 50, 1))
    ]
    for rank in range(8):
        with (directory / f"node.rank{rank}.jsonl").open("wb") as file:
            for number in range(lines // 8):
                if number % 5:
                    file.write(variants[chance.randrange(len(variants))])
                else:
                    fresh = chance.randrange(200_000)
                    file.write(encode_record(record(fresh, 300, chance)))
    return sum(path.stat().st_size for path in directory.iterdir())


def in_a_process(work: Callable[[], Any]) -> dict[str, Any]:
    """The work's seconds, the most memory of a process that does nothing else, and what it returns."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        begun = time.perf_counter()
        result = work()
        figures = {
            "seconds": time.perf_counter() - begun,
            "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "result": result,
        }
        os.write(write, json.dumps(figures).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found: dict[str, Any] = json.loads(pipe.read())
    os.waitpid(child, 0)
    return found


def reading(directory: Path) -> dict[str, dict[str, Any]]:
    """Reading, merging, reporting and compacting the directory's logs."""
    files = log_files([directory])
    # Beside the logs: files in the directory itself would be logs to read.
    out = directory.parent / "merged.jsonl"
    return {
        "read": in_a_process(lambda: sum(1 for path in files for _ in read_log(path))),
        "merge": in_a_process(lambda: write_merged(Merged(files), out)),
        "report": in_a_process(lambda: len(page(gather(files)))),
        "compact one": in_a_process(lambda: compact(files[0]).records),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--appends", type=int, default=20_000)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shapelog-") as name:
        place = Path(name)
        figures: dict[str, Any] = {
            "append": appends(place / "one", options.appends),
            "append beside another process": beside_another(place / "two", options.appends),
            "append refused": refused(place / "three", options.appends),
        }
        logs = place / "logs"
        logs.mkdir()
        figures["logs"] = {"lines": options.lines, "mib": make_logs(logs, options.lines) / MIB}
        figures |= reading(logs)
    for what, values in figures.items():
        told = ", ".join(
            f"{key} {value:,.1f}" if isinstance(value, float) else f"{key} {value:,}"
            for key, value in values.items()
        )
        print(f"{what}: {told}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    fast = figures["append"]["median_us"] < BAR_MS * 1000
    print(f"bar: {BAR_MS} ms a first-seen variant: {'held' if fast else 'missed'}")
    return 0 if fast else 1


if __name__ == "__main__":
    sys.exit(main())
