"""A call of the real deep_gemm, made by the provider, is read back as the very request it was made of."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deep_gemm_tracing import LINES, STAND_IN
from test_deep_gemm_ops import DENSE, GROUPED, MASKED, SHAPES

from prefetchd.null_device.launcher import environment
from prefetchd.protocol import request_from_fields, request_to_fields
from prefetchd.targets import load_target

# Ops whose calls are described for people only: their requests say things that a call does not show.
UNREAD = ("mqa_logits", "mega_")
READ = {op: shape for op, shape in SHAPES.items() if not any(part in op for part in UNREAD)}
VARIED: list[dict[str, Any]] = [
    {"op": "fp8_gemm_nt", **DENSE, "scale_layout": "rows"},
    {"op": "fp8_gemm_nt", **DENSE, "m": 66, "scale_layout": "columns"},
    {"op": "fp8_gemm_nt", **DENSE, "m": 1},
    {"op": "fp8_gemm_nt", **DENSE, "scales": "float32", "scale_layout": "rows"},
    {"op": "fp8_gemm_nt", **DENSE, "compiled_dims": "nk"},
    {"op": "fp8_gemm_nt", **DENSE, "output": "float32", "accumulate": True, "weight_block": 1},
    {"op": "fp8_gemm_nt", **DENSE, "sms": 64},
    {"op": "m_grouped_fp8_gemm_nt_contiguous", **GROUPED, "alignment": 64},
    {"op": "m_grouped_bf16_gemm_nt_contiguous", **GROUPED, "compiled_dims": "n"},
    {"op": "m_grouped_fp8_gemm_nt_masked", **MASKED, "scale_layout": "rows"},
    {"op": "einsum", "expr": "bhd,hdr->bhr", "groups": 16, "m": 128, "n": 512, "k": 128},
    {"op": "fp8_einsum", "expr": "bhd,hdr->bhr", "groups": 16, "m": 128, "n": 512, "k": 128},
    {"op": "tf32_hc_prenorm_gemm", "m": 128, "n": 24, "k": 7168, "splits": 16},
]


def read(line: str, target: str, requests: list[dict[str, Any]]) -> list[Any]:
    environ = environment(load_target(target), os.environ) | {
        "DG_JIT_NVCC_COMPILER": str(STAND_IN),
        "PREFETCHD_NVCC_MODE": "capture",
        "PREFETCHD_REAL_NVCC": shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc",
    }
    if (older := LINES[line]) is not None:
        environ["PYTHONPATH"] = f"{older}:{environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("deep_gemm_calls_process.py")],
        input=json.dumps(requests), env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def readable(line: str, target: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The asked request without what a call on this device does not show; it changes nothing there."""
    expected = request_to_fields(request_from_fields(asked))
    if line == "old" and "deterministic" in expected:
        # That package has no such switch.
        expected["deterministic"] = False
    if target == "h200" and expected.get("scales") == "float32":
        expected["scales"] = "auto"
    if target == "b200" and expected.get("scales") == "auto" and "weight_block" in expected:
        # Packed scales are a row each, whatever they were made from.
        expected["weight_block"] = 128
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("line", ["new", "old"])
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_every_call_is_read_back_as_its_request(line: str, target: str) -> None:
    requests = [{"op": op, **shape} for op, shape in READ.items()] + VARIED

    results = read(line, target, requests)

    wrong, known = [], 0
    for asked, found in zip(requests, results, strict=True):
        # The library has no such op for the device, or refuses the shape.
        if isinstance(found, str):
            continue
        known += 1
        if found is None or found != readable(line, target, asked):
            wrong.append((asked, found))
    assert wrong == []
    assert known >= len(requests) / 2
