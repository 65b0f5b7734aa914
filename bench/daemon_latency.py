"""From a plan to the published file: how much longer that takes than nvcc alone.

A real daemon and helper, the installed deep_gemm, nvcc itself. Each repetition plans one request whose kernel
nobody had before and takes the time until `Published` comes back; then the very command of that compile, as
the entry records it, runs bare. The two alternate, so that other load meets both; the shortest of each are
shown beside the medians, since load can only lengthen them. The helper is up before: its start is a matter of
the first minute of a node, and reported apart.

    python bench/daemon_latency.py [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq
from live_daemon import Failed, LiveDaemon

from prefetchd.protocol import (
    Hello,
    Message,
    Plan,
    Priority,
    Published,
    Settled,
    Sweep,
    Welcome,
    decode,
    encode,
    encode_sweeps,
)
from prefetchd.requests.deep_gemm import Fp8GemmNt
from prefetchd.targets import load_target

# The bar: this many times the bare compile, and so much more.
BAR_FACTOR, BAR_S = 1.15, 0.050
LIMIT_MS = 180_000


class Rank:
    """An engine's connection."""

    def __init__(self, daemon: LiveDaemon, cache: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(daemon.address)
        self._send(
            Hello(
                engine="bench",
                pid=os.getpid(),
                generation="only",
                target=load_target("h200"),
                cache_roots={"deep_jit": (str(cache),)},
                interpreter=sys.executable,
            )
        )
        self._next(Welcome)

    def planned(self, id: int, n: int) -> tuple[float, float, str]:
        """Seconds until the kernel is published and until all is settled, and the key."""
        request = Fp8GemmNt(m=64, n=n, k=512, compiled_dims="nk")
        requests = {"deep_gemm": encode_sweeps([Sweep(request)])}
        begun = time.perf_counter()
        self._send(Plan(id=id, requests=requests, priority=Priority.BATCH))
        published = self._next(Published)
        seconds = time.perf_counter() - begun
        self._next(Settled)
        assert isinstance(published, Published)
        return seconds, time.perf_counter() - begun, published.key

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
        self._context.term()

    def _send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def _next(self, kind: type[Message]) -> Message:
        while self._socket.poll(LIMIT_MS):
            message = decode(self._socket.recv())
            if isinstance(message, kind):
                return message
        raise Failed(f"no {kind.__name__} came")


def bare(entry: Path, scratch: Path) -> float:
    """Seconds of the entry's own command, with its output elsewhere."""
    command = shlex.split(json.loads((entry / "meta.json").read_text())["command"])
    command[command.index(str(entry / "kernel.cubin"))] = str(scratch / "kernel.cubin")
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, cwd=scratch)
    return time.perf_counter() - begun


def measure(place: Path, rounds: int) -> dict[str, Any]:
    """Both, in turn. Raises `Failed`."""
    cache, scratch = place / "cache", place / "scratch"
    cache.mkdir()
    scratch.mkdir()
    daemon = LiveDaemon(place, {"DG_JIT_CACHE_DIR": str(cache)})
    load = os.getloadavg()
    try:
        daemon.start()
        rank = Rank(daemon, cache)
        # The helper's start, and nvcc from the disk into memory.
        first, _, key = rank.planned(1, 64)
        bare(cache / "cache" / key, scratch)
        pairs = []
        for number in range(rounds):
            ours, settled, key = rank.planned(2 + number, 64 * (2 + number))
            pairs.append((ours, bare(cache / "cache" / key, scratch), settled))
        rank.close()
        daemon.stop()
    finally:
        daemon.close()
    ours, alone = (statistics.median(pair[part] for pair in pairs) for part in (0, 1))
    return {
        "rounds": rounds,
        "plan_to_published_s": [round(pair[0], 3) for pair in pairs],
        "bare_nvcc_s": [round(pair[1], 3) for pair in pairs],
        "settled_after_s": [round(pair[2] - pair[0], 3) for pair in pairs],
        "median_plan_to_published_s": round(ours, 3),
        "median_bare_nvcc_s": round(alone, 3),
        "median_difference_s": round(statistics.median(pair[0] - pair[1] for pair in pairs), 3),
        "shortest_plan_to_published_s": round(min(pair[0] for pair in pairs), 3),
        "shortest_bare_nvcc_s": round(min(pair[1] for pair in pairs), 3),
        "bar_s": round(BAR_FACTOR * alone + BAR_S, 3),
        "first_with_helper_start_s": round(first, 3),
        "load_average": {"begin": load, "end": os.getloadavg()},
    }


def main() -> int:
    """Prints the figures as JSON; 1 if the bar was missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        try:
            found = measure(Path(folder), arguments.rounds)
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if found["median_plan_to_published_s"] <= found["bar_s"] else 1


if __name__ == "__main__":
    sys.exit(main())
