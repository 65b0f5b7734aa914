"""Warmed by the command, an engine that cannot compile serves random batches of KDA and of Mamba2.

Everything that could compile is taken away from the engine: Triton's own compile fails, there is no C
compiler, and the cache must be afterwards what it was before, file by file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

from answering import answer_of
from random_engine import BATCHES, MAX_TOKENS
from triton_site import HERE, other_triton

from prefetchd.compilers.triton_cache import key_of
from prefetchd.null_device import guard, launcher
from prefetchd.targets import load_target

# A whole Mamba2 is five minutes of compiling on one core, and machines that run tests are seldom idle.
LIMIT_S = 1800
PROFILE = """version = 1
model = "one layer"
architecture = "written by hand"
tp = 1
ep = 1
dp = 1
quantization = "bf16"
context_tokens = 1

[[kernels]]
name = "layer"
"""
# The site whose flags are those of the engine's call.
LAYERS = {
    "kda": """op = "chunk_kda"
sizes = {{ heads = {heads}, key_dim = 128, value_dim = 128 }}
flags = {{ set = "vllm" }}
""",
    "mamba": """op = "mamba2_prefill"
home = "mamba_ssm"
sizes = {{ heads = {heads}, head_dim = 64, groups = 8, state = 128, chunk = 256 }}
""",
}


class Combination(NamedTuple):
    family: str
    heads: int
    target: str
    line: str


# KDA with 16 heads tells batches of more than 4096 tokens from smaller ones, with 4 it does not: fewer
# variants, for the one that CI has the time for.
CI = Combination("kda", 4, "h200", "installed")
COMBINATIONS = [
    pytest.param(CI, marks=pytest.mark.ci),
    *(
        Combination(family, heads, target, line)
        for family, heads in (("kda", 16), ("mamba", 128))
        for target in ("h200", "b200")
        for line in ("installed", "other")
    ),
]


class Engine:
    """One engine's cache, filled by `prefetchd warm`, and runs of the engine on it."""

    def __init__(self, combination: Combination, place: Path) -> None:
        self.combination = combination
        self.root = place / "cache"
        self._profile = place / "layer.profile.toml"
        layer = LAYERS[combination.family].format(heads=combination.heads)
        self._profile.write_text(PROFILE + layer)
        paths = [str(HERE), *([str(other_triton())] if combination.line == "other" else [])]
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "PYTHONPATH": ":".join(paths),
            "TRITON_CACHE_DIR": str(self.root),
        }
        self.warmed = self._warm()

    def _warm(self) -> dict[str, Any]:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "prefetchd", "warm", "--json", "--profile", str(self._profile)),
                *("--target", self.combination.target, "--provider", self.combination.family),
                *("--max-tokens", str(MAX_TOKENS), "--libcuda-dir", str(guard.LIBRARIES)),
            ],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        answer: dict[str, Any] = json.loads(done.stdout)["providers"][self.combination.family]
        return answer

    def serve(self) -> dict[str, Any]:
        environment = {**self._environment, "CC": "/bin/false"}
        target = load_target(self.combination.target)
        return answer_of(
            (str(HERE / "random_engine.py"), self.combination.family, str(self.combination.heads)),
            launcher.environment(target, environment, integer_ops=True),
            limit_s=LIMIT_S,
        )

    @cached_property
    def first(self) -> dict[str, Any]:
        """What the engine says of the cache as it was warmed, and whether it changed anything there."""
        before = self.content()
        answer = self.serve()
        return {**answer, "changed": self.content() != before}

    def content(self) -> list[tuple[Path, int]]:
        """Every file and directory, with when it was last written."""
        return sorted((path, path.stat().st_mtime_ns) for path in self.root.rglob("*"))


def name_of(combination: Combination) -> str:
    return "-".join(map(str, combination))


@pytest.fixture(scope="module", params=COMBINATIONS, ids=name_of)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pytest.importorskip("fla")
    place = tmp_path_factory.mktemp("engine")
    yield Engine(request.param, place)
    shutil.rmtree(place)


@pytest.mark.slow
def test_random_batches_find_every_kernel(engine: Engine) -> None:
    answer, variants = engine.first, engine.warmed["variants"]

    assert engine.warmed["uncovered"] == 0
    assert (answer["served"], answer["missed"]) == (BATCHES[engine.combination.family], [])
    assert not answer["changed"]
    # Batches that need few kernels would find them all without proving much.
    assert variants / 2 < len(answer["found"]) <= variants


@pytest.mark.slow
def test_kernel_that_was_taken_away_is_missed(engine: Engine, tmp_path: Path) -> None:
    entry = engine.root / key_of(engine.first["found"][0])
    (group,) = entry.glob("__grp__*.json")
    name = group.stem.removeprefix("__grp__")
    entry.rename(tmp_path / entry.name)

    answer = engine.serve()

    # The look-up leaves an empty directory, and nothing is compiled into it.
    entry.rmdir()
    (tmp_path / entry.name).rename(entry)
    assert answer["missed"] == [name]
    assert answer["served"] < BATCHES[engine.combination.family]
