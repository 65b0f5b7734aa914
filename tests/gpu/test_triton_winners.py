"""Tuned kernels on a real device: nothing compiled after a warm without it, nothing measured after winners.

Five processes a case, each on its own: all candidates are compiled on the null device; a real process finds
them all and measures; its winners are collected; a second cache gets the winners alone, seeded; and the next
real process neither compiles nor measures. Needs torch, triton and fla-core, and for its case the sources of
mamba_ssm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from prefetchd.targets import Target, write_target

HERE = Path(__file__).parent
# The bar for a process that measures nothing: it loads kernels and launches them.
FIRST_CALL_S = 1.0
MAX_TOKENS = "2048"
DELTA_SIZES = '"key_dim" = 128, "value_dim" = 128'
# The provider, the library it needs, and the site whose flags are those of the case's call.
CASES = {
    "kda-4": ("kda", "fla", "chunk_kda", f'"heads" = 4, {DELTA_SIZES}', '"set" = "vllm"'),
    "kda-32": ("kda", "fla", "chunk_kda", f'"heads" = 32, {DELTA_SIZES}', '"set" = "vllm"'),
    "gdn": (
        "gdn",
        "fla",
        "chunk_gated_delta_rule",
        f'"heads" = 4, "value_heads" = 8, {DELTA_SIZES}',
        '"set" = "vllm"',
    ),
    "mamba": (
        "mamba",
        "mamba_ssm",
        "mamba2_prefill",
        '"heads" = 128, "head_dim" = 64, "groups" = 8, "state" = 128, "chunk" = 256',
        "",
    ),
}
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
op = "{op}"
home = "{home}"
sizes = {{ {sizes} }}
flags = {{ {flags} }}
"""


class Case:
    """One case's files, and the commands on them."""

    def __init__(self, name: str, device: Target, folder: Path) -> None:
        self.name = name
        self.provider, home, op, sizes, flags = CASES[name]
        self.profile = folder / "layer.profile.toml"
        self.profile.write_text(PROFILE.format(op=op, home=home, sizes=sizes, flags=flags))
        self.target = folder / "device.toml"
        write_target(device, self.target)

    def prefetchd(self, cache: Path, *command: object) -> dict[str, Any]:
        """A command of ours; it prints one JSON object."""
        arguments = [
            "--target", self.target, "--profile", self.profile, "--provider", self.provider,
            "--max-tokens", MAX_TOKENS, "--json",
        ]  # fmt: skip
        answer: dict[str, Any] = json.loads(run(cache, "-m", "prefetchd", *command, *arguments))
        return answer

    def warm(self, cache: Path, *options: object) -> dict[str, Any]:
        """`prefetchd warm`, as the figures of its provider and the wall time of compiling."""
        answer = self.prefetchd(cache, "warm", *options)
        figures = answer["providers"][self.provider]
        kept = {name: figures[name] for name in ("variants", "compiled", "failed", "uncovered", "winners")}
        return {**kept, "compile_wall_s": answer["compile_wall_s"], "notes": answer["notes"]}

    def engine(self, cache: Path) -> dict[str, Any]:
        """A real process: what it says, and what it added to the cache."""
        kernels, objects = compiled(cache), built(cache)
        answer = json.loads(run(cache, HERE / "triton_engine.py", self.name).splitlines()[-1])
        new = sorted(compiled(cache) - kernels)
        return {**answer, "new_entries": new, "launchers_built": len(built(cache) - objects)}


def run(cache: Path, *command: object) -> str:
    variables = {
        "TRITON_CACHE_DIR": str(cache),
        # mamba_ssm's tuners keep results only where this asks for it; fla's do by themselves.
        "TRITON_CACHE_AUTOTUNING": "1",
    }
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def compiled(cache: Path) -> set[str]:
    """The keys of complete kernels."""
    return {path.parent.name for path in cache.glob("*/__grp__*.json")}


def built(cache: Path) -> set[Path]:
    """What the library built by a C compiler: its helper module and, in older versions, launchers."""
    return set(cache.glob("*/*.so"))


@pytest.mark.parametrize("name", CASES)
def test_engine_compiles_nothing_and_with_winners_measures_nothing(
    name: str, device: Target, tmp_path: Path
) -> None:
    for module in ("torch", "triton", CASES[name][1]):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    case, winners = Case(name, device, tmp_path), tmp_path / "winners.jsonl"
    all_candidates, winners_alone = tmp_path / "all", tmp_path / "winners"
    row: dict[str, Any] = {"case": name}

    row["warm"] = case.warm(all_candidates)
    row["first_process"] = case.engine(all_candidates)
    row["second_process"] = case.engine(all_candidates)
    collected = case.prefetchd(all_candidates, "winners", "collect", "--out", winners)
    row["collected"] = {key: collected[key] for key in ("gpu", "tunings", "added", "damaged", "unasked")}
    row["warm_winners"] = case.warm(winners_alone, "--winners", winners)
    row["seeded_process"] = case.engine(winners_alone)
    row["next_process"] = case.engine(winners_alone)

    print(json.dumps(row))
    if out := os.environ.get("PREFETCHD_TEST_RESULTS"):
        Path(out, f"triton_winners_{name}.json").write_text(json.dumps(row, indent=1))
    assert row["warm"]["compiled"] > 0
    assert row["first_process"]["new_entries"] == []
    # The check can fail: without winners this very process does measure.
    assert row["first_process"]["benchmarks"] > 0
    assert row["second_process"]["benchmarks"] == 0
    assert collected["added"] == collected["tunings"] > 0
    assert row["warm_winners"]["winners"]["seeded"] == collected["tunings"]
    assert row["warm_winners"]["compiled"] < row["warm"]["compiled"]
    for process in ("seeded_process", "next_process"):
        assert (row[process]["benchmarks"], row[process]["new_entries"]) == (0, [])
    # A process that had to build launchers pays for them once; the one after it shows the winners' effect.
    timed = "next_process" if row["seeded_process"]["launchers_built"] else "seeded_process"
    assert row[timed]["first_call_s"] < FIRST_CALL_S
