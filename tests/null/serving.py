"""What the tests of the daemon share: the real `prefetchd serve`, and engines that speak to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from warming import PREFETCHD, TIME_LIMIT_S, Bench

from prefetchd.client.__init__ import Client
from prefetchd.introduction import Introduction
from prefetchd.profiles import read_profile
from prefetchd.profiles.codec import encode_profile
from prefetchd.protocol import Hello, Priority, Universe
from prefetchd.provider import Limits, load_providers
from prefetchd.sweeps import expand
from prefetchd.targets import load_target


class Served:
    """A running daemon in a bench."""

    def __init__(self, bench: Bench, changes: Mapping[str, str | None] = {}) -> None:
        self.bench = bench
        self.address = f"ipc://{bench.place}/run/daemon"
        self._changes = {
            "PREFETCHD_ENDPOINT": self.address,
            "PREFETCHD_METRICS": "off",
            "PREFETCHD_JOBS": "2",
            **changes,
        }
        self.process = self.start()

    def environment(self) -> dict[str, str]:
        return self.bench.environment(self._changes)

    def start(self) -> subprocess.Popen[str]:
        log = (self.bench.place / "daemon.log").open("a")
        self.process = subprocess.Popen(
            [str(PREFETCHD), "serve", "--verbose"], env=self.environment(), cwd=self.bench.place, text=True,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()
        self.until(lambda: self.command("stats", "--json").returncode == 0)
        return self.process

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(PREFETCHD), *arguments], env=self.environment(), cwd=self.bench.place, text=True,
            capture_output=True, timeout=TIME_LIMIT_S, check=False,
        )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        done = self.command("stats", "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def figure(self, name: str) -> float:
        return float(self.stats()["figures"].get(f"prefetchd_{name}", 0))

    def helper(self) -> dict[str, Any]:
        (found,) = self.stats()["tables"]["helpers"]
        return dict(found)

    def until(self, condition: Callable[[], object]) -> None:
        """Looks again and again; fails with the daemon's log."""
        deadline = time.monotonic() + TIME_LIMIT_S
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"it never came: {self.log()}")
            time.sleep(0.02)

    def log(self) -> str:
        return (self.bench.place / "daemon.log").read_text()

    def family(self) -> list[psutil.Process]:
        """Every live process of this daemon's bench: what it has started, and what they have."""
        mark = str(self.bench.place)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE or process.pid in (os.getpid(), self.process.pid):
                    continue
                if mark in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def nobody_left(self) -> None:
        """No process of the daemon's is alive any more, some moments after its own end."""
        deadline = time.monotonic() + 20
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, left

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIME_LIMIT_S)

    @contextlib.contextmanager
    def engine(self, rank: int = 0, cache: Path | None = None, **fields: Any) -> Iterator[Client]:
        """An attached engine rank of this process, whose library looks into `cache`."""
        client = Client(self.address, lambda: self.hello(rank, cache, **fields))
        try:
            yield client
        finally:
            client.close()

    def hello(self, rank: int = 0, cache: Path | None = None, **fields: Any) -> Hello:
        hello = Introduction(engine="test", compilers=(), rank=rank, target=load_target("h200"))()
        roots = {"deep_jit": (str(cache or self.bench.cache),)}
        return msgspec.structs.replace(hello, cache_roots=roots, **fields)

    def plan(self, client: Client) -> None:
        """All that the bench's profile can launch, as one plan."""
        (provider,) = load_providers(["deep_gemm"]).values()
        limits = Limits(max_tokens=64, target=load_target("h200"))
        sweeps = provider.universe_sweeps(read_profile(self.bench.profile), limits)
        assert client.plan({"deep_gemm": list(expand(sweeps))}, Priority.BATCH)

    def universe(self, client: Client) -> None:
        profile = encode_profile(read_profile(self.bench.profile))
        client.universe(Universe(profile=profile, providers=("deep_gemm",), max_tokens=64))

    def settled(self, client: Client) -> None:
        """Returns when every plan of the client needs nothing more."""
        self.until(lambda: client.wanted == 0)


@contextlib.contextmanager
def serving(bench: Bench, changes: Mapping[str, str | None] = {}) -> Iterator[Served]:
    """A daemon that has ended, with everything it started, behind the block."""
    # The engine of these tests is this process, which has its own interpreter's spelling.
    assert sys.executable
    served = Served(bench, changes)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.end()
        served.nobody_left()
