"""`prefetchd run` with the real torch, Triton and daemon, on the null device."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from prefetchd.endpoint import find_endpoint
from prefetchd.node.lock import is_held
from prefetchd.targets import load_target

PROGRAM = shutil.which("prefetchd", path=str(Path(sys.executable).parent))
# An engine that knows nothing of prefetchd: it uses the device and waits for the test.
ENGINE = """
import sys, torch, triton
torch.empty(1, device="cuda")
print("serving", flush=True)
sys.stdin.readline()
print([thread.name for thread in __import__("threading").enumerate() if "prefetchd" in thread.name])
"""
# Only a failed test waits this long.
LIMIT_S = 60.0

pytestmark = pytest.mark.slow


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """A user's own surroundings; the daemon that was started in them is ended."""
    with TemporaryDirectory(prefix="pd") as folder:
        found = {
            "PATH": os.environ["PATH"],
            "HOME": folder,
            "XDG_RUNTIME_DIR": folder,
            "PREFETCHD_METRICS": "off",
        }
        yield found
        lock = find_endpoint(found).lock_path
        if lock is not None and is_held(lock):
            os.kill(int(lock.read_text()), signal.SIGKILL)


def stats(environment: dict[str, str]) -> dict[str, Any]:
    assert PROGRAM is not None
    done = subprocess.run([PROGRAM, "stats", "--json"], env=environment, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def start(environment: dict[str, str], engine: str) -> subprocess.Popen[str]:
    assert PROGRAM is not None
    return subprocess.Popen(
        [PROGRAM, "null", "--target", "h200", "--", PROGRAM, "run", "--", sys.executable, "-c", engine],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ci
def test_an_engine_that_knows_nothing_of_us_is_attached_with_its_device_and_directories(
    environment: dict[str, str],
) -> None:
    engine = start(environment, ENGINE)
    assert engine.stdout is not None
    assert engine.stdout.readline() == "serving\n"

    ranks: list[dict[str, Any]] = []
    while not ranks:
        ranks = stats(environment)["tables"]["ranks"]

    out, errors = engine.communicate("\n", timeout=LIMIT_S)
    assert engine.returncode == 0, errors
    assert "prefetchd-client" in out
    assert len(ranks) == 1
    assert load_target("h200").name in json.dumps(ranks)
    assert f"{environment['HOME']}/.triton/cache" in json.dumps(ranks)


def test_an_engine_that_never_uses_the_device_is_not_attached(environment: dict[str, str]) -> None:
    engine = start(environment, ENGINE.replace('torch.empty(1, device="cuda")', "torch.empty(1)"))
    out, errors = engine.communicate("\n", timeout=LIMIT_S)

    assert (engine.returncode, out) == (0, "serving\n[]\n"), errors
    assert stats(environment)["tables"]["ranks"] == []


def test_the_engine_serves_when_the_daemon_is_killed_beside_it(environment: dict[str, str]) -> None:
    engine = start(environment, ENGINE)
    assert engine.stdout is not None
    assert engine.stdout.readline() == "serving\n"
    lock = find_endpoint(environment).lock_path
    assert lock is not None
    os.kill(int(lock.read_text()), signal.SIGKILL)

    out, errors = engine.communicate("\n", timeout=LIMIT_S)

    assert engine.returncode == 0, errors
    assert "Traceback" not in errors
    assert out.startswith("[")
