"""What following vLLM's real scheduler costs it, in its own loop and without any model."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; make test-vllm"),
]
if find_spec("vllm") is not None:
    from vllm_place import BIN, Place
    from vllm_results import note

BENCH = Path(__file__).parents[2] / "bench/vllm_scheduler.py"
# Of the loop's time, at 256 running requests.
MOST_SHARE = 0.01


def test_following_the_scheduler_takes_less_than_a_hundredth_of_its_loop(tmp_path: Path) -> None:
    place = Place(tmp_path / "home", "kimi-linear")
    done = subprocess.run(
        [str(BIN / "prefetchd"), "null", "--target", "h200", "--", sys.executable, str(BENCH)],
        env=place.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.stdout, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["share"] < MOST_SHARE
    assert figures["errors"] == 0
    note("scheduler", figures=figures)
    print(figures)
