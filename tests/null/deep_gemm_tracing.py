"""Starts `deep_gemm_trace.py` on the null device for one line of the package and one target."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from prefetchd.null_device.launcher import environment
from prefetchd.protocol import Sweep, encode_sweeps
from prefetchd.targets import load_target

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "prefetchd/compilers/nvcc_stand_in.sh"
# The two lines of the package: what is installed, and an older one beside it.
LINES = {"new": None, "old": ROOT / ".lines/deep_gemm-0.1.7"}


class Traced(msgspec.Struct, frozen=True):
    """What a sweep's child found: variants named as the cache names them, without the digest in `kernels`."""

    variants: list[str]
    raised: str
    printed: str
    seconds: float = 0.0

    @property
    def kernels(self) -> list[str]:
        return sorted({variant.rsplit(".", 1)[0] for variant in self.variants})


def trace(line: str, target: str, sweeps: Iterable[Sweep], **variables: str) -> list[Traced]:
    """Each sweep's result, in order. Raises if the program itself fails."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    environ = environment(load_target(target), os.environ) | {
        "DG_JIT_NVCC_COMPILER": str(STAND_IN),
        "PREFETCHD_NVCC_MODE": "capture",
        "PREFETCHD_REAL_NVCC": nvcc,
        **variables,
    }
    older = LINES[line]
    if older is not None:
        assert older.is_dir(), f"{older} is missing: run `make env`"
        environ["PYTHONPATH"] = f"{older}:{environ.get('PYTHONPATH', '')}"
    program = Path(__file__).with_name("deep_gemm_trace.py")
    run = subprocess.run(
        [sys.executable, program],
        input=encode_sweeps(sweeps),
        env=environ,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr.decode(errors="replace")[-2000:]
    return msgspec.convert(json.loads(run.stdout.splitlines()[-1]), list[Traced])
