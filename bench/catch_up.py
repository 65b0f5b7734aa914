"""How long a helper takes to catch up with single planned requests, traced one by one and many at a time.

The requests are those of scheduler steps: each step asks for one token count of every FP8 GEMM site of
DeepSeek-V3 at TP 8. A real helper on the null device traces them with the real library; nothing is compiled.

    python bench/catch_up.py [--requests 500] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from itertools import islice
from pathlib import Path

from prefetchd.broker import Broker
from prefetchd.broker.trace_queue import MAX_BATCH
from prefetchd.broker.types import Priority
from prefetchd.requests.deep_gemm import Fp8GemmNt
from prefetchd.sweeps import Sweep
from prefetchd.targets import load_target
from prefetchd.tracer import Tracer

# N and K of the dense FP8 sites of DeepSeek-V3 at TP 8.
SITES = ((2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (7168, 2304), (512, 7168), (7168, 256))


def planned(count: int) -> list[Sweep]:
    """The requests of as many steps as it takes."""
    chance = random.Random(1)
    steps = (Sweep(Fp8GemmNt(m=m, n=n, k=k)) for m in chance.sample(range(1, 8193), count) for n, k in SITES)
    return list(islice(steps, count))


async def catch_up(tracer: Tracer, sweeps: list[Sweep], max_batch: int) -> dict[str, float]:
    """Seconds until all are traced, and what that came to."""
    broker = Broker(max_batch=max_batch)
    broker.attach("rank", 1, "group", {"deep_jit": ("/nowhere",)}, time.monotonic())
    broker.plan("rank", "deep_gemm", sweeps, Priority.BATCH, time.monotonic())
    begun, orders = time.monotonic(), 0
    while order := broker.next_trace("group", time.monotonic()):
        orders += 1
        report = await tracer.trace_all(order.provider, order.sweeps, "capture")
        broker.traced(order.id, report, time.monotonic())
    stats = broker.stats()
    assert (stats.traced, stats.uncovered) == (len(sweeps), 0), stats.problems
    return {
        "seconds": round(time.monotonic() - begun, 2),
        "orders": orders,
        "variants": stats.known_keys,
    }


async def measure(count: int) -> dict[str, object]:
    """Both ways, by one helper, one trace at a time."""
    sweeps = planned(count)
    async with Tracer(load_target("h200"), ("deep_gemm",), os.environ) as tracer:
        alone = await catch_up(tracer, sweeps, 1)
        together = await catch_up(tracer, sweeps, MAX_BATCH)
    assert alone["variants"] == together["variants"]
    return {
        "requests": count,
        "one_by_one": alone,
        "many_at_a_time": together,
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = json.dumps(asyncio.run(measure(options.requests)), indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
