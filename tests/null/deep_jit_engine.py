"""Run on the null device: one FP8 GEMM by the installed deep_gemm, as an engine or within capture or forbid.

Arguments: the mode, the target, a scratch directory, M. Prints one JSON object.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import msgspec

from prefetchd.compilers.deep_jit import DeepJit
from prefetchd.targets import load_target

N, K = 512, 1024


def gemm(m: int) -> None:
    import deep_gemm
    import torch

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, device="cuda", dtype=dtype)

    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    left = (empty(m, K, dtype=fp8), empty(m, K // 128, dtype=fp32))
    right = (empty(N, K, dtype=fp8), empty(N // 128, K // 128, dtype=fp32))
    deep_gemm.fp8_gemm_nt(left, right, empty(m, N, dtype=torch.bfloat16))


def main() -> None:
    mode, target, scratch, m = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    compiler = DeepJit(load_target(target), os.environ)
    scratch.mkdir()
    context = {"capture": compiler.capture, "forbid": compiler.forbid}.get(mode)
    raised = ""
    with context(scratch) if context else nullcontext() as capture:
        try:
            gemm(m)
        except RuntimeError as error:
            raised = str(error)
        jobs = capture.jobs() if capture else []
    print(json.dumps({"raised": raised, "jobs": base64.b64encode(msgspec.msgpack.encode(jobs)).decode()}))


main()
