"""The library itself, on the null device, calls every kernel of a chaos run; see chaos.py.

Usage: chaos_library.py SHAPES RESULT. SHAPES is JSON: for each kernel N, K and the largest M. N and K are
constants of the kernels, as in the profiles of the rounds, so that no two rounds share one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deep_gemm
from engine import BF16, FP8, empty, row_scales, weight_scales


def gemm(m: int, n: int, k: int) -> None:
    left = empty(FP8, m, k), row_scales(m, k)
    right = empty(FP8, n, k), weight_scales(n, k)
    deep_gemm.fp8_gemm_nt(left, right, empty(BF16, m, n), compiled_dims="nk")


def main(shapes: str, result: str) -> None:
    calls, failed = 0, []
    for n, k, most in json.loads(Path(shapes).read_text()):
        for m in range(1, most + 1):
            calls += 1
            try:
                gemm(m, n, k)
            except RuntimeError as error:
                failed.append(f"{m}x{n}x{k}: {str(error)[:300]}")
    Path(result).write_text(json.dumps({"calls": calls, "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
