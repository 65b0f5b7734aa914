"""Table 3: time to first token and the longest step of a hybrid model under traffic.

A scripted scheduler (chunked prefill with ragged remainders, decode, a suspend path) drives real DeepGEMM,
KDA and Mamba2 kernels; requests arrive by a Poisson process. The arms, in turn, each in a fresh cache:

    without  before it serves, the engine runs an aligned batch of new sequences and decode steps
    live     no warm-up; `prefetchd serve` started together with the engine, nothing known before
    ready    no warm-up; `prefetchd warm` before, with measured winners, and the daemon beside the engine
    alone    the caches of `ready`, and nothing of prefetchd in the engine or beside it: what the machine does

    python bench/traffic_replay.py --winners FILE... [--seconds 60] [--rounds 3] [--arm ...] [--json FILE]

Winners are what `first_contact.py --winners FILE` has measured. Runs are appended to those of other days.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from live_daemon import Failed, LiveDaemon
from tables.counting import CountingNvcc, Span
from tables.engine_process import EngineFailed, need_gpu, start_engine, wait_for_engine
from tables.hybrid_sites import model_profile
from tables.results import RESULTS, Run, append, described, load_average, real_nvcc
from tables.scheduler import BUDGET

ARMS = ("without", "live", "ready", "alone")
WARMED = ("ready", "alone")
ATTACHED = ("live", "ready")
# Where nothing drains, as much is left out of the beginning as `ready` takes to drain.
SETTLED_S = 6.0
POLL_S = 0.1
# The daemon's figures are asked for less often: a slow step is compared with when something was traced.
LOOKS_A_FIGURE = 5
# The bar: once drained no step is longer than this many times the median of its kind.
STEP_FACTOR = 3.0
# mamba_ssm's tuners keep and read results only where this asks for it.
KEEP_RESULTS = {"TRITON_CACHE_AUTOTUNING": "1"}


class Place:
    """Directories that every round of an arm finds under the same name, since kernels name their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._kept = folder, folder.parent / f"{folder.name}.kept"

    def fresh(self, prepare: Any) -> dict[str, Any]:
        """An empty folder, or what `prepare` made of it the first time."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._kept.exists():
            shutil.copytree(self._kept, self.folder, symlinks=True)
            return {}
        self.folder.mkdir(parents=True)
        facts: dict[str, Any] = prepare()
        if facts:
            shutil.copytree(self.folder, self._kept, symlinks=True)
        return facts


class Arm:
    """One arm: its caches, its engine, its daemon."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        self.name, self.options, self.folder = name, options, folder / name
        self._place = Place(self.folder)

    def run(self) -> Run:
        """One round. Raises `EngineFailed`, `Failed`."""
        facts: dict[str, Any] = {"load_average": {"begin": load_average()}}
        if prepared := self._place.fresh(self._prepare):
            facts["prepared"] = prepared
        self._write_order()
        # A socket's path is short, and a daemon's place is its own.
        with tempfile.TemporaryDirectory(prefix="pr") as place:
            nvcc = CountingNvcc(Path(place), real_nvcc())
            begun = time.time()
            engine = self._start_engine(nvcc, Path(place))
            if self.name in ATTACHED:
                facts["daemon"] = self._beside_daemon(engine, Path(place), begun)
            wait_for_engine(engine, self._log)
            spans = nvcc.spans()
        facts["load_average"]["end"] = load_average()
        said = json.loads((self.folder / "result.json").read_text())
        return facts | self._figures(said, begun, spans, facts.get("daemon", {}))

    @property
    def _log(self) -> Path:
        return self.folder / "engine.log"

    @property
    def _profile(self) -> Path:
        return self.folder / "model.profile.toml"

    @property
    def _caches(self) -> dict[str, str]:
        return {
            "DG_JIT_CACHE_DIR": str(self.folder / "deep_gemm"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            **KEEP_RESULTS,
        }

    def _prepare(self) -> dict[str, Any]:
        (self.folder / "triton").mkdir()
        self._profile.write_text(model_profile())
        if self.name not in WARMED:
            return {}
        winners = self.folder / "winners.jsonl"
        winners.write_text("".join(path.read_text() for path in self.options.winners or ()))
        done = subprocess.run(
            [
                sys.executable, "-m", "prefetchd", "warm", "--target", self.options.target, "--json",
                "--profile", str(self._profile), "--max-tokens", str(BUDGET), "--winners", str(winners),
                "--provider", "deep_gemm", "--provider", "kda", "--provider", "mamba",
            ],
            env={**os.environ, **self._caches},
            stdout=subprocess.PIPE,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise EngineFailed(f"prefetchd warm ended with status {done.returncode}: {done.stdout[-3000:]!r}")
        said = json.loads(done.stdout)
        facts = {name: said[name] for name in ("trace_s", "compile_wall_s", "compile_cpu_s", "prove_s")}
        kept = ("variants", "compiled", "uncovered", "winners")
        for name, figures in said["providers"].items():
            facts[name] = {key: figures[key] for key in kept if key in figures}
        return facts

    def _write_order(self) -> None:
        options = self.options
        order = {
            "seed": options.seed,
            "rate": options.rate,
            "seconds": options.seconds,
            "warm_up": self.name == "without",
            "attach": str(self._profile) if self.name in ATTACHED else "",
            "result": str(self.folder / "result.json"),
        }
        (self.folder / "order.json").write_text(json.dumps(order))

    def _start_engine(self, nvcc: CountingNvcc, place: Path) -> subprocess.Popen[bytes]:
        variables = {**self._caches, "DG_JIT_NVCC_COMPILER": str(nvcc.path)}
        if self.name in ATTACHED:
            variables |= {"PREFETCHD": "1", "PREFETCHD_ENDPOINT": f"ipc://{place}/daemon"}
            # What it observes is no user's business.
            variables["PREFETCHD_LOG_DIR"] = str(place / "logs")
        order = self.folder / "order.json"
        return start_engine(
            "tables.replay_engine", order, variables=variables, log=self._log, null=self.options.null
        )

    def _beside_daemon(self, engine: subprocess.Popen[bytes], place: Path, begun: float) -> dict[str, Any]:
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "CUDA_HOME") if name in os.environ}
        if self.name == "ready":
            # Where a daemon looks for what was measured on its node.
            kept["PREFETCHD_LOG_DIR"] = str(self.folder)
        daemon = LiveDaemon(place, {**kept, **self._caches})
        try:
            daemon.start()
            facts: dict[str, Any] = {"traces": []}
            looks = 0
            while engine.poll() is None:
                now = round(time.time() - begun, 2)
                looks += 1
                if looks % LOOKS_A_FIGURE == 0:
                    traced = daemon.stats().figures.get("prefetchd_traces_total", 0)
                    if traced != (facts["traces"] or [[0.0, 0]])[-1][1]:
                        facts["traces"].append([now, traced])
                if "drained_s" not in facts:
                    if daemon.page("/ready")[0] != 200:
                        facts.setdefault("attached_s", now)
                    elif "attached_s" in facts:
                        facts["drained_s"] = now
                time.sleep(POLL_S)
            stats = daemon.stats()
            facts["figures"] = {name: value for name, value in stats.figures.items() if value}
            facts["mismatches"] = stats.tables.get("mismatches")
            return facts
        finally:
            daemon.close()

    def _figures(self, said: dict[str, Any], begun: float, spans: list[Span], daemon: dict[str, Any]) -> Run:
        serving = said["moments"]["serving"]
        drained = daemon.get("drained_s")
        since = None if drained is None else drained - (serving - begun)
        if self.name == "alone":
            since = SETTLED_S
        figures: dict[str, Any] = {
            "first_request_s": round(serving - begun, 2),
            "ttft_s": percentiles(said["ttft_s"]),
            "requests": len(said["ttft_s"]),
            "still_waiting": said["still_waiting"],
            "steps": len(said["steps"]),
            "longest_step_s": round(max(step[2] for step in said["steps"]) / 1e3, 3),
            "nvcc_under_traffic": sum(span.begin >= serving for span in spans),
            "triton_under_traffic": len(said["compiles"]),
            "benchmarks_under_traffic": said["benchmarks"],
            "kinds": by_kind(said["steps"]),
        }
        if since is not None:
            figures["drained_after_serving_s"] = round(since, 2)
            figures["kinds_drained"] = by_kind([step for step in said["steps"] if step[0] > since])
        raw = {name: said[name] for name in ("columns", "steps", "ttft_s")}
        raw["triton_compiles"] = said["compiles"]
        return {"device": said["device"], "figures": figures, "reason": said["reason"], "raw": raw}


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99 and the largest."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    picked = {name: ordered[int(len(ordered) * share)] for name, share in shares.items()} if ordered else {}
    return {name: round(value, 4) for name, value in {**picked, "max": max(ordered, default=0.0)}.items()}


def by_kind(steps: list[list[Any]]) -> dict[str, dict[str, float]]:
    """Median and longest step of each kind, in milliseconds, and how many times the one the other is."""
    found = {}
    for kind in dict.fromkeys(step[1] for step in steps):
        times = [step[2] for step in steps if step[1] == kind]
        median, longest = statistics.median(times), max(times)
        found[kind] = {"steps": len(times), "median_ms": round(median, 2), "longest_ms": round(longest, 2)}
        found[kind]["ratio"] = round(longest / median, 2)
    return found


def misses(arm: str, run: Run) -> list[str]:
    """The bar, as text, where an arm with prefetchd does not meet it."""
    if arm not in ATTACHED:
        return []
    figures = run["figures"]
    if "kinds_drained" not in figures:
        return [f"{arm}: the daemon was not ready before the end"]
    kinds = figures["kinds_drained"].items()
    return [f"{arm}, {kind}: {figures}" for kind, figures in kinds if figures["ratio"] > STEP_FACTOR]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--arm", action="append", choices=ARMS, help="default: all")
    parser.add_argument("--winners", type=Path, action="append", help="for the arm `ready`; may be repeated")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next has the next one")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--target", default="h200", help="for `prefetchd warm`")
    parser.add_argument("--null", default="", help="try the script on the null device as this target")
    parser.add_argument("--json", type=Path, default=RESULTS / "traffic_replay.json")
    return parser.parse_args()


def main() -> int:
    """Appends a run for each arm and round and prints its figures; 1 if a bar was missed, 2 with no GPU."""
    options, missed = parsed(), []
    need_gpu(options.null)
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        arms = [Arm(name, options, Path(folder)) for name in options.arm or ARMS]
        for _ in range(options.rounds):
            for arm in arms:
                facts = {"arm": arm.name, "seed": options.seed, "rate": options.rate}
                run = described(null=bool(options.null), **facts, seconds=options.seconds)
                try:
                    run |= arm.run()
                except (EngineFailed, Failed) as error:
                    print(f"{arm.name}: {error}", file=sys.stderr)
                    return 1
                append(options.json, run)
                missed += misses(arm.name, run)
                print(arm.name, json.dumps(run["figures"]), flush=True)
            options.seed += 1
    print("\n".join(missed) or "no bar is missed", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
