"""Where figures are kept: one JSON file a table, which runs are appended to and never taken from.

A run says by itself all that a reader needs to judge it: date, machine, versions, command, seed, figures and
raw numbers. The subtle rule: what ran on the null device is no measurement, so such a run says so in `null`
and everything that shows figures leaves it out.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prefetchd.cores import usable_cores

RESULTS = Path(__file__).parents[2] / "docs/results"
PACKAGES = (
    "prefetchd", "torch", "triton", "sgl-deep-gemm", "fla-core", "einops", "mamba-ssm", "vllm", "pyzmq",
    "msgspec",
)  # fmt: skip

Run = dict[str, Any]


def machine() -> dict[str, Any]:
    """The processor, the cores this process may use, and the GPU with its driver where there is one."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"model name\s*:\s*(.*)", text)
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": usable_cores(),
        "kernel": platform.release(),
        "gpu": _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
    }


def versions() -> dict[str, str]:
    """Of the packages that are installed, of Python and of nvcc."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    nvcc = re.search(r"release ([\d.]+), V([\d.]+)", _said(real_nvcc(), "--version"))
    return {**found, "nvcc": nvcc[2] if nvcc else ""}


def real_nvcc() -> str:
    """The nvcc that measured processes are given."""
    return shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


def described(*, null: bool, **facts: Any) -> Run:
    """A run so far: what it ran on and how it was asked for, and the facts given."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "command": " ".join(["python", _relative(sys.argv[0]), *sys.argv[1:]]),
        "null": null,
        "machine": machine(),
        "versions": versions(),
        **facts,
    }


def append(path: Path, *runs: Run) -> None:
    """Adds runs to the file, one a line, also when several processes do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        kept = json.loads(text)["runs"] if text else []
        lines = ",\n".join(json.dumps(run, separators=(", ", ": ")) for run in [*kept, *runs])
        file.truncate(0)
        file.write('{"runs": [\n' + lines + "\n]}\n")


def runs_of(path: Path, *, null: bool = False, **wanted: Any) -> list[Run]:
    """The measured runs of a file whose facts are these, the latest last; none when there is no file.

    With `null` those on the null device instead, whose counts are true and whose times are the processor's.
    """
    if not path.exists():
        return []
    runs = [run for run in json.loads(path.read_text())["runs"] if run["null"] is null]
    return [run for run in runs if all(run.get(name) == value for name, value in wanted.items())]


def load_average() -> list[float]:
    """How busy the machine is beside us, to be noted with every time that is measured."""
    return [round(value, 2) for value in os.getloadavg()]


def _relative(script: str) -> str:
    try:
        return str(Path(script).resolve().relative_to(RESULTS.parents[1]))
    except ValueError:
        return Path(script).name


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
