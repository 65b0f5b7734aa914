"""Tables 1 to 3 and the scaling figures as Markdown, from the stored runs.

Every cell is a number of a run or a dash where there is no run. The last run of an arm is shown; where runs
of several days add up (table 3), all of them are.
"""

from __future__ import annotations

import statistics
from typing import Any

from tables.markdown import seconds, table
from tables.rows import Stored

NO_RUN = "-"
TRAFFIC_ARMS = {
    "nothing": "nothing",
    "grid128": "in-engine warm-up, 128-step grid",
    "grid16": "in-engine warm-up, 16-step grid",
    "walk": "in-engine warm-up, fast list",
    "warm": "`prefetchd warm` before",
    "live": "`prefetchd serve` beside, nothing known before",
}
CONTACT_ARMS = {
    "cold": "cold",
    "warm_up": "after a warm-up forward of new, aligned sequences",
    "candidates": "candidates prefetched",
    "winners": "candidates and winners prefetched",
}
FAMILIES = {"kda": "KDA, H=32", "mamba": "Mamba2, H=128"}
REPLAY_ARMS = {
    "without": "in-engine warm-up forward, no prefetchd",
    "live": "prefetchd started with the engine, nothing known before",
    "ready": "`prefetchd warm` with winners before",
    "alone": "the same caches, nothing of prefetchd in or beside the engine",
}


def deep_gemm_traffic(stored: Stored) -> str:
    """Table 1."""
    head = (
        "kernels by", "first request after", "GPU held by warm-up", "stalls under traffic", "stalled",
        "nvcc starts under traffic", "every M after: stalls, nvcc starts", "variants",
    )  # fmt: skip
    return table(head, [_traffic_row(stored, arm, name) for arm, name in TRAFFIC_ARMS.items()])


def _traffic_row(stored: Stored, arm: str, name: str) -> list[object]:
    run = stored.latest("deep_gemm_traffic", arm=arm)
    if run is None:
        return [name, *[NO_RUN] * 7]
    figures = run["figures"]
    every = figures.get("every_m")
    return [
        name,
        seconds(figures["first_request_s"]),
        seconds(figures["gpu_held_by_warm_up_s"]) if figures["gpu_held_by_warm_up_s"] else 0,
        f"{figures['stalls']} in {seconds(figures['traffic_s'])}",
        seconds(figures["stalled_s"]) if figures["stalls"] else 0,
        figures["nvcc_under_traffic"],
        f"{every['stalls']}, {every['nvcc_starts']}" if every else NO_RUN,
        figures["variants"],
    ]


def lead_times(stored: Stored) -> str:
    """What the arms with prefetchd say beside table 1."""
    lines = []
    for arm in ("warm", "live"):
        run = stored.latest("deep_gemm_traffic", arm=arm)
        if run is None:
            continue
        every, lead = run["figures"]["every_m"], run["figures"]["lead"]
        line = f"- {TRAFFIC_ARMS[arm]}: {every['calls']:,} calls in the pass over every M, "
        line += f"p99 {every['p99_ms']:.2f} ms, the longest {every['longest_ms']:.1f} ms. "
        if arm == "warm":
            line += f"`warm` took {seconds(run['warm']['wall_s'])} before the start, without the GPU."
        else:
            line += _live_text(run, lead)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _live_text(run: dict[str, Any], lead: dict[str, Any]) -> str:
    daemon, drained = run["daemon"], run["figures"]["drained"]
    text = f"Helper up after {seconds(daemon['helper_up_s'])}, all published after "
    text += f"{seconds(drained['seconds'])} (bar: {seconds(drained['bar_s'])}), "
    text += f"{daemon['compile_cpu_s']:.0f} CPU seconds on {run['machine']['cores']} cores"
    if "median_s" in lead:
        text += f"; {lead['used_under_traffic']} kernels were first used under traffic after they had been "
        text += f"published, {lead['shortest_s']:.1f} to {lead['longest_s']:.1f} s after"
        text += f" (median {lead['median_s']:.1f} s)"
    return text + f". Processes of the daemon that had opened the GPU: {daemon['held_gpu']}."


def first_contact(stored: Stored) -> str:
    """Table 2."""
    head = ("kernels", "state", "before it serves", "aligned batch", "ragged batch", "compiles", "benchmarks")
    rows = []
    for family, title in FAMILIES.items():
        for arm, name in CONTACT_ARMS.items():
            run = stored.latest("first_contact", family=family, arm=arm)
            rows.append([title, name, *(_contact_cells(run) if run else [NO_RUN] * 5)])
    return table(head, rows)


def _contact_cells(run: dict[str, Any]) -> list[object]:
    engine = run["engine"]
    aligned, ragged = engine["aligned"], engine["ragged"]
    before = engine.get("warm_up")
    return [
        f"{seconds(before['seconds'])} in the engine" if before else 0,
        seconds(aligned["seconds"]),
        seconds(ragged["seconds"]),
        f"{aligned['compiles']} + {ragged['compiles']}",
        f"{aligned['benchmarks']} + {ragged['benchmarks']}",
    ]


def traffic_replay(stored: Stored) -> str:
    """Table 3."""
    head = (
        "arm", "run", "first request after", "TTFT p50", "p90", "p99", "longest step", "compiles, benchmarks",
        "longest step / median once drained",
    )  # fmt: skip
    rows = []
    for arm, name in REPLAY_ARMS.items():
        runs = stored.all("traffic_replay", arm=arm)
        rows += [[name, number, *_replay_cells(run)] for number, run in enumerate(runs, 1)]
        if not runs:
            rows.append([name, *[NO_RUN] * 8])
    return table(head, rows)


def _replay_cells(run: dict[str, Any]) -> list[object]:
    figures, ttft = run["figures"], run["figures"]["ttft_s"]
    kinds = figures.get("kinds_drained", {})
    ratios = ", ".join(f"{kind} {one['ratio']:.1f}" for kind, one in kinds.items())
    compiles = figures["nvcc_under_traffic"] + figures["triton_under_traffic"]
    return [
        seconds(figures["first_request_s"]),
        *(f"{ttft[share]:.3f} s" for share in ("p50", "p90", "p99")),
        f"{figures['longest_step_s']:.3f} s",
        f"{compiles}, {figures['benchmarks_under_traffic']}",
        ratios or NO_RUN,
    ]


def scaling(stored: Stored) -> str:
    """One line for each part that was measured."""
    lines = _compile(stored)
    lines += [one for one in (_trace(stored), _broker(stored), _hit(stored)) if one]
    lines += [one for one in (_step(stored), _call(stored), _launch(stored), _memory(stored)) if one]
    return table(("what", "result", "cores"), lines)


def _part(stored: Stored, part: str) -> dict[str, Any] | None:
    return stored.latest("scaling", part=part)


def compile_walls(stored: Stored) -> dict[str, dict[int, dict[str, Any]]]:
    """By machine, each number of cores from the last run that has it: a machine has as many as it has."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in stored.all("scaling", part="compile"):
        machine = run["machine"]["gpu"].partition(",")[0] or "no GPU"
        jobs = {"jobs": run["figures"]["jobs"]}
        found.setdefault(machine, {}).update({row["cores"]: row | jobs for row in run["figures"]["walls"]})
    return {machine: dict(sorted(rows.items())) for machine, rows in found.items()}


def _compile(stored: Stored) -> list[list[object]]:
    """A line for each machine, since cores are not alike."""
    lines: list[list[object]] = []
    for machine, rows in compile_walls(stored).items():
        jobs = " or ".join(sorted({str(row["jobs"]) for row in rows.values()}))
        what = f"compile phase of {jobs} nvcc jobs by cores (in brackets against max(CPU s / cores, longest))"
        cells = [f"{count}: {seconds(row['wall_s'])} ({row['ratio']:.2f})" for count, row in rows.items()]
        lines.append([f"{what}, machine with {machine}", "; ".join(cells), ", ".join(map(str, rows))])
    return lines


def _trace(stored: Stored) -> list[object]:
    run = _part(stored, "trace")
    if run is None:
        return []
    figures = run["figures"]
    by_m = ", ".join(f"{row['most_m']}: {row['seconds']:.2f} s" for row in figures["over_m"])
    by_sites = ", ".join(f"{row['sites']}: {row['seconds']:.2f} s" for row in figures["over_sites"])
    text = f"{by_m}; sites at 8192: {by_sites}; helper start {figures['helper_start_s']} s"
    return ["trace of one site by the largest M", text, run["machine"]["cores"]]


def _broker(stored: Stored) -> list[object]:
    run = _part(stored, "broker")
    if run is None:
        return []
    figures = run["figures"]["figures"]
    text = f"{figures['all_per_s']:,} a second, new ones {figures['new_per_s']:,}"
    return ["requests through the broker, 64 ranks", text, run["machine"]["cores"]]


def _hit(stored: Stored) -> list[object]:
    run = _part(stored, "hit")
    if run is None:
        return []
    text = ", ".join(f"{row['entries']:,}: {row['p50_us']:.0f} us" for row in run["figures"]["rows"])
    return ["looking up a published kernel by the cache's entries (p50)", text, run["machine"]["cores"]]


def _step(stored: Stored) -> list[object]:
    run = _part(stored, "step")
    if run is None:
        return []
    rows = run["figures"]["figures"]["deepseek-v3"]
    text = "; ".join(
        f"{name}: p50 {row['on_schedule_us']['p50']:.1f} us, p99 {row['on_schedule_us']['p99']:.1f} us"
        for name, row in rows.items()
    )
    return ["`Planner.on_schedule`, DeepSeek-V3", text, run["machine"]["cores"]]


def _call(stored: Stored) -> list[object]:
    run = _part(stored, "call")
    if run is None:
        return []
    figures = run["figures"]["figures"]
    text = f"{figures['call_added_us']:.2f} us a call; {figures['variant_ms']:.2f} ms a variant first seen; "
    text += f"{figures['nvcc_added_ms']:.1f} ms a compile by nvcc"
    return ["observing DeepGEMM in an engine adds", text, run["machine"]["cores"]]


def _launch(stored: Stored) -> list[object]:
    run = _part(stored, "launch")
    if run is None:
        return []
    figures = run["figures"]["figures"]
    text = f"{figures['launch_ratio']:.3f} times the launch of {figures['launch_us_without']:.1f} us without "
    text += (
        f"(without, twice: {figures['launch_noise']:.3f}); {figures['compiled_ms']:.2f} ms a kernel compiled"
    )
    return ["observing Triton in an engine makes it", text, run["machine"]["cores"]]


def _memory(stored: Stored) -> list[object]:
    run = _part(stored, "memory")
    if run is None:
        return []
    rows = run["figures"]["traces_and_mb"]
    later = [mb for traces, mb in rows if traces >= rows[-1][0] / 2]
    text = f"{rows[0][1]:.0f} MB at first, {statistics.median(later):.0f} MB in the second half, "
    text += f"{rows[-1][1]:.0f} MB at the end"
    return [f"helper's resident memory over {rows[-1][0]:,} traces", text, run["machine"]["cores"]]
