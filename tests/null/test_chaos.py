"""A short run of what `make chaos` and the benches do for long, and clocks that jump."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import chaos
import pytest
from warming import ROOT, TIME_LIMIT_S

from prefetchd.protocol import Sweep
from prefetchd.requests.deep_gemm import Fp8GemmNt
from prefetchd.targets import load_target
from prefetchd.trace import Report
from prefetchd.tracer import Tracer

ROUNDS = 3
# A second more than the client takes to hold a daemon for gone.
STOPPED_S = 4.0
# With other tests and compiles on two cores the scheduler's thread loses the processor now and then.
BAR_US = 1000.0
FRAMES = 20_000
# What tells the time of day, which jumps.
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
# The age of a file has no other clock. A jump makes an entry that an engine is writing look older or younger
# than it is; what that decides is whether it is left alone or moved aside.
FILE_AGES = {"prefetchd/compilers/triton_cache.py": ["time.time"]}
# What is written down for people: when an engine's compile began.
RECORDED = {"prefetchd/observer.py": ["time.time"], "prefetchd/observing/recorder.py": ["time.time"]}
# Everything that keeps running: the daemon, its helper, its compile workers, an engine's client and planner.
LONG_LIVED = ("prefetchd.daemon", "prefetchd.helper", "prefetchd.forked.worker", "prefetchd.attaching")


@pytest.mark.slow
@pytest.mark.ci
def test_whatever_is_killed_nothing_is_lost_and_nothing_stays_behind() -> None:
    found = chaos.run(ROUNDS, seed=4, stopped_s=STOPPED_S, show=print)
    assert sum(found["killed"].values()) == ROUNDS
    assert found["library_calls_served_without_compiling"] > 0
    assert found["daemon_exit_status"] == 0
    assert found["on_schedule"]["p99_us"] <= BAR_US


@pytest.mark.slow
@pytest.mark.ci
def test_noise_neither_ends_the_daemon_nor_makes_it_grow() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "bench/frames.py", "--frames", str(FRAMES), "--seed", "4"],
        capture_output=True, text=True, timeout=10 * TIME_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["answered"]["prefetchd_messages_received_total{type=Hello}"] > 0


@pytest.mark.slow
def test_order_for_a_helper_that_has_just_been_killed_is_answered_as_lost() -> None:
    async def scenario() -> Report:
        async with Tracer(load_target("h200"), ("deep_gemm",), os.environ) as tracer:
            os.kill(tracer.ready.pid, signal.SIGKILL)
            # Its connection ends at once, and is found out before its process is waited for.
            while await tracer.answers(0.05):
                pass
            return await tracer.trace("deep_gemm", Sweep(Fp8GemmNt(m=1, n=512, k=512)), "capture")

    assert asyncio.run(scenario()).lost


@pytest.mark.parametrize("entry", LONG_LIVED)
def test_no_decision_but_on_the_age_of_files_depends_on_the_time_of_day(entry: str) -> None:
    ours = "m.__file__ for n, m in sys.modules.items() if n.startswith('prefetchd')"
    code = f"import sys, {entry}; print(*({ours}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = [Path(name) for name in done.stdout.split()]
    assert len(files) > 5
    asking = {str(path.relative_to(ROOT)): found for path in files if (found := wall_clocks(path))}
    allowed = FILE_AGES | RECORDED
    assert {name: found for name, found in asking.items() if allowed.get(name) != found} == {}


def wall_clocks(path: Path) -> list[str]:
    """The places where a module asks for the time of day."""
    tree = ast.parse(path.read_text())
    named = {
        f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    used = {
        ".".join(ast.unparse(node).split(".")[-2:])
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    return sorted((named | used) & WALL_CLOCKS)


def test_a_module_that_asks_for_the_time_of_day_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "import time, datetime\nfrom time import time_ns\nprint(time.time(), datetime.datetime.now())\n"
    )
    assert wall_clocks(module) == ["datetime.now", "time.time", "time.time_ns"]
