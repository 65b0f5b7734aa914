"""Kills one part of a living node after another and looks at what is left; `make chaos` does it for long.

A real daemon with its real helper traces a real library; the compiles are real processes of nvcc in some
rounds and of the fast nvcc in the others; an engine steps beside them. Each round has kernels that no round
before it had, loses one process by SIGKILL at a random moment, gets back what a supervisor would restart
(daemon and engine, never a helper or a compile), and ends when everything that was asked for is settled. The
subtle rule: the last word has the library itself, which must find every round's kernels while it cannot
compile.

    python tests/null/chaos.py [--rounds 100] [--seed 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import zmq
from chaos_world import SETTLED_S, World, shapes, world_of
from warming import ROOT, TIME_LIMIT_S

sys.path.append(str(ROOT / "bench"))
from live_daemon import Failed

from prefetchd.protocol import Hello, Plan, Settled, Sweep, Welcome, decode, encode, encode_sweeps
from prefetchd.requests.deep_gemm import Fp8GemmNt
from prefetchd.targets import load_target

VICTIMS = ("helper", "compile", "daemon", "engine")
# The victim is looked for so long: the first compile of a round comes after its helper's start.
VICTIM_S = 20.0
# The moment of the kill within a round.
KILL_WITHIN_S = 1.5
# One round in so many has nvcc itself compile.
REAL_EVERY = 20
# The bar of the acceptance, and what a loaded machine of a test run must still keep.
BAR_US = 100.0
CLIENTS = 1000


def play_round(world: World, kind: str, real: bool) -> dict[str, Any]:
    """One round with one victim."""
    assert world.engine is not None
    before = world.engine.steps
    profile = world.new_profile(real)
    world.engine.serve(profile)
    moment = world.chance.uniform(0, KILL_WITHIN_S)
    if kind == "compile":
        # A compile can only be lost while there are any.
        world.daemon.wait_for(lambda: world.victim(kind), VICTIM_S, "no compile begins")
    time.sleep(moment)
    pid = world.victim(kind)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if kind == "daemon":
        world.daemon.kill()
        time.sleep(world.chance.uniform(0, 0.5))
        world.daemon.start()
    elif kind == "engine":
        before = 0
        world.start_engine()
        world.engine.serve(profile)
    found = world.settle()
    return {
        "victim": kind,
        "killed": pid is not None,
        "after_s": round(moment, 3),
        "nvcc": "real" if real else "fast",
        **found,
        "on_schedule_p99_us": p99_us(world.engine.samples(before)),
    }


def stopped_daemon(world: World, seconds: float) -> dict[str, Any]:
    """The daemon stands still while the engine wants new kernels, and goes on."""
    assert world.engine is not None
    before = world.engine.steps
    os.kill(world.daemon.pid, signal.SIGSTOP)
    world.engine.serve(world.new_profile())
    time.sleep(seconds)
    during = p99_us(world.engine.samples(before))
    os.kill(world.daemon.pid, signal.SIGCONT)
    return {"stopped_s": seconds, **world.settle(), "on_schedule_p99_us": during}


def full_disk(world: World) -> dict[str, Any]:
    """The cache's disk has no room while new kernels are wanted, and then has."""
    assert world.engine is not None
    before, filler = world.engine.steps, world.cache / "filler"
    failures = "prefetchd_compiles_total{result=failed}"
    had = world.daemon.stats().figures.get(failures, 0)
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x")
    world.engine.serve(world.new_profile())
    world.daemon.wait_for(
        lambda: world.daemon.stats().figures.get(failures, 0) > had,
        SETTLED_S,
        "no compile fails on a full disk",
    )
    filler.unlink()
    return {**world.settle(), "on_schedule_p99_us": p99_us(world.engine.samples(before))}


def many_clients(world: World, count: int) -> dict[str, Any]:
    """Ranks of one engine, all at once, that want the same kernels."""
    assert world.engine is not None
    compiled = "prefetchd_compiles_total{result=compiled}"
    had = world.daemon.stats().figures.get(compiled, 0)
    before, begun = world.engine.steps, time.monotonic()
    chosen = shapes(world.rounds)
    world.rounds += 1
    # Asked for as single requests, without a universe.
    world.shapes += [(*shape, 1) for shape in chosen]
    wanted = [Sweep(Fp8GemmNt(m=1, n=n, k=k, compiled_dims="nk")) for n, k in chosen]
    plan = encode(Plan(id=1, requests={"deep_gemm": encode_sweeps(wanted)}))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * count)
    sockets = [context.socket(zmq.DEALER) for _ in range(count)]
    try:
        for rank, socket in enumerate(sockets):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(world.daemon.address)
            socket.send(encode(Hello(
                engine="crowd", pid=os.getpid(), generation=f"g{rank}", rank=rank, world=count,
                target=load_target("h200"), cache_roots={"deep_jit": (str(world.cache),)},
            )))  # fmt: skip
        for socket in sockets:
            _next(socket, Welcome)
        welcomed = time.monotonic() - begun
        for socket in sockets:
            socket.send(plan)
        for socket in sockets:
            _next(socket, Settled)
        settled = time.monotonic() - begun
        figures = world.daemon.stats().figures
    finally:
        for socket in sockets:
            socket.close()
        context.term()
    if figures[compiled] - had > len(wanted):
        raise Failed(
            f"{count} ranks caused {figures[compiled] - had} compiles of at most {len(wanted)} kernels"
        )
    return {
        "clients": count, "ranks": figures["prefetchd_ranks"], "welcomed_s": round(welcomed, 2),
        "settled_all_s": round(settled, 2), "compiles": figures[compiled] - had, **world.settle(),
        "on_schedule_p99_us": p99_us(world.engine.samples(before)),
    }  # fmt: skip


def _next(socket: zmq.Socket[bytes], kind: type) -> None:
    while True:
        if not socket.poll(int(SETTLED_S * 1000)):
            raise Failed(f"a client waits for {kind.__name__} in vain")
        if isinstance(decode(socket.recv()), kind):
            return


def library_finds_everything(world: World) -> int:
    """The library serves every kernel of every round while nvcc fails; how many calls that were."""
    world.nvcc.behave("exit 1")
    shapes, result = world.place / "shapes.json", world.place / "result.json"
    shapes.write_text(json.dumps(world.shapes))
    script = Path(__file__).with_name("chaos_library.py")
    null = [sys.executable, "-m", "prefetchd", "null", "--target", "h200", "--"]
    done = subprocess.run(
        [*null, sys.executable, str(script), str(shapes), str(result)], env=world.daemon.environment,
        capture_output=True, text=True, timeout=10 * TIME_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"the library's process ended with {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(result.read_text())
    if found["failed"]:
        raise Failed(
            f"{len(found['failed'])} of {found['calls']} calls found no kernel: {found['failed'][:3]}"
        )
    return int(found["calls"])


def p99_us(samples: list[int]) -> float:
    """In microseconds."""
    return round(sorted(samples)[int(len(samples) * 0.99)] / 1000, 1) if samples else 0.0


def run(rounds: int, seed: int, stopped_s: float, show: Callable[[str], None]) -> dict[str, Any]:
    """All of it. Raises `Failed` at the first thing that is not as it must be."""
    load = os.getloadavg()
    begun = time.monotonic()
    played: list[dict[str, Any]] = []
    with world_of(seed) as world:
        kinds = [VICTIMS[number % len(VICTIMS)] for number in range(rounds)]
        world.chance.shuffle(kinds)
        for number, kind in enumerate(kinds):
            played.append(play_round(world, kind, real=number % REAL_EVERY == 1))
            show(f"round {number + 1}: {played[-1]}")
        phases = {
            "stopped_daemon": lambda: stopped_daemon(world, stopped_s),
            "full_disk": lambda: full_disk(world),
            "many_clients": lambda: many_clients(world, CLIENTS),
        }
        special = {}
        for name, phase in phases.items():
            special[name] = phase()
            show(f"{name}: {special[name]}")
        world.start_engine()
        samples = world.samples
        status = world.daemon.stop()
        calls = library_finds_everything(world)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "seed": seed,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": {"begin": load, "end": os.getloadavg()},
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "rounds": len(played),
        "killed": {kind: sum(r["killed"] for r in played if r["victim"] == kind) for kind in VICTIMS},
        "longest": {name: max(r[name] for r in played) for name in ("orphans_gone_s", "settled_s")},
        "library_calls_served_without_compiling": calls,
        "daemon_exit_status": status,
        "on_schedule": {
            "calls": len(samples), "p50_us": round(sorted(samples)[len(samples) // 2] / 1000, 1),
            "p99_us": p99_us(samples), "max_us": round(max(samples) / 1000, 1), "bar_p99_us": BAR_US,
        },
        **special,
        "each_round": played,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stopped", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    def show(line: str) -> None:
        print(line, flush=True)

    try:
        found = run(arguments.rounds, arguments.seed, arguments.stopped, show)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    text = json.dumps(found, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "each_round"}, indent=1))
    return 0 if found["on_schedule"]["p99_us"] <= BAR_US else 1


if __name__ == "__main__":
    sys.exit(main())
