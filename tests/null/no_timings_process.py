"""Runs one of fla's tuned kernels with fla's own defaults: traced as a helper does, then as any program does.

Usage: no_timings_process.py TARGET SCRATCH trace|run... After each step it says, as a line of JSON, whether
the tuner asks for its results to be kept and which result files there are below SCRATCH.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from prefetchd.compilers.triton import Triton
from prefetchd.targets import load_target


def call() -> None:
    # The smallest of fla's tuned kernels: four candidates.
    from fla.ops.utils.cumsum import chunk_local_cumsum

    chunk_local_cumsum(torch.empty(1, 64, 2, device="cuda"), chunk_size=64)


def asks_for_results() -> bool:
    from fla.utils import autotune_cache_kwargs

    return bool(autotune_cache_kwargs["cache_results"])


def main(target: str, scratch: Path, steps: list[str]) -> None:
    for number, step in enumerate(steps):
        candidates = 0
        if step == "trace":
            place = scratch / str(number)
            place.mkdir()
            with Triton(load_target(target), dict(os.environ)).capture(place) as capture:
                call()
            candidates = len(capture.jobs())
        else:
            call()
        kept = [path.name for path in scratch.rglob("*.autotune.json")]
        print(json.dumps({"asks": asks_for_results(), "candidates": candidates, "kept": kept}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
