"""Both lines of DeepGEMM on the null device, traced by a stand-in for nvcc that compiles nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefetchd.null_device.launcher import environment
from prefetchd.targets import load_target

ROOT = Path(__file__).parents[2]
# The installed package, and the older line that `make env` lays beside it.
LINES = {"new": None, "old": ROOT / ".lines/deep_gemm-0.1.7"}

STAND_IN = """#!/bin/sh
case "$*" in *--version*) exec "$REAL_NVCC" --version;; esac
out=; prev=
for a in "$@"; do
    case "$prev" in --output-file | -o) out=$a;; esac
    prev=$a
done
printf '%s\\n' "$*" >> "$CAPTURE_LOG"
printf x > "$out"
"""

DENSE = """
import torch
import deep_gemm
M, N, K = 129, 2112, 7168
a = torch.empty(M, K, device="cuda", dtype=torch.float8_e4m3fn)
b = torch.empty(N, K, device="cuda", dtype=torch.float8_e4m3fn)
sa = torch.empty(M, K // 128, device="cuda")
sb = torch.empty((N + 127) // 128, K // 128, device="cuda")
d = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
deep_gemm.fp8_gemm_nt((a, sa), (b, sb), d)
torch.cuda.synchronize()
print(deep_gemm.get_num_sms())
"""


def trace(line: str, target: str, folder: Path) -> tuple[int, list[str], list[str]]:
    """SM count that the library reports, the nvcc commands, and the names of the cache entries."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    stand_in, log, cache = folder / "nvcc", folder / "log", folder / "cache"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    cache.mkdir()
    older = LINES[line]
    if older is not None:
        assert older.is_dir(), f"{older} is missing: run `make env`"
    base = {
        **os.environ,
        "PYTHONPATH": str(older or ""),
        "DG_JIT_NVCC_COMPILER": str(stand_in),
        "DG_JIT_CACHE_DIR": str(cache),
        "REAL_NVCC": nvcc,
        "CAPTURE_LOG": str(log),
    }
    result = subprocess.run(
        [sys.executable, "-c", DENSE],
        env=environment(load_target(target), base),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    entries = sorted(path.name.rsplit(".", 1)[0] for path in (cache / "cache").iterdir())
    return int(result.stdout), log.read_text().splitlines(), entries


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("target", "arch"), [("h200", "90a"), ("b200", "100")])
def test_a_dense_call_is_traced_for_the_target(line: str, target: str, arch: str, tmp_path: Path) -> None:
    sm_count, commands, entries = trace(line, target, tmp_path)

    assert sm_count == load_target(target).sm_count
    assert len(commands) == len(entries) > 0
    assert all(f"sm_{arch}" in command or f"compute_{arch}" in command for command in commands)
    assert any("fp8" in entry and "gemm" in entry for entry in entries)
