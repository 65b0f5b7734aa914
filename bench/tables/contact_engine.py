"""The engine of table 2, in a process of its own: one family's first aligned and first ragged batch.

    python contact_engine.py FAMILY CACHE RESULT [--warm-up]

With a warm-up it first runs what engines run before they serve: many short, aligned, new sequences. Compiles
are the kernels that appear in the cache; benchmarks are counted in the tuner itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tables.counting import triton_kernels
from tables.hybrid import Kda, Mamba
from tables.triton_counting import count_benchmarks

WARM_UP = (128,) * 16
# Whole chunks of 64; and the same number of sequences that are not, as the rest of a long prompt is.
ALIGNED, RAGGED = (256, 64), (203, 58)
TOKENS, SEQUENCES = 2048, 32


def main(family: str, cache: str, result: str, *flags: str) -> None:
    measured = count_benchmarks()
    layer = Kda(TOKENS, SEQUENCES) if family == "kda" else Mamba(TOKENS, SEQUENCES)
    # What any process on a GPU pays once: the context, and torch's own first kernels.
    torch.ones(8, device="cuda").sum().item()

    def timed(lengths: Sequence[int], *, states: bool) -> dict[str, Any]:
        kernels, benchmarks = triton_kernels(Path(cache)), len(measured)
        begun = time.perf_counter()
        with torch.inference_mode():
            layer.prefill(lengths, states=states)
        torch.cuda.synchronize()
        return {
            "seconds": round(time.perf_counter() - begun, 3),
            "compiles": len(triton_kernels(Path(cache)) - kernels),
            "benchmarks": len(measured) - benchmarks,
            "benchmark_s": round(sum(measured[benchmarks:]), 3),
        }

    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    if "--warm-up" in flags:
        found["warm_up"] = timed(WARM_UP, states=False)
    found["aligned"] = timed(ALIGNED, states=True)
    found["ragged"] = timed(RAGGED, states=True)
    found["later_ms"] = round(min(timed(ALIGNED, states=True)["seconds"] for _ in range(5)) * 1e3, 3)
    found["versions"] = {"torch": torch.__version__}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
