"""TensorRT-LLM's KDA prefill through its own home: aligned and ragged, and the engine's pool of states."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass.cute")

from prefetchd.null_device import launcher
from prefetchd.targets import load_target

HERE = Path(__file__).parent
PREFETCHD = Path(sys.executable).with_name("prefetchd")
LIMIT_S = 300
PROFILE = """\
version = 1
model = "trt"
architecture = "test"
tp = 1
ep = 1
dp = 1
quantization = "bf16"
context_tokens = 1

[[kernels]]
name = "prefill"
op = "chunk_kda"
home = "tensorrt_llm"
sizes = { heads = 2, key_dim = 128, value_dim = 128 }

[kernels.flags]
lengths = ["aligned", "ragged"]
sequences = 2
initial_state = true
state_v_first = true
gate_in_kernel = true
beta_sigmoid = true
pool = 23
"""


def environment(place: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "PYTHONPATH": f"{HERE / 'trt_llm'}:{HERE}",
    }


def engine(place: Path, slots: int, *lengths: str) -> subprocess.CompletedProcess[str]:
    child = launcher.environment(load_target("b200"), environment(place), integer_ops=True)
    script = str(HERE / "cute_trt_process.py")
    return subprocess.run(
        [sys.executable, script, "--target", "b200", "--slots", str(slots), *lengths], env=child, cwd=place,
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.ci
def test_prefills_are_served_aligned_and_ragged_for_the_pool_that_the_engine_has(tmp_path: Path) -> None:
    profile = tmp_path / "trt.profile.toml"
    profile.write_text(PROFILE)
    where = ("--target", "b200", "--profile", str(profile), "--provider", "kda_cute", "--max-tokens", "256")

    done = subprocess.run(
        [str(PREFETCHD), "warm", *where, "--json"], env=environment(tmp_path), cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    served = engine(tmp_path, 23, "1024,512", "100,30,7", "777")
    other_pool = engine(tmp_path, 24, "1024,512")

    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    figures: dict[str, Any] = json.loads(done.stdout)["providers"]["kda_cute"]
    # The fused stage in both variants, the two behind it in one each.
    assert (figures["compiled"], figures["uncovered"], figures["failed"]) == (4, 0, 0)
    assert served.returncode == 0, served.stderr
    assert json.loads(served.stdout.splitlines()[-1]) == {"hit": 4}
    # The pool's size is in the last stage's key: without the engine's own it would be compiled in vain.
    assert "may not compile" in other_pool.stderr
