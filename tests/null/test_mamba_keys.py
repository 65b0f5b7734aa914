"""The Mamba2 family on the null device: which keys its requests ask for, with nothing compiled."""

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

if find_spec("mamba_ssm") is None:
    pytest.skip("mamba_ssm is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("mamba_keys.py")
TARGETS = ("h200", "b200")

FAKE_ENGINE = """
import sys
from . import CALLS, show

def mamba_chunk_scan_combined_varlen(x, dt, A, B, C, chunk_size, cu_seqlens, cu_chunk_seqlens,
        last_chunk_indices, seq_idx, out, D=None, z=None, dt_bias=None, initial_states=None,
        dt_softplus=False, state_dtype=None):
    CALLS.append(show(locals()))

def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
        state_batch_indices=None, dst_state_batch_indices=None, out=None):
    CALLS.append(show(locals()))

def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices=None,
        has_initial_state=None, activation="silu", block_size_to_align=0, metadata=None):
    plan = metadata.nums_dict[8]["tot"]
    del metadata
    CALLS.append(show(locals()))

def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None):
    CALLS.append(show(locals()))

def rms_norm_gated(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    CALLS.append(show(locals()))
"""
FAKE_ENGINE_PACKAGE = '''
CALLS = []

def show(arguments):
    """Tensors as shape, strides, type and the address modulo 16; everything else as it is."""
    return {name: describe(value) for name, value in arguments.items() if value is not None}

def describe(value):
    if hasattr(value, "stride"):
        shape, strides = list(value.shape), list(value.stride())
        return [shape, strides, str(value.dtype)[6:], value.data_ptr() % 16]
    return value if isinstance(value, (int, float, str, bool)) else str(value)
'''


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
    compiled = [path for path in (folder / "cache").rglob("*") if path.suffix in (".cubin", ".json")]
    assert compiled == []
    result: dict[str, Any] = json.loads(found.read_text())
    return result


@pytest.fixture(scope="module", params=TARGETS)
def counts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("counts", tmp_path_factory.mktemp("counts"), request.param)


def test_the_counts_of_a_published_model_are_those_measured(counts: dict[str, Any]) -> None:
    assert (counts["base"], counts["seven"]) == (51, 177)
    # One for each class of the count.
    assert (counts["decode"], counts["norm"]) == (3, 3)


def test_other_chunk_sizes_have_lists_of_their_own_that_hit_as_much(counts: dict[str, Any]) -> None:
    assert counts["listed"] == {"64": 177, "128": 177, "256": 177}
    assert counts["seven_equals_listed"]


def test_a_request_is_traced_within_a_second(counts: dict[str, Any]) -> None:
    assert counts["seconds"] < 1


def test_each_field_changes_keys(counts: dict[str, Any]) -> None:
    new = counts["new"]
    assert {name for name, count in new.items() if not count} == set()
    assert (new["initial_states"], new["seq_idx"], new["z"], new["d_dtype"]) == (6, 35, 11, 11)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", pytest.param("b200", marks=pytest.mark.ci)])
def test_random_batches_ask_for_nothing_that_the_listed_requests_do_not(target: str, tmp_path: Path) -> None:
    found = run("random_batches", tmp_path, target)
    assert {name: each["misses"] for name, each in found.items()} == {"wide": 0, "wide-128": 0, "narrow": 0}
    # The batches are various enough to meet most of what is listed.
    assert all(each["met"] > each["listed"] / 2 for each in found.values())


def test_any_number_of_decodes_and_rows_is_covered_by_three(tmp_path: Path) -> None:
    assert run("other_counts", tmp_path) == {"misses": 0, "met": 6}


def test_what_is_not_installed_or_not_in_triton_is_named(tmp_path: Path) -> None:
    reasons = run("unavailable", tmp_path)
    assert "'no_such_engine.ops' (no_such_engine.ops) is not installed here" in reasons["home"]
    assert "'mamba_ssm' (mamba_ssm.ops.triton) has no causal_conv1d.causal_conv1d_fn" in reasons["conv"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine's functions were given, from a package laid out like one."""
    folder = tmp_path_factory.mktemp("engine")
    ops = folder / "fake_engine" / "ops"
    ops.mkdir(parents=True)
    (folder / "fake_engine" / "__init__.py").write_text("raise ImportError('a whole server')\n")
    (ops / "__init__.py").write_text(FAKE_ENGINE_PACKAGE)
    for module in ("ssd_combined", "mamba_ssm", "causal_conv1d", "layernorm_gated"):
        (ops / f"{module}.py").write_text(FAKE_ENGINE)
    found = run("engine", folder)
    names = ("prefill", "cut", "decode", "conv", "update", "norm")
    return {**dict(zip(names, found["given"], strict=True)), "unsized": found["unsized"]}


class TestEngineForm:
    # A row of the projected buffer: z and x of 8192, B and C of 1024 each, dt of 128.
    ROW = 2 * 8192 + 2 * 1024 + 128
    CHANNELS = 8192 + 2 * 1024

    def test_activations_are_columns_of_the_buffers_an_engine_has(self, given: dict[str, Any]) -> None:
        call = given["prefill"]
        assert call["x"] == [[272, 128, 64], [self.CHANNELS, 64, 1], "bfloat16", 0]
        assert call["B"] == [[272, 8, 128], [self.CHANNELS, 128, 1], "bfloat16", 0]
        assert call["dt"] == [[272, 128], [self.ROW, 1], "bfloat16", 0]
        assert call["out"][:2] == [[272, 128, 64], [8192, 64, 1]]

    def test_chunks_are_listed_as_one_sequence_has_them(self, given: dict[str, Any]) -> None:
        call = given["prefill"]
        assert call["cu_chunk_seqlens"][0] == [3]
        assert call["seq_idx"][0] == [2]
        assert call["initial_states"][0] == [1, 128, 64, 128]

    def test_more_chunks_than_the_tokens_need_are_short_sequences(self, given: dict[str, Any]) -> None:
        call = given["cut"]
        assert call["cu_chunk_seqlens"][0] == [17]
        assert call["last_chunk_indices"][0] == [16]
        assert call["x"][0][0] == 17

    def test_a_tensor_named_unaligned_begins_one_element_later(self, given: dict[str, Any]) -> None:
        assert given["cut"]["dt"][3] == 2
        assert given["conv"]["cache_indices"][3] == 4

    def test_the_type_of_the_states_is_told(self, given: dict[str, Any]) -> None:
        assert given["cut"]["state_dtype"] == "torch.float32"
        assert given["cut"]["initial_states"][2] == "float32"

    def test_a_head_s_parameters_are_expanded_views(self, given: dict[str, Any]) -> None:
        call = given["decode"]
        assert call["A"][:2] == [[128, 64, 128], [1, 0, 0]]
        assert call["dt"][:2] == [[3, 128, 64], [self.ROW, 1, 0]]
        assert call["dt_bias"][1] == [1, 0]
        assert call["x"][1] == [self.ROW, 64, 1]
        assert call["state_batch_indices"] == call["dst_state_batch_indices"]

    def test_the_convolution_gets_channels_first_and_its_plan(self, given: dict[str, Any]) -> None:
        call = given["conv"]
        assert call["x"][:2] == [[self.CHANNELS, 20], [1, self.ROW]]
        assert call["conv_states"][:2] == [[8, self.CHANNELS, 3], [3 * self.CHANNELS, 1, self.CHANNELS]]
        assert (call["plan"], call["block_size_to_align"]) == (3, 64)
        assert given["update"]["x"][0] == [3, self.CHANNELS]

    def test_the_norm_is_gated_by_columns_of_the_projected_buffer(self, given: dict[str, Any]) -> None:
        call = given["norm"]
        assert (call["x"][1], call["z"][1], call["group_size"]) == ([8192, 1], [self.ROW, 1], 1024)

    def test_a_cache_of_unknown_size_is_refused_with_what_to_set(self, given: dict[str, Any]) -> None:
        assert "set cache_lines" in given["unsized"]
