"""A timing taken on the null device is made up, and an engine believes what it finds: none is ever kept.

fla asks for results to be kept unless it is told otherwise. So everything that tells it otherwise is taken
away here, one protection at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("fla")

from prefetchd.null_device.launcher import KEEP_NO_TIMINGS, SITE, environment
from prefetchd.targets import load_target

PROCESS = Path(__file__).with_name("no_timings_process.py")
LIMIT_S = 300


def steps(place: Path, *names: str, guarded: bool) -> list[dict[str, Any]]:
    """What each step found, with fla's own defaults, with or without the guard in every Python."""
    base = {"PATH": os.environ["PATH"], "HOME": str(place), "TRITON_CACHE_DIR": str(place / "cache")}
    child = environment(load_target("h200"), base)
    for variable in KEEP_NO_TIMINGS:
        del child[variable]
    if not guarded:
        assert child["PYTHONPATH"] == str(SITE)
        del child["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, str(PROCESS), "h200", str(place), *names],
        env=child,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_program_on_the_null_device_keeps_no_timings(tmp_path: Path) -> None:
    (ran,) = steps(tmp_path, "run", guarded=True)

    assert ran == {"asks": True, "candidates": 0, "kept": []}
    # It has measured: all candidates are there.
    assert len(list((tmp_path / "cache").glob("*/__grp__*.json"))) == 4


def test_trace_keeps_no_timings_even_where_nothing_else_forbids_it(tmp_path: Path) -> None:
    traced, ran = steps(tmp_path, "trace", "run", guarded=False)

    assert traced == {"asks": True, "candidates": 4, "kept": []}
    # The check can fail: outside of the trace the same kernel, unguarded, does keep them.
    assert ran["kept"] == ["chunk_local_cumsum_scalar_kernel.autotune.json"]
