"""What an engine waits for FlashInfer's CuTe kernels: loaded from the store, and compiled by itself.

On the null device, in fresh processes: a warm-up fills the store; then an engine that may not compile makes
one call of each kind, and another without a store makes the same calls. Reported are each load and each
compile, the cold start of the DSL's own libraries beside them, and how long a thread that wants to run every
millisecond had to wait for the interpreter meanwhile.

    python bench/cute_load.py [--target b200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prefetchd.null_device import launcher
from prefetchd.targets import load_target

NULL_TESTS = Path(__file__).parents[1] / "tests" / "null"
ENGINE = NULL_TESTS / "cute_flashinfer_process.py"
PROFILE = NULL_TESTS / "flashinfer.profile.toml"
PREFETCHD = Path(sys.executable).with_name("prefetchd")
# The bars: milliseconds of the first load and of each later one, and of any wait meanwhile.
FIRST_MS, LATER_MS, WAIT_MS = 100.0, 10.0, 20.0


def environment(place: Path) -> dict[str, str]:
    """An engine's, with both caches in `place`."""
    return {**os.environ, "XDG_CACHE_HOME": str(place), "FLASHINFER_WORKSPACE_BASE": str(place)}


def warm(target: str, place: Path) -> dict[str, Any]:
    """Fills the caches; what it took and left."""
    providers = ("--provider", "kda_cute", "--provider", "gdn_cute")
    command = [str(PREFETCHD), "warm", "--target", target, "--profile", str(PROFILE), *providers]
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, "--max-tokens", "256", "--json"], env=environment(place), capture_output=True, check=False
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    figures = answer["providers"].values()
    return {
        "wall_s": round(time.perf_counter() - begun, 1),
        "compile_cpu_s": round(answer["compile_cpu_s"], 1),
        "compiled": sum(each["compiled"] for each in figures),
        "uncovered": sum(each["uncovered"] for each in figures),
    }


def engine(target: str, place: Path, *options: str) -> dict[str, Any]:
    """One engine process on the null device."""
    child = launcher.environment(load_target(target), environment(place), integer_ops=True)
    command = [sys.executable, str(ENGINE), "--target", target, "--profile", str(PROFILE), *options]
    done = subprocess.run(command, env=child, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(target: str) -> dict[str, Any]:
    """All three stages in a directory of their own."""
    with tempfile.TemporaryDirectory() as work:
        filled, empty = Path(work) / "filled", Path(work) / "empty"
        filled.mkdir()
        empty.mkdir()
        warmed = warm(target, filled)
        served = engine(target, filled)
        alone = engine(target, empty, "--allowed")
    loads = [*served["loads_ms"], *served["own_loads_ms"]]
    return {
        "target": target,
        "warm": warmed,
        "misses": served["counts"].get("miss", 0) + len(served["failures"]),
        "first_load_ms": loads[0],
        "later_loads_ms": loads[1:],
        "cold_libraries_s": served["runtimes_s"],
        "wait_while_loading_ms": served["wait_while_loading_ms"],
        "inline_compiles_s": alone["all_compiles_s"],
        "wait_while_compiling_ms": alone["wait_while_compiling_ms"],
    }


def main() -> int:
    """Exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="b200")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.target)
    for name, value in found.items():
        print(f"{name:24} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    held = (
        found["misses"] == 0
        and found["first_load_ms"] <= FIRST_MS
        and max(found["later_loads_ms"]) <= LATER_MS
        and found["wait_while_loading_ms"] <= WAIT_MS
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
