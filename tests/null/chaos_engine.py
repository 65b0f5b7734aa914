"""An engine for tests of the daemon's failures: a scheduler that steps on a timer and tells prefetchd.

Usage: chaos_engine.py BOARD SEED. Each line on standard input names a profile to serve from then on. How long
each `on_schedule` took goes into a file that this process and the test share, where it outlives any end.
"""

from __future__ import annotations

import mmap
import os
import random
import select
import struct
import sys
import time
from pathlib import Path

from prefetchd import attach
from prefetchd.attaching import Handle
from prefetchd.protocol import Batch
from prefetchd.targets import load_target

# A decoding engine's step takes milliseconds.
STEP_S = 0.001
# The largest batch: with it a profile of one site has a handful of variants.
MAX_TOKENS = 24
# The client's figures are shown after so many steps.
STEPS_A_LOOK = 20
# The board: steps since the start, profiles so far, plans not settled, connected, plans let go, defects of
# ours, steps since the last profile; then the nanoseconds of each step, the oldest overwritten.
HEAD = struct.Struct("=7Q")
SAMPLE = struct.Struct("=I")
SAMPLES = 1 << 20
BOARD_BYTES = HEAD.size + SAMPLES * SAMPLE.size


def batch(chance: random.Random) -> Batch:
    """Any number of prefills and decodes within the largest batch."""
    total = chance.randint(1, MAX_TOKENS)
    prefills, left = [], total
    for _ in range(chance.randint(0, 4)):
        length = chance.randint(1, max(1, left // 2))
        if length < left:
            prefills.append(length)
            left -= length
    return Batch(tokens=total, prefill_lengths=tuple(prefills), decodes=left)


def attached(profile: str) -> Handle:
    handle = attach(profile, engine="chaos", target=load_target("h200"), max_tokens=MAX_TOKENS)
    if not handle.attached:
        sys.exit(handle.reason)
    return handle


def serve(board: mmap.mmap, chance: random.Random) -> None:
    handle: Handle | None = None
    steps = profiles = since = 0
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            if handle is not None:
                handle.close()
            handle, profiles, since = attached(line.strip()), profiles + 1, 0
        if handle is None:
            time.sleep(STEP_S)
            continue
        step = batch(chance)
        begun = time.perf_counter_ns()
        handle.on_schedule(step)
        taken = time.perf_counter_ns() - begun
        SAMPLE.pack_into(board, HEAD.size + steps % SAMPLES * SAMPLE.size, min(taken, 2**32 - 1))
        steps, since = steps + 1, since + 1
        if steps % STEPS_A_LOOK == 0:
            client = handle.client
            assert client is not None
            figures = client.stats()
            HEAD.pack_into(
                board, 0, steps, profiles, figures["wanted"], figures.get("connected", 0),
                figures["forgotten"], figures["errors"], since,
            )  # fmt: skip
        time.sleep(STEP_S)


def main(path: str, seed: str) -> None:
    file = os.open(Path(path), os.O_RDWR)
    serve(mmap.mmap(file, BOARD_BYTES), random.Random(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])
