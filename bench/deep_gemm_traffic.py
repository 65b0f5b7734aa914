"""Table 1: what a DeepGEMM engine pays before and under traffic, by the way its kernels are made.

Five dense FP8 shapes, seeded traffic of M in 1..8192 at 40 calls a second, then every M of every shape once
more. The arms, each in a fresh cache and a process of its own:

    nothing   serves at once and compiles what it meets
    grid128   in-engine warm-up on steps of 8 below 128 and of 128 above
    grid16    the same with steps of 16 (520 values)
    walk      in-engine warm-up over a fast list: 1..1024, then steps of 2, 4, 8
    warm      `prefetchd warm` before the engine starts
    live      `prefetchd serve` started together with the engine, which attaches; nothing is known before

nvcc starts are counted by a stand-in in front of the real one, in the engine alone; stalls are calls longer
than 50 ms. In `live` traffic goes on until the daemon says that it is ready. The pass over every M is left
out for `nothing`, which would only go on compiling.

    python bench/deep_gemm_traffic.py [--arm live ...] [--seconds 300] [--json FILE] [--null h200]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from live_daemon import Failed, LiveDaemon
from tables.counting import CacheWatch, CountingNvcc, Span, entries, first_uses
from tables.engine_process import EngineFailed, holders_of_gpu, need_gpu, start_engine, wait_for_engine
from tables.gemm_traffic import MOST_M, SHAPES, WARM_UPS, profile_text
from tables.results import RESULTS, Run, append, described, load_average, real_nvcc

ARMS = ("nothing", *WARM_UPS, "warm", "live")
STALL_MS = 50.0
POLL_S = 0.1
# The bar for the pass after ready, and for the time until all is published.
DRAIN_FACTOR = 1.2


class Arm:
    """One arm's folder, engine and figures."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        self.name, self.options, self.folder = name, options, folder
        self.cache, self.result, self.log = folder / "cache", folder / "result.json", folder / "engine.log"
        self.ready = folder / "ready"
        self.profile = folder / "five.profile.toml"
        self.profile.write_text(profile_text(SHAPES[: options.shapes]))
        self.nvcc = CountingNvcc(folder, real_nvcc())

    def run(self) -> Run:
        """Everything from empty directories to figures. Raises `EngineFailed`, `Failed`."""
        facts: dict[str, Any] = {"load_average": {"begin": load_average()}}
        if self.name == "warm":
            facts["warm"] = self._warm()
        with CacheWatch(self.cache) as watch:
            begun = time.time()
            self._write_order()
            engine = self._start_engine()
            if self.name == "live":
                facts["daemon"] = self._beside_daemon(engine, begun)
            wait_for_engine(engine, self.log)
        watch.look()
        facts["load_average"]["end"] = load_average()
        said = json.loads(self.result.read_text())
        return facts | {"device": said["device"], **self._figures(said, begun, watch.seen)}

    def _write_order(self) -> None:
        options = self.options
        order = {
            "warm_up": self.name if self.name in WARM_UPS else "",
            "seed": options.seed,
            "rate": options.rate,
            "seconds": options.seconds,
            "limit_s": max(options.limit, options.seconds),
            "most_m": options.most_m,
            "shapes": options.shapes,
            "attach": str(self.profile) if self.name == "live" else "",
            "ready": str(self.ready) if self.name == "live" else "",
            "every_m": self.name != "nothing",
            "result": str(self.result),
        }
        (self.folder / "order.json").write_text(json.dumps(order))

    def _start_engine(self) -> subprocess.Popen[bytes]:
        variables = {"DG_JIT_CACHE_DIR": str(self.cache), "DG_JIT_NVCC_COMPILER": str(self.nvcc.path)}
        if self.name == "live":
            variables |= {"PREFETCHD": "1", "PREFETCHD_ENDPOINT": f"ipc://{self.folder}/daemon"}
            # What it observes is no user's business.
            variables["PREFETCHD_LOG_DIR"] = str(self.folder / "logs")
        order = self.folder / "order.json"
        return start_engine(
            "tables.gemm_engine", order, variables=variables, log=self.log, null=self.options.null
        )

    def _warm(self) -> dict[str, Any]:
        begun = time.perf_counter()
        done = subprocess.run(
            [
                sys.executable, "-m", "prefetchd", "warm", "--target", self.options.target, "--json",
                "--provider", "deep_gemm", "--profile", str(self.profile),
                "--max-tokens", str(self.options.most_m),
            ],
            env={**os.environ, "DG_JIT_CACHE_DIR": str(self.cache)},
            stdout=subprocess.PIPE,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise EngineFailed(f"prefetchd warm ended with status {done.returncode}: {done.stdout[-2000:]!r}")
        said = json.loads(done.stdout)
        kept = ("trace_s", "compile_wall_s", "compile_cpu_s", "prove_s")
        return {"wall_s": round(time.perf_counter() - begun, 2), **{name: said[name] for name in kept}}

    def _beside_daemon(self, engine: subprocess.Popen[bytes], begun: float) -> dict[str, Any]:
        """Runs the daemon as long as the engine lives; when each of its steps was seen, from outside."""
        # What a node's daemon is started with: its PATH, and where its interpreter finds the libraries.
        kept = ("PYTHONPATH", "CUDA_HOME")
        variables = {name: os.environ[name] for name in kept if name in os.environ}
        daemon = LiveDaemon(self.folder, {**variables, "DG_JIT_CACHE_DIR": str(self.cache)})
        try:
            daemon.start()
            facts: dict[str, Any] = {"serving_s": round(time.time() - begun, 2), "held_gpu": 0}
            while engine.poll() is None:
                self._look_at(daemon, facts, begun)
                time.sleep(POLL_S)
            figures = daemon.stats().figures
            facts["compile_cpu_s"] = round(figures["prefetchd_compile_cpu_seconds_total"], 2)
            facts["figures"] = {name: value for name, value in figures.items() if value}
            return facts
        finally:
            daemon.close()

    def _look_at(self, daemon: LiveDaemon, facts: dict[str, Any], begun: float) -> None:
        now = round(time.time() - begun, 2)
        facts["held_gpu"] += len(holders_of_gpu([daemon.pid, *(one.pid for one in daemon.family())]))
        if "drained_s" in facts:
            return
        stats = daemon.stats()
        helpers = stats.tables.get("helpers", [])
        if helpers and any(helper["state"] == "up" for helper in helpers):
            facts.setdefault("helper_up_s", now)
        if daemon.page("/ready")[0] != 200:
            facts.setdefault("attached_s", now)
        elif "attached_s" in facts:
            facts["drained_s"] = now
            self.ready.touch()

    def _figures(self, said: dict[str, Any], begun: float, seen: dict[str, float]) -> Run:
        moments, calls = said["moments"], said["traffic"]
        serving, served, ended = moments["serving"], moments["served"], moments["ended"]
        spans = self.nvcc.spans()
        stalls = [call for call in calls if call[1] > STALL_MS]
        warm_up_s = serving - moments["loaded"]
        figures: dict[str, Any] = {
            "first_request_s": round(serving - begun, 2),
            "gpu_held_by_warm_up_s": round(warm_up_s, 2) if self.name in WARM_UPS else 0.0,
            "traffic_s": round(served - serving, 1),
            "calls": len(calls),
            "stalls": len(stalls),
            "stalled_s": round(sum(ms for _, ms in stalls) / 1e3, 2),
            "nvcc_in_warm_up": _within(spans, begun, serving),
            "nvcc_under_traffic": _within(spans, serving, served),
            "variants": len(entries(self.cache)),
        }
        if said["every_m"]:
            figures["every_m"] = {
                **said["every_m"],
                "stalls": sum(call[2] > STALL_MS for call in said["every_m"]["notable"]),
                "nvcc_starts": _within(spans, served, ended),
            }
        if self.name in ("warm", "live"):
            figures["lead"] = self._lead(seen, serving, served)
        raw = {"traffic": calls, "nvcc": [[round(at - begun, 3) for at in span] for span in spans]}
        return {"figures": figures, "engine_versions": said["versions"], "reason": said["reason"], "raw": raw}

    def _lead(self, seen: dict[str, float], serving: float, served: float) -> dict[str, Any]:
        """By how long a kernel lay there before the engine first took it, for those taken under traffic."""
        uses = first_uses(self.cache, seen)
        leads = sorted(use - max(seen[name], serving) for name, use in uses.items() if use < served)
        after = [seen[name] - serving for name in seen]
        found: dict[str, Any] = {"used_under_traffic": len(leads)}
        if leads:
            found["shortest_s"], found["longest_s"] = round(leads[0], 2), round(leads[-1], 2)
            found["median_s"] = round(statistics.median(leads), 2)
        return found | {"published_after_serving_s": sorted(round(moment, 2) for moment in after)}


def _within(spans: list[Span], begin: float, end: float) -> int:
    return sum(begin <= span.begin < end for span in spans)


def misses(arm: str, run: Run, *, nothing: Run | None) -> list[str]:
    """The bars that this run of prefetchd's arms does not meet, as text."""
    if arm not in ("warm", "live"):
        return []
    figures, missed = run["figures"], []
    every = figures["every_m"]
    if every["stalls"] or every["nvcc_starts"]:
        missed.append(f"{arm}: {every['stalls']} stalls, {every['nvcc_starts']} nvcc starts after ready")
    if nothing is not None:
        later = figures["first_request_s"] - nothing["figures"]["first_request_s"]
        if later > 1.0:
            missed.append(f"{arm}: the first request is served {later:.2f} s later than with nothing")
    if arm == "live":
        daemon, cores = run["daemon"], run["machine"]["cores"]
        if "drained_s" not in daemon:
            return [*missed, "live: the daemon was not ready before the limit"]
        # Left out of the bound are the longest job and a start that was not seen: that makes it no looser.
        bound = DRAIN_FACTOR * daemon["compile_cpu_s"] / cores + daemon.get("helper_up_s", 0.0)
        run["figures"]["drained"] = {"seconds": daemon["drained_s"], "bar_s": round(bound, 2)}
        if daemon["drained_s"] > bound:
            missed.append(f"live: drained after {daemon['drained_s']} s, bar {bound:.1f} s")
        if daemon["held_gpu"]:
            missed.append("live: a process of the daemon has opened the GPU")
    return missed


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--arm", action="append", choices=ARMS, help="default: all")
    parser.add_argument("--seconds", type=float, default=300.0, help="of traffic")
    parser.add_argument("--limit", type=float, default=600.0, help="of traffic in the live arm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=40.0, help="calls a second")
    parser.add_argument("--most-m", type=int, default=MOST_M)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    parser.add_argument("--target", default="h200", help="for `prefetchd warm`")
    parser.add_argument("--null", default="", help="try the script on the null device as this target")
    parser.add_argument("--json", type=Path, default=RESULTS / "deep_gemm_traffic.json")
    return parser.parse_args()


def main() -> int:
    """Appends a run for each arm and prints its figures; 1 if a bar was missed, 2 where there is no GPU."""
    options = parsed()
    need_gpu(options.null)
    runs: dict[str, Run] = {}
    missed: list[str] = []
    for arm in options.arm or ARMS:
        facts = {"arm": arm, "seed": options.seed, "rate": options.rate, "most_m": options.most_m}
        run = described(null=bool(options.null), **facts, shapes=[list(s) for s in SHAPES[: options.shapes]])
        with tempfile.TemporaryDirectory(prefix="pt") as folder:
            try:
                run |= Arm(arm, options, Path(folder)).run()
            except (EngineFailed, Failed) as error:
                print(f"{arm}: {error}", file=sys.stderr)
                return 1
        missed += misses(arm, run, nothing=runs.get("nothing"))
        runs[arm] = run
        append(options.json, run)
        shown = {key: value for key, value in run["figures"].items() if key != "lead"}
        print(arm, json.dumps(shown), flush=True)
    print("\n".join(missed) or "no bar is missed", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
