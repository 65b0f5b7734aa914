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
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import chaos_engine
import zmq
from warming import NEW, ROOT, TIME_LIMIT_S, Nvcc, make_templates, profile_text, site

sys.path.append(str(ROOT / "bench"))
from live_daemon import Failed, LiveDaemon, Process

from prefetchd.compilers import load_compiler
from prefetchd.compilers.base import EntryState
from prefetchd.protocol import Hello, Plan, Settled, Sweep, Welcome, decode, encode, encode_sweeps
from prefetchd.requests.deep_gemm import Fp8GemmNt
from prefetchd.targets import load_target

VICTIMS = ("helper", "compile", "daemon", "engine")
# What must be gone has this long for it: the job runner itself gives a group 2 s before it is killed.
ORPHANS_S = 15.0
# A round that is not settled by then has lost something. A helper takes 3-6 s to start, more when the machine
# is busy, and a failed compile is tried again after 2 and 8 s.
SETTLED_S = 90.0
# The victim is looked for so long: the first compile of a round comes after its helper's start.
VICTIM_S = 20.0
# The moment of the kill within a round.
KILL_WITHIN_S = 1.5
# One compile of the fast nvcc, so that there is something to kill.
COMPILE_S = 0.5
# One round in so many has nvcc itself compile.
REAL_EVERY = 20
# The bar of the acceptance, and what a loaded machine of a test run must still keep.
BAR_US = 100.0
# N and K are constants of the kernels: otherwise two rounds would share theirs.
OPTIONS = '[gemms.options]\ncompiled_dims = "nk"\n'
DISK_BYTES = 64 << 20
CLIENTS = 1000
# Files that take no part: locks and the moved corrupt entries lie beside the owners' directories.
OWNERS = ".prefetchd/owner-*"


def shapes(number: int) -> list[tuple[int, int]]:
    """N and K of a round's sites, which no other round has: its N is its own."""
    return [(64 * (number + 1), 128 * k) for k in (4, 8, 12, 16)]


class Engine:
    """The engine's process, and what is written on its board."""

    def __init__(self, daemon: LiveDaemon, environment: dict[str, str], board: Path, seed: str) -> None:
        board.write_bytes(bytes(chaos_engine.BOARD_BYTES))
        with board.open("r+b") as file:
            self._board = mmap.mmap(file.fileno(), 0)
        self._daemon = daemon
        self._log = (daemon.place / "engine.log").open("ab")
        command = [sys.executable, chaos_engine.__file__, str(board), seed]
        self.process = subprocess.Popen(
            command, env=environment, cwd=daemon.place, stdin=subprocess.PIPE, stdout=self._log,
            stderr=self._log, text=True,
        )  # fmt: skip
        self._served = 0

    def serve(self, profile: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{profile}\n")
        self.process.stdin.flush()
        self._served += 1

    @property
    def head(self) -> tuple[int, ...]:
        return chaos_engine.HEAD.unpack_from(self._board)

    @property
    def steps(self) -> int:
        return self.head[0]

    def is_settled(self) -> bool:
        """It serves the last profile, has stepped through most of its batches, and waits for nothing."""
        if self.process.poll() is not None:
            raise Failed(f"the engine ended: {(self._daemon.place / 'engine.log').read_text()[-2000:]}")
        _, profiles, wanted, connected, *_, since = self.head
        return profiles == self._served and since > 300 and bool(connected) and not wanted

    def samples(self, begin: int = 0) -> list[int]:
        """Nanoseconds of each step from `begin` on."""
        size, start = chaos_engine.SAMPLE.size, chaos_engine.HEAD.size
        numbers = range(max(begin, self.steps - chaos_engine.SAMPLES), self.steps)
        return [
            chaos_engine.SAMPLE.unpack_from(self._board, start + n % chaos_engine.SAMPLES * size)[0]
            for n in numbers
        ]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()
        self._board.close()


class World:
    """One node: daemon, engine, nvcc, cache, and everything that was ever asked for on it."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        self.chance = random.Random(seed)
        self.cache = place / "cache"
        self.cache.mkdir()
        templates = place / "templates"
        templates.mkdir()
        make_templates(templates)
        self.nvcc = Nvcc(place / "nvcc", templates)
        here = self.nvcc.directory
        self.nvcc.behave(f'[ -e {here}/real ] && exec {shutil.which("nvcc")} "$@"\nsleep {COMPILE_S}')
        keys = {"DG_JIT_CACHE_DIR": str(self.cache), "DG_JIT_NVCC_COMPILER": str(self.nvcc.path)}
        self.daemon = LiveDaemon(place, {**keys, "PREFETCHD_JOBS": "2"})
        self.environment = {**self.daemon.environment, "PREFETCHD": "1"}
        self.engine: Engine | None = None
        self.samples: list[int] = []
        # N, K and the largest M of every kernel that was asked for.
        self.shapes: list[tuple[int, int, int]] = []
        self.rounds = 0
        self._compiler = load_compiler("deep_jit", load_target("h200"), self.environment)
        self._judged: set[str] = set()
        self._engines = 0

    def start(self) -> None:
        self.daemon.start()
        self.start_engine()

    def start_engine(self) -> None:
        if self.engine is not None:
            self.samples += self.engine.samples()
            self.engine.close()
        self._engines += 1
        self.engine = Engine(
            self.daemon, self.environment, self.place / "board", f"{self.seed} {self._engines}"
        )

    def new_profile(self, real: bool = False) -> Path:
        """A profile of kernels that were never asked for; few of them where nvcc itself compiles."""
        number = self.rounds
        chosen = shapes(number)[: 1 if real else None]
        text = "".join(
            site(f"round{number}.{part}", n=n, k=k, m="1..2" if real else "tokens") + OPTIONS
            for part, (n, k) in enumerate(chosen)
        )
        self.shapes += [(*shape, 2 if real else chaos_engine.MAX_TOKENS) for shape in chosen]
        self.rounds += 1
        (self.nvcc.directory / "real").touch() if real else (self.nvcc.directory / "real").unlink(True)
        path = self.place / f"round{number}.profile.toml"
        path.write_text(profile_text(text))
        return path

    # Who lives.

    def orphans(self) -> list[Process]:
        """What was started here and belongs to neither the daemon nor the engine of now."""
        assert self.engine is not None
        mine = {self.daemon.pid, self.engine.process.pid}
        family = {process.pid for process in self.daemon.family()} | mine
        return [
            process
            for process in self.daemon.processes()
            if process.pid not in family and process.parent not in family
        ]

    def victim(self, kind: str) -> int | None:
        """A process of this kind that lives now."""
        assert self.engine is not None
        if kind in ("daemon", "engine"):
            return self.daemon.pid if kind == "daemon" else self.engine.process.pid
        family = self.daemon.family()
        helpers = [each.pid for each in family if "prefetchd.helper" in each.command]
        if kind == "helper":
            # Its traces look like it, and are its children.
            return next(
                (each.pid for each in family if each.pid in helpers and each.parent == self.daemon.pid), None
            )
        compiles = [
            each.pid for each in family if "/job_runner " in each.command or "kernel.cu" in each.command
        ]
        return self.chance.choice(compiles) if compiles else None

    # What is on disk.

    def bad_entries(self) -> list[str]:
        """Entries that an engine would believe or die of."""
        found = []
        for entry in self.cache.glob("cache/*"):
            if entry.name in self._judged:
                continue
            whole = {path.name for path in entry.iterdir()} == set(NEW.files)
            if not whole or self._compiler.state(entry.name, self.cache) is not EntryState.PUBLISHED:
                found.append(entry.name)
            self._judged.add(entry.name)
        return found

    def left_by_the_dead(self) -> list[str]:
        """Working places of a process that is not the daemon of now."""
        places = [*self.cache.glob(OWNERS), *self.daemon.temporary.glob(f"prefetchd-*/{OWNERS}")]
        return [str(path) for path in places if path.name.split("-")[1] != str(self.daemon.pid)]

    def unfinished(self) -> list[str]:
        """What lies in a working place although nothing is being made."""
        return [str(path) for path in self.cache.glob(f"{OWNERS}/*") if path.name != "lock"]

    def strays(self) -> list[str]:
        """Temporary files outside the working places."""
        return [
            path.name for path in self.daemon.temporary.iterdir() if not path.name.startswith("prefetchd-")
        ]

    # What must come true.

    def settle(self) -> dict[str, Any]:
        """Waits for the end of all that was asked for, and judges it. Raises `Failed`."""
        assert self.engine is not None
        begun = time.monotonic()
        self.daemon.wait_for(lambda: not self.orphans(), ORPHANS_S, f"orphans live: {self.orphans()}")
        no_orphans = time.monotonic() - begun
        self.daemon.wait_for(self.is_drained, SETTLED_S, "what was asked for is not settled")
        settled = time.monotonic() - begun
        figures = self.daemon.stats().figures
        known = len(self._judged)
        bad = self.bad_entries()
        if len(self._judged) == known:
            raise Failed(f"settled, and nothing new was published: {self.daemon.tail()}")
        found = {
            "published": len(self._judged) - known,
            "orphans_gone_s": round(no_orphans, 2),
            "settled_s": round(settled, 2),
            "failed_keys": figures.get("prefetchd_keys{state=failed}", 0),
            "bad_entries": bad,
            "left_by_the_dead": self.left_by_the_dead(),
            "unfinished": self.unfinished(),
            "strays": self.strays(),
            "client_errors": self.engine.head[5],
            "plans_let_go": self.engine.head[4],
        }
        wrong = {
            name: value
            for name, value in found.items()
            if value and not name.endswith("_s") and name != "published"
        }
        if wrong:
            raise Failed(f"{wrong}: {self.daemon.tail()}")
        return found

    def is_drained(self) -> bool:
        assert self.engine is not None
        return self.engine.is_settled() and self.daemon.page("/ready")[0] == 200

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.daemon.close()
        # Only what a failed run has left behind: a run that succeeds has shown that there is nothing.
        for process in self.daemon.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


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


@contextlib.contextmanager
def world_of(seed: int) -> Iterator[World]:
    """Its cache is a small disk of its own."""
    place = Path(tempfile.mkdtemp(prefix="ch"))
    place.chmod(0o755)
    world = World(place, seed)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0755", "tmpfs", world.cache], check=True
    )
    try:
        world.start()
        yield world
    finally:
        world.close()
        subprocess.run(["umount", "--lazy", world.cache], check=True)
        shutil.rmtree(place, ignore_errors=True)


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
