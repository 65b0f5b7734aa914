"""Table 2: the first batches of a process that runs KDA or Mamba2, by what was prepared.

An aligned batch (every length a whole number of chunks) and then a ragged one, in a new process each:

    cold        an empty cache
    warm_up     an empty cache; before it serves, the engine runs an aligned batch of new sequences
    candidates  all candidates compiled by `prefetchd warm`; the engine measures them
    winners     what that engine measured, collected; `prefetchd warm` compiles and seeds these alone

    python bench/first_contact.py [--arm winners ...] [--family kda ...] [--json FILE] [--null h200]

`winners` needs what `candidates` measured: in the same call, or by `--winners FILE` of an earlier one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tables.engine_process import EngineFailed, need_gpu, start_engine, wait_for_engine
from tables.hybrid_sites import FAMILIES, family_profile
from tables.results import RESULTS, Run, append, described, load_average

ARMS = ("cold", "warm_up", "candidates", "winners")
BAR_S = 1.0
MAX_TOKENS = 2048
# mamba_ssm's tuners keep results only where this asks for it; fla's do by themselves.
KEEP_RESULTS = {"TRITON_CACHE_AUTOTUNING": "1"}


class Family:
    """One family in its arms, in one folder; winners go from one arm to the next."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        self.name, self.options, self.folder = name, options, folder
        self.profile = folder / "layer.profile.toml"
        self.profile.write_text(family_profile(name))
        self.winners: Path = options.winners or folder / "winners.jsonl"

    def run(self, arm: str) -> Run:
        """Figures of one arm. Raises `EngineFailed`."""
        cache = self.folder / arm
        facts: Run = {}
        cache.mkdir()
        if arm in ("candidates", "winners"):
            given = ["--winners", str(self.winners)] if arm == "winners" else []
            said = self._prefetchd(cache, "warm", *given)
            figures = said["providers"][self.name]
            facts["warm"] = {
                **{name: said[name] for name in ("trace_s", "compile_wall_s", "compile_cpu_s")},
                **{name: figures[name] for name in ("variants", "compiled", "uncovered", "winners")},
            }
        facts |= {"engine": self._engine(arm, cache), "load_average": load_average()}
        if arm == "candidates":
            self.winners.parent.mkdir(parents=True, exist_ok=True)
            self._prefetchd(cache, "winners", "collect", "--out", str(self.winners))
        return facts

    def _engine(self, arm: str, cache: Path) -> dict[str, Any]:
        result, log = self.folder / f"{arm}.json", self.folder / f"{arm}.log"
        engine = start_engine(
            "tables.contact_engine", self.name, cache, result, *(["--warm-up"] if arm == "warm_up" else []),
            variables={"TRITON_CACHE_DIR": str(cache), **KEEP_RESULTS}, log=log, null=self.options.null,
        )  # fmt: skip
        wait_for_engine(engine, log)
        said: dict[str, Any] = json.loads(result.read_text())
        return said

    def _prefetchd(self, cache: Path, *command: str) -> dict[str, Any]:
        done = subprocess.run(
            [
                sys.executable, "-m", "prefetchd", *command, "--target", self.options.target, "--json",
                "--profile", str(self.profile), "--provider", self.name, "--max-tokens", str(MAX_TOKENS),
            ],
            env={**os.environ, "TRITON_CACHE_DIR": str(cache), **KEEP_RESULTS},
            stdout=subprocess.PIPE,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise EngineFailed(f"prefetchd {command[0]} ended with status {done.returncode}: {done.stdout!r}")
        said: dict[str, Any] = json.loads(done.stdout)
        return said


def misses(family: str, arm: str, engine: dict[str, Any]) -> list[str]:
    """The bars that the last arm does not meet, as text."""
    if arm != "winners":
        return []
    missed = []
    for batch in ("aligned", "ragged"):
        figures = engine[batch]
        if figures["seconds"] >= BAR_S or figures["compiles"] or figures["benchmarks"]:
            missed.append(f"{family}, {batch}: {figures}")
    return missed


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--arm", action="append", choices=ARMS, help="default: all")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="default: both")
    parser.add_argument("--winners", type=Path, help="a file that `candidates` fills and `winners` reads")
    parser.add_argument("--target", default="h200", help="for `prefetchd warm`")
    parser.add_argument("--null", default="", help="try the script on the null device as this target")
    parser.add_argument("--json", type=Path, default=RESULTS / "first_contact.json")
    return parser.parse_args()


def main() -> int:
    """Appends a run for each arm and prints its figures; 1 if a bar was missed, 2 where there is no GPU."""
    options, missed = parsed(), []
    need_gpu(options.null)
    for family in options.family or FAMILIES:
        with tempfile.TemporaryDirectory(prefix="pc") as folder:
            one = Family(family, options, Path(folder))
            for arm in options.arm or ARMS:
                run = described(null=bool(options.null), family=family, arm=arm)
                try:
                    run |= one.run(arm)
                except EngineFailed as error:
                    print(f"{family}, {arm}: {error}", file=sys.stderr)
                    return 1
                append(options.json, run)
                missed += misses(family, arm, run["engine"])
                print(family, arm, json.dumps(run["engine"]), flush=True)
    print("\n".join(missed) or "no bar is missed", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
