"""Unmodified Triton on the null device: kernels compile, launch, and leave no timing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefetchd.null_device.launcher import environment
from prefetchd.targets import load_target

pytest.importorskip("triton")

AUTOTUNED = """
import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=1) for block in (32, 64)]

@triton.autotune(configs=CONFIGS, key=["size"], cache_results=True)
@triton.jit
def double(x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < size), mask=at < size)

double[(1,)](torch.empty(32, device="cuda"), 32)
torch.cuda.synchronize()
print(double.cache_results, len(double.cache), sorted(double.configs_timings.values()))
try:
    double[(1,)](torch.empty(32), 32)
except ValueError as error:
    print("refused", "cpu tensor" in str(error))
"""


def run(
    program: str, folder: Path, target: str = "h200", **variables: str
) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(program)
    base = {"PATH": os.environ["PATH"], "HOME": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    child = {**environment(load_target(target), base, integer_ops=True), **variables}
    result = subprocess.run(
        [sys.executable, str(script)], env=child, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize(("target", "arch"), [("h200", "sm_90"), ("b200", "sm_100")])
def test_every_candidate_compiles_for_the_target_and_no_timing_is_kept(
    target: str, arch: str, tmp_path: Path
) -> None:
    # The strongest wish to keep timings: the kernel's own and the user's variable.
    result = run(AUTOTUNED, tmp_path, target, TRITON_CACHE_AUTOTUNING="1")

    assert result.stdout.startswith("True 1 [[1.0, 1.0, 1.0]"), result.stdout
    assert "refused True" in result.stdout
    cubins = list((tmp_path / "cache").rglob("double.cubin"))
    assert len(cubins) == 2
    assert all(f".target {arch}" in path.with_suffix(".ptx").read_text() for path in cubins)
    assert list(tmp_path.rglob("*.autotune.json")) == []


PRODUCT = """
import torch
a = torch.empty(256, 256, device="cuda", dtype=torch.bfloat16)
torch.compile(lambda a, b: a @ b, mode="max-autotune-no-cudagraphs")(a, a)
torch.compile(lambda a: (2 * a + 1).sum(-1))(a)
print(torch._inductor.config.autotune_local_cache)
"""


@pytest.mark.slow
def test_inductor_keeps_neither_benchmarks_nor_what_it_decided_by_them(tmp_path: Path) -> None:
    result = run(PRODUCT, tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))

    assert result.stdout == "False\n"
    assert "triton_mm" in result.stderr
    kept = {path.relative_to(tmp_path / "inductor").parts[0] for path in (tmp_path / "inductor").rglob("*")}
    assert kept & {"cache", "fxgraph", "aotautograd"} == set()
    assert list(tmp_path.rglob("*.best_config")) == []


L2NORM = """
import torch
from fla.modules.l2norm import l2norm_fwd
from fla.utils import FLA_CACHE_RESULTS
y, _ = l2norm_fwd(torch.empty(64, 128, device="cuda", dtype=torch.bfloat16))
torch.cuda.synchronize()
print(FLA_CACHE_RESULTS, list(y.shape))
"""


@pytest.mark.slow
def test_fla_with_its_own_defaults_keeps_no_timing(tmp_path: Path) -> None:
    pytest.importorskip("fla")

    # fla's default is "1"; set again behind the launcher's back it must not matter.
    result = run(L2NORM, tmp_path, FLA_CACHE_RESULTS="1")

    assert result.stdout == "True [64, 128]\n"
    assert list((tmp_path / "cache").rglob("*.cubin")) != []
    assert list(tmp_path.rglob("*.autotune.json")) == []
