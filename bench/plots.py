"""Draws the stored results: one SVG a table, beside the JSON files they come from.

    python bench/plots.py [--results DIR]

The same results give the same files, byte for byte, so that a repository shows a change only where one is.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables.reports import CONTACT_ARMS, FAMILIES, REPLAY_ARMS, TRAFFIC_ARMS, compile_walls
from tables.results import RESULTS
from tables.rows import Stored

WIDTH, ROW = 8.0, 1.1
STALL_MS = 50.0
# Identifiers inside an SVG are drawn by chance otherwise.
SALT = "prefetchd"


def deep_gemm_traffic(stored: Stored) -> Figure | None:
    """Each call's milliseconds over the time since the engine's start, a strip for each arm."""
    runs = {arm: stored.latest("deep_gemm_traffic", arm=arm) for arm in TRAFFIC_ARMS}
    found = {arm: run for arm, run in runs.items() if run}
    if not found:
        return None
    figure, strips = _strips(len(found))
    for axes, (arm, run) in zip(strips, found.items(), strict=True):
        first = run["figures"]["first_request_s"]
        calls = run["raw"]["traffic"]
        axes.axvspan(0, first, color="0.9")
        axes.scatter([first + at for at, _ in calls], [ms for _, ms in calls], s=2, rasterized=True)
        axes.axhline(STALL_MS, color="tab:red", linewidth=0.6)
        axes.set_yscale("log")
        axes.set_title(TRAFFIC_ARMS[arm].replace("`", ""), fontsize=8, loc="left")
        axes.set_ylabel("ms", fontsize=7)
    strips[-1].set_xlabel("seconds since the engine's start (grey: not serving yet; red: 50 ms)", fontsize=8)
    return figure


def first_contact(stored: Stored) -> Figure | None:
    """First calls as bars, aligned and ragged."""
    figure, columns = plt.subplots(1, len(FAMILIES), figsize=(WIDTH, 3), layout="constrained")
    seen = False
    for axes, (family, title) in zip(columns, FAMILIES.items(), strict=True):
        runs = {arm: stored.latest("first_contact", family=family, arm=arm) for arm in CONTACT_ARMS}
        for number, run in enumerate(runs.values()):
            for offset, batch in ((-0.2, "aligned"), (0.2, "ragged")):
                if run:
                    seen = True
                    color = "tab:blue" if batch == "aligned" else "tab:orange"
                    axes.bar(number + offset, run["engine"][batch]["seconds"], 0.4, color=color)
        axes.set_yscale("log")
        axes.axhline(1.0, color="tab:red", linewidth=0.6)
        axes.set_xticks(range(len(runs)), [arm.replace("_", "-") for arm in runs], fontsize=7)
        axes.set_title(f"{title}: first aligned (blue) and ragged batch", fontsize=8)
        axes.set_ylabel("seconds", fontsize=7)
    return figure if seen else None


def traffic_replay(stored: Stored) -> Figure | None:
    """The share of requests whose first token came within a time, all runs of an arm together."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3), layout="constrained")
    seen = False
    for arm, name in REPLAY_ARMS.items():
        runs = stored.all("traffic_replay", arm=arm)
        times = sorted(itertools.chain.from_iterable(run["raw"]["ttft_s"] for run in runs))
        if times:
            seen = True
            shares = [(number + 1) / len(times) for number in range(len(times))]
            axes.step(
                times, shares, label=f"{name.replace('`', '')} ({len(runs)} run{'s' * (len(runs) > 1)})"
            )
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, seconds", fontsize=8)
    axes.set_ylabel("share of requests", fontsize=8)
    # Who came just before the end has waited for next to nothing, and is no reason for four decades.
    axes.set_xlim(left=1e-2)
    if seen:
        figure.legend(fontsize=7, loc="outside upper center", ncols=2)
    return figure if seen else None


def scaling(stored: Stored) -> Figure | None:
    """Compile wall over cores beside its bound, and the helper's memory over traces."""
    walls = compile_walls(stored)
    memory = stored.latest("scaling", part="memory")
    if not walls:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3), layout="constrained")
    for color, (machine, rows) in zip(itertools.cycle(("C0", "C1", "C2")), walls.items(), strict=False):
        times, bounds = ([row[name] for row in rows.values()] for name in ("wall_s", "bound_s"))
        left.plot(list(rows), times, "o-", color=color, label=f"measured, machine with {machine}")
        left.plot(list(rows), bounds, "x--", color=color, label="max(CPU s / cores, longest)")
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:.0f}")
    left.set_yscale("log")
    left.set_xlabel("cores", fontsize=8)
    left.set_ylabel("seconds", fontsize=8)
    left.legend(fontsize=7)
    if memory:
        traces, megabytes = zip(*memory["figures"]["traces_and_mb"], strict=True)
        right.plot(traces, megabytes)
        right.set_ylim(0, 1.2 * max(megabytes))
    right.set_xlabel("traces", fontsize=8)
    right.set_ylabel("helper's resident MB", fontsize=8)
    return figure


DRAWINGS: dict[str, Callable[[Stored], Figure | None]] = {
    "deep_gemm_traffic": deep_gemm_traffic,
    "first_contact": first_contact,
    "traffic_replay": traffic_replay,
    "scaling": scaling,
}


def _strips(count: int) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(
        count, 1, figsize=(WIDTH, ROW * count), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    return figure, [row[0] for row in axes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = SALT
    mpl.rcParams["xtick.labelsize"] = mpl.rcParams["ytick.labelsize"] = 7
    stored = Stored(options.results)
    for name, draw in DRAWINGS.items():
        figure = draw(stored)
        if figure is None:
            print(f"{name}: nothing measured yet")
            continue
        path = options.results / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
