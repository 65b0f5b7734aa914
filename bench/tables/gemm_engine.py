"""The engine of table 1, in a process of its own: warm-up if asked, paced traffic, then every M once more.

It calls DeepGEMM as engines do and uses nothing of ours but `attach`, and that only in the live arm. Every
call is synchronised and timed. Traffic is an open loop: a call that comes late because another one stalled is
made as soon as it can be, and the end is a moment of the clock. Prints nothing; its figures go to a file.

    python gemm_engine.py ORDER.json
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prefetchd import attach
from prefetchd.protocol import Batch
from tables.gemm_traffic import SHAPES, WARM_UPS, traffic

# A call that found its kernel takes below a millisecond; below this the raw numbers of the pass say nothing.
NOTABLE_MS = 2.0


class Order(msgspec.Struct, frozen=True):
    """What to do. With `ready` traffic goes on until that file exists, at most `limit_s`."""

    warm_up: str
    seed: int
    rate: float
    seconds: float
    limit_s: float
    most_m: int
    shapes: int
    attach: str
    ready: str
    every_m: bool
    result: str


class Products:
    """One weight and the largest batch for each shape; a call takes its first M rows."""

    def __init__(self, order: Order) -> None:
        import deep_gemm
        import torch

        self.device = torch.cuda.get_device_name()
        self.versions = {"torch": torch.__version__, "deep_gemm": str(getattr(deep_gemm, "__version__", ""))}
        self._call, self._synchronize = deep_gemm.fp8_gemm_nt, torch.cuda.synchronize

        def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, device="cuda").to(dtype)

        fp8, float32 = torch.float8_e4m3fn, torch.float32
        self._tensors = [
            (
                random(order.most_m, k, dtype=fp8),
                # One row after another, as a plain quantizer writes them: the library lays them out itself.
                random(order.most_m, k // 128, dtype=float32),
                (random(n, k, dtype=fp8), random(-(-n // 128), k // 128, dtype=float32)),
                torch.empty(order.most_m, n, device="cuda", dtype=torch.bfloat16),
            )
            for n, k in SHAPES[: order.shapes]
        ]
        torch.cuda.synchronize()

    def __call__(self, shape: int, m: int) -> float:
        """Milliseconds of one product, the device's time included."""
        a, scales, weight, out = self._tensors[shape]
        begun = time.perf_counter()
        self._call((a[:m], scales[:m]), weight, out[:m])
        self._synchronize()
        return (time.perf_counter() - begun) * 1e3


def warm_up(call: Products, order: Order) -> None:
    """The whole list for every shape, as engines do it before they serve."""
    for shape in range(order.shapes):
        for m in WARM_UPS[order.warm_up](order.most_m):
            call(shape, m)


def serve(call: Products, order: Order, announce: Callable[[int], object]) -> list[list[float]]:
    """Paced traffic: for each call when it began, in seconds since the first, and its milliseconds."""
    ready = Path(order.ready) if order.ready else None
    done: list[list[float]] = []
    begun = time.perf_counter()
    for number, (shape, m) in enumerate(traffic(order.seed, order.most_m, order.shapes)):
        now = time.perf_counter() - begun
        over = now > order.seconds and (ready is None or ready.exists())
        if over or now > order.limit_s:
            return done
        time.sleep(max(0.0, number / order.rate - now))
        announce(m)
        at = time.perf_counter() - begun
        done.append([round(at, 3), round(call(shape, m), 3)])
    raise AssertionError("traffic does not end by itself")


def once_more(call: Products, order: Order) -> dict[str, Any]:
    """Every M of every shape; of a notable call also what its thread worked: work is told from waiting."""
    times: list[float] = []
    notable = []
    for shape, m in itertools.product(range(order.shapes), range(1, order.most_m + 1)):
        worked = time.thread_time()
        ms = call(shape, m)
        times.append(ms)
        if ms > NOTABLE_MS:
            notable.append([shape, m, round(ms, 3), round((time.thread_time() - worked) * 1e3, 3)])
    times.sort()
    return {
        "calls": len(times),
        "p50_ms": round(times[len(times) // 2], 3),
        "p99_ms": round(times[int(len(times) * 0.99)], 3),
        "longest_ms": round(times[-1], 3),
        "notable": notable,
    }


def main(path: str) -> None:
    order = msgspec.json.decode(Path(path).read_bytes(), type=Order)
    handle = attach(order.attach, engine="bench", max_tokens=order.most_m) if order.attach else None

    def announce(m: int) -> None:
        if handle is not None:
            handle.on_schedule(Batch(tokens=m, prefill_lengths=(m,)))

    call = Products(order)
    moments = {"loaded": time.time()}
    if order.warm_up:
        warm_up(call, order)
    # As engines do after their start: a full collection of all that torch has made takes some 70 ms.
    gc.collect()
    gc.freeze()
    moments["serving"] = time.time()
    served = serve(call, order, announce)
    moments["served"] = time.time()
    passed = once_more(call, order) if order.every_m else {}
    moments["ended"] = time.time()
    if handle is not None:
        handle.close()
    found = {"device": call.device, "versions": call.versions, "moments": moments}
    found |= {"traffic": served, "every_m": passed, "reason": handle.reason if handle else ""}
    Path(order.result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
