"""The node that `chaos.py` kills parts of: its processes and files, and what must come true of them.

The subtle rule: whatever was started here carries a mark in its environment (`LiveDaemon`), so that what has
lost its parent is found all the same.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos_engine
from warming import NEW, ROOT, Nvcc, make_templates, profile_text, site

sys.path.append(str(ROOT / "bench"))
from live_daemon import Failed, LiveDaemon, Process

from prefetchd.compilers import load_compiler
from prefetchd.compilers.base import EntryState
from prefetchd.targets import load_target

# What must be gone has this long for it: the job runner itself gives a group 2 s before it is killed.
ORPHANS_S = 15.0
# A round that is not settled by then has lost something. A helper takes 3-6 s to start, more when the machine
# is busy, and a failed compile is tried again after 2 and 8 s.
SETTLED_S = 90.0
# One compile of the fast nvcc, so that there is something to kill.
COMPILE_S = 0.5
# N and K are constants of the kernels: otherwise two rounds would share theirs.
OPTIONS = '[gemms.options]\ncompiled_dims = "nk"\n'
DISK_BYTES = 64 << 20
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
