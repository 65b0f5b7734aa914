"""KDA and the gated delta rule on the null device: which keys their requests ask for, compiling nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from prefetchd.null_device.launcher import environment
from prefetchd.targets import load_target

pytest.importorskip("triton")

if find_spec("fla") is None:
    pytest.skip("fla-core is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("delta_keys.py")

FAKE_ENGINE = '''
CALLS = []

def show(arguments):
    """Tensors as shape, strides, type and the address modulo 16; everything else as it is."""
    return {name: describe(value) for name, value in arguments.items() if value is not None}

def describe(value):
    if hasattr(value, "stride"):
        shape, strides = list(value.shape), list(value.stride())
        return [shape, strides, str(value.dtype)[6:], value.data_ptr() % 16]
    return value
'''
FAKE_KDA = """
from . import CALLS, show

def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    CALLS.append(show(locals()))

def fused_recurrent_kda(q, k, v, g, beta, initial_state=None, use_qk_l2norm_in_kernel=True, cu_seqlens=None,
        ssm_state_indices=None, **kwargs):
    CALLS.append(show(locals()))

def fused_sigmoid_gating_delta_rule_update(A_log, a, b, dt_bias, q, k, v, initial_state,
        cu_seqlens, ssm_state_indices, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False):
    CALLS.append(show(locals()))

def fused_kda_gate(g, A, head_k_dim, g_bias=None):
    CALLS.append(show(locals()))

def fused_gdn_gating(A_log, a, b, dt_bias):
    CALLS.append(show(locals()))

def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices=None,
        has_initial_state=None, activation="silu"):
    CALLS.append(show(locals()))

def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None):
    CALLS.append(show(locals()))

def rms_norm_gated(x, g, weight, bias, activation="swish", eps=1e-6):
    CALLS.append(show(locals()))
"""
FAKE_NEWER = """
from . import CALLS, show

def chunk_kda(q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, initial_state=None,
        output_final_state=False, lower_bound=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    CALLS.append(show(locals()))

def fused_recurrent_kda(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens,
        ssm_state_indices, num_accepted_tokens=None, out=None, fuse_gate=None):
    CALLS.append(show(locals()))

def fused_recurrent_kda_packed_decode(mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state,
        state_indices, scale=None, out=None):
    CALLS.append(show(locals()))

def fused_recurrent_gated_delta_rule_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state,
        out, ssm_state_indices, use_qk_l2norm_in_kernel=False):
    CALLS.append(show(locals()))

def kda_state_commit(dst, src, dst_indices_raw, step_indices_raw):
    CALLS.append(show(locals()))
"""
FAKE_NORM = """
from . import CALLS, show

def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, norm_before_gate=True):
    CALLS.append(show(locals()))
"""


def run(scenario: str, folder: Path, target: str = "h200") -> dict[str, Any]:
    found = folder / "found.json"
    base = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), scenario, str(found)],
        env=environment(load_target(target), base, integer_ops=True),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.rglob("*.autotune.json"))
    return json.loads(found.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("target", "base", "buckets", "without_state", "int64", "bf16_gate", "gdn"),
    [("h200", 110, 185, 12, 85, 6, 59), ("b200", 104, 179, 6, 79, 6, None)],
)
def test_measured_counts_of_keys(
    tmp_path: Path,
    target: str,
    base: int,
    buckets: int,
    without_state: int,
    int64: int,
    bf16_gate: int,
    gdn: int | None,
) -> None:
    found = run("counts", tmp_path, target)

    assert (found["base"], found["buckets"]) == (base, buckets)
    assert found["new"]["no initial state"] == without_state
    assert found["new"]["int64 offsets"] == found["new"]["dense"] == found["new"]["chunk 32"] == int64
    assert found["new"]["bf16 gate"] == bf16_gate
    assert found["new"]["q not aligned"] == 25
    # What is none of Triton's business.
    for same in ("offsets on the host", "seven ragged sequences", "one token"):
        assert found["new"][same] == 0
    # A step is one kernel without candidates.
    for one in ("decode", "decode in a pool", "verify", "padded pool", "gdn decode"):
        assert found[one] == 1
    assert gdn in (None, found["gdn"])
    # In the helper's warm parent; the first call of a process takes some of this for itself.
    assert found["seconds"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_random_batches_need_nothing_beyond_the_universe(tmp_path: Path, target: str) -> None:
    found = run("random_batches", tmp_path, target)

    assert {name: result["misses"] for name, result in found.items()} == dict.fromkeys(found, 0)
    assert all(result["met"] > 50 for result in found.values())


def write_engine(folder: Path) -> None:
    package = folder / "fake_engine"
    package.mkdir()
    modules = {"__init__": FAKE_ENGINE, "kda": FAKE_KDA, "newer": FAKE_NEWER, "norm": FAKE_NORM}
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    write_engine(tmp_path)

    found = run("unavailable", tmp_path)

    for name, words in {
        "unknown home": "Unavailable: home 'nowhere' is not known; use one of fla, vllm, sglang",
        "missing home": "Unavailable: home 'no_such_engine.kda' gives no chunk_kda here: ",
        "commit": "Unavailable: home 'fla' has no kda_state_commit",
        "sigmoid gating": "Unavailable: home 'fla' has no fused_sigmoid_gating_delta_rule_update",
        "ignored argument": "Unavailable: chunk_kda of home 'fla' takes no ssm_state_indices",
        "gate outside": "Unavailable: chunk_kda of home 'fake_engine.newer' always does what use_gate",
        "unknown tensor": "ValueError: unaligned: the call has no tensor 'queries'; it has ",
    }.items():
        assert found[name].startswith(words), found[name]


def test_an_engines_own_module_is_called_as_the_engine_does(tmp_path: Path) -> None:
    write_engine(tmp_path)

    found = run("engine", tmp_path)

    state = 128 * 128
    assert found["chunk"]["initial_state"] == [[3, 32, 128, 128], [32 * state, state, 128, 1], "float32", 0]
    assert found["chunk"]["initial_state_indices"] == [[2], [1], "int32", 0]
    assert found["chunk"]["cu_seqlens"] == [[3], [1], "int32", 0]
    assert found["decode"]["initial_state"] == [[4, 32, 128, 128], [1 << 20, state, 128, 1], "float32", 0]
    assert found["decode"]["q"] == [[1, 3, 32, 128], [3 * 4096, 4096, 128, 1], "bfloat16", 2]
    assert found["verify"]["ssm_state_indices"] == [[2, 3], [3, 1], "int32", 0]
    assert found["verify"]["num_accepted_tokens"] == [[2], [1], "int32", 0]
    assert found["verify"]["a"] == [[6, 32], [32, 1], "bfloat16", 0]
    assert found["gate"]["g"] == [[20, 512], [512, 1], "bfloat16", 0]
    assert found["gate"]["A"] == [[1, 1, 4, 1], [4, 4, 1, 1], "float32", 0]
    assert found["gdn gate"]["b"] == [[20, 4], [4, 1], "bfloat16", 0]
    assert found["conv"]["x"] == [[64, 20], [1, 64], "bfloat16", 0]
    assert found["conv"]["conv_states"] == [[2, 64, 3], [192, 1, 64], "bfloat16", 0]
    assert found["conv"]["has_initial_state"] == [[1], [1], "bool", 0]
    assert found["step"]["conv_state_indices"] == [[20], [1], "int32", 0]
    assert found["raw chunk"]["raw_g"] == [[1, 20, 32, 128], [20 * 4096, 4096, 128, 1], "float32", 0]
    assert found["raw chunk"]["g_bias"] == [[4096], [1], "float32", 0]
    assert "use_gate_in_kernel" not in found["raw chunk"].get("kwargs", {})
    assert found["raw step"]["raw_beta"] == [[1, 2, 32], [64, 32, 1], "float32", 0]
    assert found["raw step"]["ssm_state_indices"] == [[2], [1], "int32", 0]
    assert found["packed"]["mixed_qkv"] == [[2, 3 * 4096], [1 << 14, 1], "bfloat16", 0]
    assert found["packed"]["raw_g"] == [[1, 2, 32, 128], [2 * 4096, 4096, 128, 1], "bfloat16", 0]
    assert found["packed gdn"]["a"] == [[2, 32], [32, 1], "bfloat16", 0]
    assert found["packed gdn"]["out"] == [[2, 1, 32, 128], [4096, 4096, 128, 1], "bfloat16", 0]
    assert found["commit"]["src"][0] == [3, 2, 4, 32, 128, 128]
    assert found["commit"]["dst"][0] == [3, 5, 32, 128, 128]
    assert found["norm"]["activation"] == "sigmoid"
    assert found["mamba norm"]["z"] == [[80, 128], [128, 1], "bfloat16", 0]
