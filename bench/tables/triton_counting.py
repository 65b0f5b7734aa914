"""Counting the candidates Triton measures and the kernels it compiles, from within its own process.

To be imported before Triton or after it: this imports neither that nor torch.
"""

from __future__ import annotations

import time
from typing import Any


def count_benchmarks() -> list[float]:
    """Grows by the seconds of each candidate that Triton's tuner measures in this process."""
    from triton.runtime.autotuner import Autotuner

    measured: list[float] = []
    original = Autotuner._bench

    def counting(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = original(tuner, *args, **kwargs)
        measured.append(time.perf_counter() - begun)
        return result

    Autotuner._bench = counting
    return measured


def count_compiles() -> list[str]:
    """Grows by the name of each Triton kernel that this process compiles itself; found on disk is none."""
    from triton import knobs

    compiled: list[str] = []
    before = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            compiled.append(str(getattr(src, "name", src)))
        if before is not None:
            before(src=src, cache_hit=cache_hit, **rest)

    knobs.compilation.listener = listen
    return compiled
