"""An observed engine in miniature, on the null device: makes the calls it is told and says how they went.

Usage: replay_engine.py RESULT CALL..., where a call is `fp8:m,n,k`, `bf16:m,n,k`, `tuned`, or the name of one
of `observed_calls`. With --forbid Triton compiles nothing; nvcc is whatever the environment says. With
--measure the process passes for one with a device, and its tuners keep what they count. The result is one
JSON object: what failed, and what the observer counted.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefetchd.null_device.launcher import KEEP_NO_TIMINGS
from prefetchd.observing import watch


def empty(*shape: int, dtype: str) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")


def fp8(m: int, n: int, k: int) -> None:
    import deep_gemm

    a, b = empty(m, k, dtype="float8_e4m3fn"), empty(n, k, dtype="float8_e4m3fn")
    rows = empty(m, k // 128, dtype="float32")
    weights = empty(-(-n // 128), k // 128, dtype="float32")
    deep_gemm.fp8_gemm_nt((a, rows), (b, weights), empty(m, n, dtype="bfloat16"))


def bf16(m: int, n: int, k: int) -> None:
    import deep_gemm

    a, b = empty(m, k, dtype="bfloat16"), empty(n, k, dtype="bfloat16")
    deep_gemm.bf16_gemm_nt(a, b, empty(m, n, dtype="bfloat16"))


def call(text: str) -> Callable[[], None]:
    name, _, shape = text.partition(":")
    if shape:
        numbers = [int(each) for each in shape.split(",")]
        return lambda: {"fp8": fp8, "bf16": bf16}[name](*numbers)
    if name == "tuned":
        from winners_kernels import run_kept

        return run_kept
    from observed_calls import named

    return named(name)


def measure() -> None:
    for name in KEEP_NO_TIMINGS:
        os.environ.pop(name, None)
    from observed_engine import measure_as_an_engine

    measure_as_an_engine()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("calls", nargs="+")
    parser.add_argument("--forbid", action="store_true")
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    if arguments.measure:
        measure()
    seen = watch.begin(os.environ)
    assert seen is not None
    if arguments.forbid and not all(":" in text for text in arguments.calls):
        from observed_engine import forbid_compiling

        forbid_compiling()
    failed = []
    for text in arguments.calls:
        try:
            call(text)()
        except Exception as error:
            failed.append(f"{text}: {str(error)[:300]}")
    seen.close()
    arguments.result.write_text(json.dumps({"failed": failed, "figures": seen.observer.figures()}))


if __name__ == "__main__":
    main()
