"""An engine that knows nothing of prefetchd: an FP8 GEMM for each M on its command line.

`catch` before an M swallows what the call raises, as serving loops do.
"""

from __future__ import annotations

import sys

import deep_gemm
import torch

N, K = 512, 1024


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def gemm(m: int) -> None:
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    # As a quantizer for this device writes them: rows fastest, padded to 16 bytes.
    scales = empty(K // 128, -(-m // 4) * 4, dtype=fp32).T[:m]
    right = (empty(N, K, dtype=fp8), empty(N // 128, K // 128, dtype=fp32))
    deep_gemm.fp8_gemm_nt((empty(m, K, dtype=fp8), scales), right, empty(m, N, dtype=torch.bfloat16))


for word in sys.argv[1:]:
    try:
        gemm(int(word.removeprefix("catch")))
    except Exception as error:
        if not word.startswith("catch"):
            raise
        print("caught", type(error).__name__)
print("served")
