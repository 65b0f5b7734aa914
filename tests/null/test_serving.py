"""An engine serves two hundred random batches beside the daemon: what does it still compile itself?"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warming import ROOT, Nvcc

sys.path.append(str(ROOT / "bench"))
from live_daemon import LiveDaemon

from prefetchd.null_device.guard import LIBRARIES
from prefetchd.profiles import profile_from_config, write_profile

pytestmark = pytest.mark.slow

ENGINE = Path(__file__).with_name("serving_engine.py")
MODELS = ROOT / "examples/models"
STEPS = 200
# With so few tokens a universe is drained in seconds; what a batch may be made of stays the same.
MAX_TOKENS = 48
# Triton compiles for some minutes, longer on a busy machine.
LIMIT_S = 1800.0
REASONS = "prefetchd_engine_compiles_total{"
# What an engine's nvcc leaves of each compile.
RECORD = 'cp "$source" {records}/$$.cu; printf "%s\\0" "$@" >{records}/$$.argv'


class Node:
    """The daemon, with an nvcc of its own beside the engine's, and the engine."""

    def __init__(self, place: Path, templates: Path, model: str) -> None:
        self.place = place
        self.records, self.result, self.cache = place / "records", place / "result.json", place / "cache"
        self.config = MODELS / f"{model}.json"
        for directory in (self.records, self.cache):
            directory.mkdir()
        self.nvcc, self.engine_nvcc = (Nvcc(place / name, templates) for name in ("nvcc", "engine-nvcc"))
        self.engine_nvcc.behave(RECORD.format(records=self.records))
        caches = {"DG_JIT_CACHE_DIR": str(self.cache), "TRITON_CACHE_DIR": str(place / "triton")}
        self.daemon = LiveDaemon(place, {**caches, "DG_JIT_NVCC_COMPILER": str(self.nvcc.path)})
        self.engine: subprocess.Popen[str] | None = None

    def start(self, *families: str) -> None:
        """Returns when the engine is attached; it waits for a word before its first step."""
        self.daemon.start()
        engine_nvcc = {"DG_JIT_NVCC_COMPILER": str(self.engine_nvcc.path), "PREFETCHD": "1"}
        profile = self.place / "model.profile.toml"
        write_profile(profile_from_config(self.config, tp=8), profile)
        arguments = [
            str(profile),
            str(MAX_TOKENS),
            str(STEPS),
            str(self.records),
            str(self.result),
            *families,
        ]
        null = [sys.executable, "-m", "prefetchd", "null", "--target", "h200", "--integer-ops", "--"]
        self.engine = subprocess.Popen(
            [*null, sys.executable, str(ENGINE), *arguments], env={**self.daemon.environment, **engine_nvcc},
            cwd=self.place, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=(self.place / "engine.log").open("w"),
        )  # fmt: skip
        self._hear("attached")

    def serve(self) -> dict[str, Any]:
        """All steps; what the engine says of them."""
        self._say()
        self._hear("served")
        found: dict[str, Any] = json.loads(self.result.read_text())
        assert found["failed"] == []
        assert found["calls"] > STEPS
        return found

    def drained(self) -> bool:
        """The daemon has heard of the universe and has nothing left to do."""
        asked = self.daemon.stats().figures["prefetchd_asked_total"]
        return bool(asked) and self.daemon.page("/ready")[0] == 200

    def reasons(self) -> dict[str, float]:
        figures = self.daemon.stats().figures
        return {name: value for name, value in figures.items() if name.startswith(REASONS) and value}

    def close(self) -> None:
        if self.engine is not None:
            self.engine.kill()
            self.engine.communicate()
        self.daemon.close()

    def _say(self) -> None:
        assert self.engine is not None
        assert self.engine.stdin is not None
        self.engine.stdin.write("go\n")
        self.engine.stdin.flush()

    def _hear(self, word: str) -> None:
        # The library prints too.
        assert self.engine is not None
        assert self.engine.stdout is not None
        for line in self.engine.stdout:
            if line.strip() == word:
                return
        pytest.fail(f"the engine ended: {(self.place / 'engine.log').read_text()[-3000:]}")


@pytest.fixture
def place() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="sv"))
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture(params=["deepseek-v3", "kimi-linear-48b-a3b"])
def node(request: pytest.FixtureRequest, place: Path, templates: Path) -> Iterator[Node]:
    made = Node(place, templates, request.param)
    yield made
    made.close()


@pytest.mark.ci
def test_drained_universe_leaves_an_engine_nothing_to_compile(node: Node) -> None:
    node.start()
    node.daemon.wait_for(node.drained, LIMIT_S, "the universe is not drained")
    found = node.serve()
    assert (found["nvcc"], node.engine_nvcc.compiles()) == (0, [])
    assert node.reasons() == {}
    assert node.nvcc.compiles()


@pytest.mark.ci
def test_while_the_universe_drains_every_engine_compile_is_counted_with_its_reason(node: Node) -> None:
    node.nvcc.behave("sleep 1")
    node.start()
    found = node.serve()
    compiled = len(node.engine_nvcc.compiles())
    assert found["nvcc"] == compiled > 0
    node.daemon.wait_for(
        lambda: sum(node.reasons().values()) == compiled, 60, f"{compiled} compiles are not all counted"
    )
    assert all("reason=" in name for name in node.reasons())


@pytest.mark.parametrize("node", ["kimi-linear-48b-a3b"], indirect=True)
def test_everything_of_kimi_linear_is_compiled_ahead_by_processes_without_a_device(node: Node) -> None:
    node.start("kda")
    opened: set[str] = set()
    drivers: set[str] = set()

    def drained() -> bool:
        for process in node.daemon.family():
            found = held(process.pid)
            opened.update(found[0])
            drivers.update(found[1])
        return node.drained()

    node.daemon.wait_for(drained, LIMIT_S, "the universe is not drained")
    found = node.serve()
    assert (found["nvcc"], found["triton"]) == (0, 0)
    assert node.reasons() == {}
    assert opened
    assert not [path for path in opened if path.startswith("/dev/nvidia")]
    assert drivers
    assert not [path for path in drivers if not path.startswith(str(LIBRARIES))]


def held(pid: int) -> tuple[set[str], set[str]]:
    """What a process has open, and the NVIDIA drivers that are mapped into it."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
        opened = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        # It has ended meanwhile.
        return set(), set()
    return opened, set(re.findall(r"\S*/lib(?:cuda|nvidia-ml)\.so\S*", maps))
