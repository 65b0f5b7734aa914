"""What telling prefetchd about a step costs the scheduler's thread.

Percentiles of `Planner.on_schedule` in microseconds, beside those of a plain look-up of the same batch in a
dictionary, taken in the same loop. Steady: every key of the batch was met before, which is nearly always so
after the first minutes. New: the token count never came before, so the batch goes to the background thread;
daemon absent, stopped by SIGSTOP, or reading nothing with the client's queue full. Between two steps the
thread sleeps, as a scheduler does while the device works; `resumed_late_us` says how late it comes back,
which holds what the background thread takes of the interpreter while it plans.

    python bench/planner.py [--rounds 20000] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from prefetchd.attaching import ORDINARY
from prefetchd.client import Client
from prefetchd.planner import Planner
from prefetchd.profiles import profile_from_config
from prefetchd.protocol import Batch, Event, Heartbeat, Hello, Welcome, decode, encode
from prefetchd.provider import load_providers

MODELS = Path(__file__).parent.parent / "examples/models"
# Steps of a decoding engine take milliseconds; a fraction of one lets the background thread run.
PAUSE_S = 0.0002
# The bars, in microseconds.
BARS = {"steady32": (5.0, 50.0), "steady256": (20.0, None), "new": (None, 100.0)}


def batch_of(prefills: int, decodes: int, chance: random.Random) -> Batch:
    lengths = tuple(chance.randint(1, 8192 // prefills) for _ in range(prefills))
    return Batch(tokens=sum(lengths) + decodes, prefill_lengths=lengths, decodes=decodes)


def percentiles(nanoseconds: list[int]) -> dict[str, float]:
    ordered = sorted(nanoseconds)
    picked = {name: ordered[int(len(ordered) * share)] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {name: round(value / 1000, 2) for name, value in {**picked, "max": ordered[-1]}.items()}


def measured(call: Callable[[Batch], object], batches: Iterator[Batch], rounds: int) -> dict[str, Any]:
    """The call's percentiles, those of a look-up of the same batch, and how late the thread wakes up."""
    ours, plain, late, clock = [], [], [], time.perf_counter_ns
    table: dict[Batch, bool] = {}
    for batch in itertools.islice(batches, rounds):
        table[batch] = True
        begun = clock()
        table.get(batch)
        middle = clock()
        call(batch)
        ours.append(clock() - middle)
        plain.append(middle - begun)
        table.clear()
        begun = clock()
        time.sleep(PAUSE_S)
        late.append(clock() - begun - int(PAUSE_S * 1e9))
    return {
        "on_schedule_us": percentiles(ours),
        "dictionary_us": percentiles(plain),
        "resumed_late_us": percentiles(late),
    }


@contextmanager
def planner_at(address: str, model: str) -> Iterator[tuple[Planner, Client]]:
    profile = profile_from_config(MODELS / f"{model}.json", tp=8)
    providers = {name: one for name, one in load_providers().items() if list(one.plan(ORDINARY, profile))}
    client = Client(address, lambda: Hello(engine="bench", pid=0, generation=""))
    client.start()
    yield Planner(profile, providers, client), client
    client.close()


def steady(address: str, model: str, prefills: int, decodes: int, rounds: int) -> dict[str, Any]:
    """Batches of different lengths that bring nothing new, after their own keys were met once."""
    chance = random.Random(prefills)
    batches = [batch_of(prefills, decodes, chance) for _ in range(200)]
    with planner_at(address, model) as (planner, _):
        for batch in batches:
            planner.on_schedule(batch)
            time.sleep(0.001)
        return measured(planner.on_schedule, itertools.cycle(batches), rounds)


def new(address: str, model: str, rounds: int, prepare: Callable[[Client], None]) -> dict[str, Any]:
    """Every batch has a token count that no other had."""
    batches = (
        Batch(tokens=total, prefill_lengths=(total - 256,), decodes=256) for total in itertools.count(257)
    )
    with planner_at(address, model) as (planner, client):
        prepare(client)
        found = measured(planner.on_schedule, batches, rounds)
        return {**found, "dropped_batches": planner.dropped, "client": dict(client.stats())}


def welcome_one(address: str) -> zmq.Socket[bytes]:
    """A daemon that welcomes everybody until the first heartbeat, and never reads again."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.rcvhwm = 1
    router.bind(address)
    while True:
        peer, frame = router.recv_multipart()
        message = decode(frame)
        if isinstance(message, Hello):
            router.send_multipart([peer, encode(Welcome(instance="bench", pid=os.getpid()))])
        elif isinstance(message, Heartbeat):
            return router


@contextmanager
def other_daemon(address: str, *, stopped: bool) -> Iterator[None]:
    """In a process of its own; `stopped` by SIGSTOP once it has welcomed, otherwise it only stops reading."""
    child = os.fork()
    if child == 0:
        kept = welcome_one(address)
        os.kill(os.getpid(), signal.SIGSTOP) if stopped else signal.pause()
        os._exit(bool(kept))
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def connected(client: Client) -> None:
    deadline = time.monotonic() + 10
    while not client.stats().get("connected"):
        if time.monotonic() > deadline:
            sys.exit("the fake daemon did not welcome")
        time.sleep(0.001)
    # Its heartbeat is what the other side stops at.
    time.sleep(0.2)


def full(client: Client) -> None:
    """Reports until the daemon's buffers and our own queue take no more."""
    connected(client)
    report = Event(what="hit", compiler="triton", request=bytes(4000))
    deadline = time.monotonic() + 30
    while not (client.stats().get("stuck") and not client.event(report)):
        client.event(report)
        if time.monotonic() > deadline:
            sys.exit("the queue does not get full")


def measure(model: str, rounds: int, folder: str) -> dict[str, Any]:
    nowhere, somewhere = f"ipc://{folder}/nowhere", f"ipc://{folder}/daemon"
    found = {
        "steady32": steady(nowhere, model, 32, 256, rounds),
        "steady256": steady(nowhere, model, 256, 256, rounds),
        "new_absent": new(nowhere, model, rounds // 4, lambda client: None),
    }
    with other_daemon(somewhere, stopped=True):
        found["new_stopped"] = new(somewhere, model, rounds // 4, connected)
    with other_daemon(somewhere, stopped=False):
        found["new_full"] = new(somewhere, model, rounds // 4, full)
    return found


def misses(model: str, found: dict[str, Any]) -> list[str]:
    missed = []
    for name, figures in found.items():
        p50, p99 = BARS[name if name in BARS else "new"]
        for which, bar in (("p50", p50), ("p99", p99)):
            value = figures["on_schedule_us"][which]
            if bar is not None and value > bar:
                missed.append(f"{model} {name}: {which} {value} us, bar {bar} us")
    return missed


def main() -> int:
    """Prints the figures as JSON; 1 if a bar was missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--model", action="append")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        for model in arguments.model or ("deepseek-v3", "kimi-linear-48b-a3b", "nemotron-h-8b"):
            found[model] = measure(model, arguments.rounds, folder)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    missed = [line for model, figures in found.items() for line in misses(model, figures)]
    print("\n".join(missed) or "every bar is met", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
