"""A library that takes its process with it costs the request that did it, in both modes and both lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from warming import PREFETCHD, SMALL, SMALL_VARIANTS, TIME_LIMIT_S, Bench, Line, Warmed, site

SCRIPT = Path(__file__).with_name("crashing.py")
# Not checked by the library: without C it reads through a null pointer.
SEGMENTATION_FAULT = (
    site("crash", "einsum", 128, 128, "1")
    + 'groups = 2\n[gemms.options]\nexpr = "bmk,bnk->mn"\noutput = "float32"\n'
)

Warm = Callable[[Line, str], Warmed]
New = Callable[..., Bench]


def crashed(bench: Bench) -> dict[str, dict[str, Any]]:
    command = [str(PREFETCHD), "null", "--target", "h200", "--", sys.executable, str(SCRIPT)]
    done = subprocess.run(
        [*command, str(bench.place / "scratch")], env=bench.environment(),
        capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def test_trace_goes_on_behind_a_crash_with_all_it_found_before(
    warmed: Warm, new_bench: New, line: Line
) -> None:
    bench = warmed(line, "h200").copy(new_bench("crash", line))

    traces = crashed(bench)

    whole, broken, proof = traces["whole"], traces["broken"], traces["proof"]
    assert len(whole["keys"]) > 1
    assert whole["failures"] == []
    assert broken["keys"] == whole["keys"]
    assert proof["keys"] == []
    for trace in (broken, proof):
        asked = [(request.split()[1], kind) for request, kind, _ in trace["failures"]]
        assert asked == [("m=2", "crash"), ("m=64", "crash")]
        assert all("SIGSEGV" in text for _, _, text in trace["failures"])


def test_proof_goes_on_behind_a_crash_with_the_misses_found_before(new_bench: New, line: Line) -> None:
    proof = crashed(new_bench("crash", line))["proof"]

    assert [kind for _, kind, _ in proof["failures"]] == ["miss"] * 4
    assert proof["keys"]


def test_segmentation_fault_in_the_library_leaves_the_other_sites_covered(new_bench: New, line: Line) -> None:
    bench = new_bench("crash", line)
    bench.profile.write_text(SMALL + SEGMENTATION_FAULT)

    done = bench.warm()

    assert done.status == 1
    assert done.counts("compiled", "failed", "uncovered") == (SMALL_VARIANTS, 0, 1)
    (problem,) = done.figures["problems"]
    assert problem["kind"] == "crash"
    assert "SIGSEGV" in problem["text"]
