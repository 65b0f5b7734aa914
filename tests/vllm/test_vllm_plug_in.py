"""What the plug-in does to a vLLM that is only imported: nothing, unless it is switched on."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; make test-vllm"),
]
if find_spec("vllm") is not None:
    from vllm_place import BIN, Place

SCRIPT = Path(__file__).with_name("vllm_import.py")
# What importing vLLM may cost more with the plug-in installed.
MOST_S = 0.005
HOOKED = [
    "EngineCore.__init__",
    "Worker.load_model",
    "Worker.initialize_from_config",
    "Worker.compile_or_warm_up_model",
    "kernel_warmup",
]


def imported(place: Place, **variables: str) -> Any:
    done = subprocess.run(
        [str(BIN / "prefetchd"), "null", "--target", "h200", "--", sys.executable, str(SCRIPT)],
        env=place.environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_switched_off_it_costs_milliseconds_and_hooks_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path / "off", "kimi-linear")

    found = [imported(place) for _ in range(3)]

    # The best of three: on a shared machine the others say how busy it was.
    assert min(one["seconds"] for one in found) < MOST_S
    assert [one["hooked"] for one in found] == [[], [], []]
    # The entry point's own file, and no more than the package it lies in.
    null_device = {name for name in found[0]["ours"] if name.startswith("prefetchd_null")}
    assert set(found[0]["ours"]) - null_device == {"prefetchd", "prefetchd.engines", "prefetchd.engines.vllm"}


def test_switched_on_it_hooks_what_it_needs(tmp_path: Path) -> None:
    assert imported(Place(tmp_path / "on", "kimi-linear"), PREFETCHD="1")["hooked"] == HOOKED
