"""An observed engine on a real device: its first calls, how long each takes, and what it compiled itself.

Usage: replay_engine_gpu.py CASE, one of those below. Nothing of ours is in it but the observer, which begins
before any library is imported. Prints one JSON object on the last line; device time is included, since each
call is synchronised.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from prefetchd.observing import watch

# Shapes that no profile in the tests names: several layouts, and one by which scales are laid out anew.
DENSE = ((16, 2112, 7168), (300, 4096, 512), (64, 512, 1024))

Calls = dict[str, Callable[[], Any]]


def deep_gemm() -> Calls:
    import deep_gemm
    import torch

    def fp8(m: int, n: int, k: int) -> None:
        def full(*shape: int, dtype: Any = torch.float32) -> Any:
            return torch.ones(shape, device="cuda").to(dtype)

        a, b = full(m, k, dtype=torch.float8_e4m3fn), full(n, k, dtype=torch.float8_e4m3fn)
        scales = full(m, k // 128), full(-(-n // 128), k // 128)
        deep_gemm.fp8_gemm_nt((a, scales[0]), (b, scales[1]), full(m, n, dtype=torch.bfloat16))

    return {f"fp8 {shape}": (lambda shape=shape: fp8(*shape)) for shape in DENSE}


def tuned(name: str) -> Calls:
    from triton_engine import CASES

    return {name: CASES[name]()}


def main(case: str) -> None:
    seen = watch.begin(os.environ)
    assert seen is not None
    import torch
    from triton_engine import timed

    # What any process on a GPU pays once: the context, and torch's own first kernel.
    torch.ones(8, device="cuda").sum().item()
    calls = deep_gemm() if case == "deep_gemm" else tuned(case)
    first = {name: round(timed(call), 4) for name, call in calls.items()}
    later = {name: round(timed(call) * 1e3, 3) for name, call in calls.items()}
    seen.close()
    answer = {
        "device": torch.cuda.get_device_name(),
        "first_call_s": first,
        "later_call_ms": later,
        "figures": {name: round(value, 3) for name, value in sorted(seen.observer.figures().items())},
        "errors": seen.observer.guard.errors,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
