"""What real engines compiled and measured is replayed without the GPU, and never compiled or measured again.

Three observed processes with an empty cache, one a family, as ranks of one node; their logs and winners are
replayed on the null device into another empty cache; the same processes again. Beside the observer's own
count, each cache is listed before and after, and nvcc's starts are counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_deep_gemm import counting_nvcc

from prefetchd.targets import Target, write_target

HERE = Path(__file__).parent
CASES = ("deep_gemm", "kda-4", "mamba")
NEEDED = ("torch", "triton", "fla", "mamba_ssm", "deep_gemm")
# The bar: loading kernels and launching them; one compile takes longer.
FIRST_CALL_S = 1.0
# Only a run that hangs takes so long.
TIME_LIMIT_S = 600


class Place:
    """A cache, and the processes that use it; logs are kept beside it, for all caches."""

    def __init__(self, folder: Path, name: str) -> None:
        self.cache = folder / name
        self.logs = folder / "logs"
        self.nvcc = counting_nvcc(folder)
        self.started = folder / "started"
        self.variables = {
            "DG_JIT_CACHE_DIR": str(self.cache / "deep_gemm"),
            "TRITON_CACHE_DIR": str(self.cache / "triton"),
            # mamba_ssm's tuners keep results only where this asks for it; fla's do by themselves.
            "TRITON_CACHE_AUTOTUNING": "1",
            "DG_JIT_NVCC_COMPILER": str(self.nvcc),
            "PREFETCHD_LOG_DIR": str(self.logs),
        }

    def start(self, *command: object, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**os.environ, **self.variables, **variables},
            stdout=subprocess.PIPE,
            text=True,
        )

    def engine(self, case: str) -> subprocess.Popen[str]:
        rank = str(CASES.index(case))
        return self.start(HERE / "replay_engine_gpu.py", case, RANK=rank, WORLD_SIZE=str(len(CASES)))

    def entries(self) -> set[str]:
        """Complete kernels of both systems, tuners' results, and what a C compiler built for the library."""
        patterns = (
            "deep_gemm/cache/*",
            "triton/*/__grp__*.json",
            "triton/*/*.autotune.json",
            "triton/*/*.so",
        )
        return {str(path.relative_to(self.cache)) for each in patterns for path in self.cache.glob(each)}

    def nvcc_starts(self) -> int:
        return len(self.started.read_text().splitlines()) if self.started.exists() else 0


def answer(process: subprocess.Popen[str], statuses: tuple[int, ...] = (0,)) -> dict[str, Any]:
    out, _ = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode in statuses, out
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def libcuda_directories() -> str:
    """Where the engine's Triton will look for the driver, in its order."""
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    found = [Path(line.split()[-1]) for line in listed.splitlines() if "libcuda.so.1" in line]
    return ":".join(str(path.parent) for path in found)


def total(engines: dict[str, dict[str, Any]], name: str) -> int:
    return sum(int(each["figures"].get(name, 0)) for each in engines.values())


def test_engines_compile_and_measure_nothing_after_a_replay_without_the_gpu(
    device: Target, tmp_path: Path
) -> None:
    for module in NEEDED:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    target = tmp_path / "device.toml"
    write_target(device, target)
    cold, replayed = Place(tmp_path, "cold"), Place(tmp_path, "replayed")
    row: dict[str, Any] = {"device": device.name}

    begun = time.monotonic()
    running = {case: cold.engine(case) for case in CASES}
    first = row["first"] = {case: answer(process) for case, process in running.items()}
    row["first_s"] = round(time.monotonic() - begun, 1)
    nvcc_before = row["nvcc_starts"] = cold.nvcc_starts()

    begun = time.monotonic()
    replay = row["replay"] = answer(
        replayed.start(
            "-m", "prefetchd", "replay", "--target", target, "--json",
            PREFETCHD_LIBCUDA_DIR=libcuda_directories(),
        ),
        statuses=(0, 1),
    )  # fmt: skip
    row["replay_s"] = round(time.monotonic() - begun, 1)
    nvcc_replay = cold.nvcc_starts()

    before = replayed.entries()
    # One after another: each is timed.
    second = row["second"] = {case: answer(replayed.engine(case)) for case in CASES}
    row["new_entries"] = sorted(replayed.entries() - before)
    row["nvcc_starts_again"] = replayed.nvcc_starts() - nvcc_replay

    print(json.dumps(row))
    if out := os.environ.get("PREFETCHD_TEST_RESULTS"):
        Path(out, "replay_h200.json").write_text(json.dumps(row, indent=1))
    # The check can fail: the first processes did compile and measure.
    assert total(first, "deep_jit.compiles") == nvcc_before > 2
    assert total(first, "triton.compiles") > 100
    assert total(first, "triton.benchmarks") > 0
    assert all(each["errors"] == 0 for each in (*first.values(), *second.values()))
    assert (replay["failed"], replay["refused"], replay["foreign"], replay["uncovered"]) == (0, 0, 0, 0)
    assert replay["winners"]["seeded"] == total(first, "triton.benchmarks")
    assert (total(second, "deep_jit.compiles"), total(second, "triton.compiles")) == (0, 0)
    assert total(second, "triton.benchmarks") == 0
    assert row["new_entries"] == []
    assert row["nvcc_starts_again"] == 0
    slow = {
        name: seconds
        for each in second.values()
        for name, seconds in each["first_call_s"].items()
        if seconds >= FIRST_CALL_S
    }
    assert slow == {}
