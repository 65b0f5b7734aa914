"""The rows of the README's results: what was measured, the result as text, and how to measure it again.

A row takes its numbers from a stored result and from nowhere else; a new one is a function in `ROWS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tables.markdown import seconds, table
from tables.results import runs_of


class Row(NamedTuple):
    """One line of the table."""

    what: str
    result: str
    reproduce: str


class Stored:
    """The folder of results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def one(self, name: str) -> dict[str, Any]:
        """A file that holds one result."""
        found: dict[str, Any] = json.loads((self._folder / f"{name}.json").read_text())
        return found

    def latest(self, name: str, **wanted: Any) -> dict[str, Any] | None:
        """The last measured run with these facts of a file that holds runs; None when there is none."""
        runs = runs_of(self._folder / f"{name}.json", **wanted)
        return runs[-1] if runs else None

    def latest_on_null(self, name: str, **wanted: Any) -> dict[str, Any] | None:
        """The same of what ran on the null device."""
        runs = runs_of(self._folder / f"{name}.json", null=True, **wanted)
        return runs[-1] if runs else None

    def all(self, name: str, **wanted: Any) -> list[dict[str, Any]]:
        """Every measured run with these facts."""
        return runs_of(self._folder / f"{name}.json", **wanted)


def traced_model(stored: Stored) -> Row:
    found = stored.one("deepseek_v3")
    h200, b200 = found["h200"], found["b200"]
    return Row(
        f"DeepSeek-V3, TP 8, every M up to 8192: {h200['requests']:,} requests traced without a GPU",
        f"{h200['variants']} variants for H200, {b200['variants']} for B200; slowest site "
        f"{h200['slowest_site_s']} s; {h200['trace_s']} s in all on {_cores(h200['cores'])}",
        "`prefetchd warm --dry-run --target h200 --model examples/models/deepseek-v3.json --tp 8`",
    )


def warmed_model(stored: Stored) -> Row:
    warm = stored.one("deepseek_v3")["warm"]
    beside = " with other work on them" if warm["busy_machine"] else ""
    return Row(
        f"The same model warmed: all {warm['variants']} variants traced, compiled, published and proved",
        f"{seconds(warm['seconds'])} on {_cores(warm['cores'])}{beside}; a second run compiles "
        f"{warm['second_run_compiled'] or 'nothing'}",
        "`make demo`",
    )


def compile_phase(stored: Stored) -> Row:
    found = stored.one("compile_throughput")
    return Row(
        "Compile phase (DeepGEMM), against max(CPU seconds of the bare nvcc commands / cores, longest one)",
        f"{found['ratio']:.2f} ({found['jobs']} jobs, {_cores(found['cores'])})",
        "`python bench/compile_throughput.py --jobs 20`",
    )


def triton_compile_phase(stored: Stored) -> Row:
    found = stored.one("triton_throughput")
    return Row(
        "Compile phase (Triton, fla's `chunk_kda`), against the same jobs one at a time",
        f"{found['ratio']:.2f} ({found['jobs']} jobs, {_cores(found['cores'])})",
        "`python bench/triton_throughput.py`",
    )


def published_table(stored: Stored) -> Row:
    found = stored.one("published_b200")
    extra = "; ".join(
        f"{version} adds M={', '.join(map(str, values))}" for version, values in found["also_at"].items()
    )
    return Row(
        "Published B200 table: where the coarse grid leaves a layout, none for the 16-row grid",
        f"{'' if found['reproduced'] else 'not '}reproduced from traces, {_number(found['shapes'])} shapes, "
        f"both DeepGEMM lines; {extra}",
        "`pytest tests/null/test_deep_gemm_provider_published.py`",
    )


def deep_gemm_on_h200(stored: Stored) -> Row:
    found = stored.one("deep_gemm_h200")
    *others, first = sorted(row["worst_ms"] for row in found["rows"])
    calls = sum(row["calls"] for row in found["rows"])
    return Row(
        "H200, DeepGEMM after `warm` on the null device: six dense FP8 sizes, experts in both layouts, BF16, "
        f"indexer logits; {calls:,} calls in a real process",
        f"{found['variants']} variants made in {seconds(found['warm']['compile_wall_s'])} on 16 cores; "
        f"{len(found['new_entries'])} new entries, nvcc started {found['nvcc_started']} times; first call of "
        f"the process {first:.0f} ms, every other at most {max(others):.1f} ms",
        "`pytest tests/gpu/test_deep_gemm.py`",
    )


def winners(name: str, what: str, reproduce: str) -> Callable[[Stored], Row]:
    """First calls with candidates alone and with measured winners."""

    def row(stored: Stored) -> Row:
        found = stored.one(f"triton_winners_{name}")
        first, seeded, after = (found[key] for key in ("first_process", "seeded_process", "next_process"))
        return Row(
            what,
            f"{first['first_call_s']:.1f} s with candidates made ahead ({len(first['new_entries'])} "
            f"compiles, {first['benchmarks']} benchmarks); {seeded['first_call_s']:.2f} s with winners too "
            f"({seeded['benchmarks']} benchmarks), {after['first_call_s']:.2f} s in the next process",
            reproduce,
        )

    return row


def first_contact(stored: Stored) -> Row:
    cells = []
    for family, title in (("kda", "KDA H=32"), ("mamba", "Mamba2 H=128")):
        firsts = []
        for arm in ("cold", "candidates", "winners"):
            run = stored.latest("first_contact", family=family, arm=arm)
            firsts.append(_firsts(run["engine"]) if run else "-")
        cells.append(f"{title}: " + ", ".join(firsts))
    return Row(
        "H200, first aligned and first ragged batch of a process: cold; candidates prefetched; winners too",
        "; ".join(cells),
        "`python bench/first_contact.py`",
    )


def _firsts(engine: dict[str, Any]) -> str:
    return " + ".join(seconds(engine[batch]["seconds"]) for batch in ("aligned", "ragged"))


def replayed_traffic(stored: Stored) -> Row:
    names = {
        "without": "warm-up in the engine, no prefetchd",
        "live": "prefetchd beside, nothing known before",
        "ready": "`prefetchd warm` before",
    }
    cells = []
    for arm, name in names.items():
        if run := stored.latest("traffic_replay", arm=arm):
            figures, ttft = run["figures"], run["figures"]["ttft_s"]
            times = (figures["first_request_s"], ttft["p50"], ttft["p99"], figures["longest_step_s"])
            cells.append(f"{name}: " + ", ".join(map(seconds, times)))
    return Row(
        "H200, a hybrid model's kernels under traffic from its first minute: start until the first request, "
        "time to first token p50 and p99, longest step",
        "; ".join(cells) or "-",
        "`python bench/traffic_replay.py` ([all arms](docs/benchmarks.md))",
    )


def cute_loads(stored: Stored) -> Row:
    found = stored.one("cute_load")
    own, later = found["inline_compiles_s"], max(found["later_loads_ms"])
    while_compiling = found["wait_while_compiling_ms"] / 1000
    return Row(
        f"FlashInfer's KDA and GDN (CuTe DSL) for {found['target'].upper()} after `warm` on the null device: "
        f"{found['warm']['compiled']} kernels, {found['misses'] or 'no'} misses in an engine that may not "
        "compile",
        f"first load {found['first_load_ms']:.1f} ms, every other at most {later:.1f} ms (the engine's own "
        f"compiles: {min(own):.1f} to {max(own):.1f} s); another thread waits "
        f"{found['wait_while_loading_ms']:.1f} ms, beside a compile {while_compiling:.1f} s",
        "`python bench/cute_load.py`",
    )


def planner(stored: Stored) -> Row:
    run = stored.latest("scaling", part="step")
    if run is None:
        raise LookupError("scaling.json has no run of its part `step`")
    found = run["figures"]["figures"]["deepseek-v3"]["steady32"]
    ours, plain = found["on_schedule_us"], found["dictionary_us"]
    return Row(
        "`Planner.on_schedule`, nothing new, 32 prefills and 256 decodes, DeepSeek-V3",
        f"p50 {ours['p50']:.1f} us, p99 {ours['p99']:.1f} us (a dictionary look-up: {plain['p50']:.1f} us)",
        "`python bench/planner.py`, `python bench/scaling.py step`",
    )


def chaos(stored: Stored) -> Row:
    found = stored.one("chaos")
    return Row(
        f"{found['rounds']} rounds of kill -9 among helper, compile, daemon and engine",
        "nothing lost, no process or incomplete entry left; `on_schedule` p99 "
        f"{found['on_schedule']['p99_us']} us throughout",
        "`make chaos`",
    )


TESTS = "`pytest tests/gpu/test_triton_winners.py`"
ROWS: tuple[Callable[[Stored], Row], ...] = (
    traced_model,
    warmed_model,
    compile_phase,
    triton_compile_phase,
    published_table,
    deep_gemm_on_h200,
    winners("kda-32", "H200, fla `chunk_kda` H=32: first call of a real process", TESTS),
    winners("kda-4", "the same, `chunk_kda` H=4", "as above"),
    winners("gdn", "the same, gated delta rule", "as above"),
    winners("mamba", "the same, Mamba2 scan H=128, chunk 256", "as above"),
    first_contact,
    replayed_traffic,
    cute_loads,
    planner,
    chaos,
)


def results(stored: Stored) -> str:
    """The README's table."""
    return table(Row._fields, (row(stored) for row in ROWS))


def _cores(count: int) -> str:
    return f"{_number(count)} cores"


def _number(count: int) -> str:
    return ("no", "one", "two", "three", "four")[count] if count < 5 else str(count)
