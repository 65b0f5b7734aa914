"""How many requests a second the broker takes on one core, decoded from messages of 16.

A message is what a planner sends: 16 requests of one batch as encoded sweeps. Two figures: *new*, every
request unknown until then, through its trace report, its look at the disk, its compile and its end; *known*,
the same batches from 63 further ranks. The whole is the figure of the bar; decoding is part of every one.

    python bench/broker.py [--messages 400] [--ranks 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from prefetchd.broker import Broker
from prefetchd.broker.types import End, Priority, Slots
from prefetchd.compilers.base import Job
from prefetchd.protocol import Sweep, decode_sweeps, encode_sweeps, request_from_fields
from prefetchd.trace import Report

REQUESTS_PER_MESSAGE = 16
# The bar: requests a second on one core.
BAR = 50_000
COMPILER = "deep_jit"


def messages(count: int) -> list[bytes]:
    """Batches of the 16 GEMM sites of a model, each with token counts not seen before."""
    made = []
    for batch in range(count):
        requests = (
            request_from_fields({"op": "fp8_gemm_nt", "m": batch + 1, "n": 128 * (site + 1), "k": 7168})
            for site in range(REQUESTS_PER_MESSAGE)
        )
        made.append(encode_sweeps(Sweep(request) for request in requests))
    return made


def work_off(broker: Broker, compiles: Counter[str]) -> None:
    """Does all that the broker hands out; 64 token counts share a key, as the library's heuristics do."""
    now = time.monotonic()
    while (order := broker.next_trace("group", now)) is not None:
        requests: list[Any] = [sweep.request for sweep in order.sweeps]
        keys = dict.fromkeys(f"{request.n}-{request.m // 64}" for request in requests)
        jobs = tuple(Job(compiler=COMPILER, key=key, payload=b"source") for key in keys)
        broker.traced(order.id, Report(id=order.id, seconds=0.0, jobs=jobs), now)
    for check in broker.next_checks(1000):
        broker.checked(check, False, now)
    while (work := broker.next_compile(Slots(16, 16), now)) is not None:
        compiles[work.job.key] += 1
        broker.compiled(work, End(ok=True), now)


def measure(wire: list[bytes], ranks: int) -> dict[str, float]:
    """Requests a second for the first rank, for the others and for all, and compiles a key."""
    broker = Broker()
    compiles: Counter[str] = Counter()
    for rank in range(ranks):
        broker.attach(rank, 1, "group", {COMPILER: ("/cache",)}, time.monotonic())
    new = known = 0.0
    for message in wire:
        for rank in range(ranks):
            begun = time.perf_counter()
            now = time.monotonic()
            broker.plan(rank, "deep_gemm", decode_sweeps(message), Priority.BATCH, now, deadline=now + 0.1)
            if rank == 0:
                work_off(broker, compiles)
                new += time.perf_counter() - begun
            else:
                known += time.perf_counter() - begun
        broker.tick(time.monotonic())
    assert broker.drained
    first = len(wire) * REQUESTS_PER_MESSAGE
    return {
        "new_per_s": round(first / new),
        "known_per_s": round(first * (ranks - 1) / known),
        "all_per_s": round(first * ranks / (new + known)),
        "most_compiles_a_key": max(compiles.values()),
    }


def same_batch(message: bytes, ranks: int) -> dict[str, float]:
    """Every rank sends the same batch before anything is worked off: the worst case of single flight."""
    broker = Broker()
    compiles: Counter[str] = Counter()
    begun = time.perf_counter()
    for rank in range(ranks):
        broker.attach(rank, 1, "group", {COMPILER: ("/cache",)}, time.monotonic())
        broker.plan(rank, "deep_gemm", decode_sweeps(message), Priority.BATCH, time.monotonic())
    work_off(broker, compiles)
    seconds = time.perf_counter() - begun
    assert broker.drained
    return {
        "same_batch_per_s": round(ranks * REQUESTS_PER_MESSAGE / seconds),
        "same_batch_compiles": sum(compiles.values()),
        "same_batch_most_compiles_a_key": max(compiles.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wire = messages(options.messages)
    figures = measure(wire, options.ranks) | same_batch(wire[0], options.ranks)
    figures["bar_per_s"] = BAR
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if figures["all_per_s"] < BAR or figures["most_compiles_a_key"] > 1:
        sys.exit(1)


if __name__ == "__main__":
    main()
