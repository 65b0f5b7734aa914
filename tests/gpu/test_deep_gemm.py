"""A cache filled without the GPU serves the process that has it: nothing is compiled, no call is slow."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from prefetchd.targets import Target, load_target

HERE = Path(__file__).parent
PROFILE = HERE / "deep_gemm.profile.toml"
MAX_TOKENS = os.environ.get("PREFETCHD_TEST_MAX_TOKENS", "8192")
# The bar: a call that compiles takes seconds; one that loads a cubin for the first time some milliseconds.
WORST_CALL_MS = 50.0


def counting_nvcc(folder: Path) -> Path:
    """An nvcc that notes each compile in a file and then is the real one."""
    real = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    script = folder / "nvcc"
    note = f'case "$*" in *--version*) ;; *) echo "$*" >> {folder}/started ;; esac'
    script.write_text(f'#!/bin/sh\n{note}\nexec {real} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def run(*command: object, **variables: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def entries(cache: Path) -> set[str]:
    return {path.name for path in (cache / "cache").iterdir()}


def test_preset_is_what_the_device_reports(device: Target) -> None:
    if "H200" not in device.name:
        pytest.skip(f"compares the h200 preset, but the device is {device.name}")
    assert load_target("h200") == device


def test_engine_compiles_nothing_after_a_warm_without_the_gpu(device: Target, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    nvcc = counting_nvcc(tmp_path)
    target = "h200" if "H200" in device.name else device.name
    warm = json.loads(
        run(
            sys.executable, "-m", "prefetchd", "warm", "--target", target, "--profile", PROFILE,
            "--max-tokens", MAX_TOKENS, "--json", DG_JIT_CACHE_DIR=str(cache),
        )
    )  # fmt: skip
    before = entries(cache)

    engine = json.loads(
        run(
            sys.executable, HERE / "deep_gemm_engine.py", PROFILE, MAX_TOKENS,
            DG_JIT_CACHE_DIR=str(cache), DG_JIT_NVCC_COMPILER=str(nvcc),
        ).splitlines()[-1]
    )  # fmt: skip

    started = tmp_path / "started"
    result = {
        "warm": {key: value for key, value in warm.items() if key != "providers"},
        "variants": len(before),
        "new_entries": sorted(entries(cache) - before),
        "nvcc_started": len(started.read_text().splitlines()) if started.exists() else 0,
        **engine,
    }
    if out := os.environ.get("PREFETCHD_TEST_RESULTS"):
        Path(out, "deep_gemm_h200.json").write_text(json.dumps(result, indent=1))
    assert len(before) > 0
    assert sum(row["calls"] for row in engine["rows"]) > 1000
    assert result["new_entries"] == []
    assert result["nvcc_started"] == 0
    assert max(row["worst_ms"] for row in engine["rows"]) < WORST_CALL_MS
