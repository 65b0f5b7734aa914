"""Kernels of the CuTe DSL that were compiled on the null device, launched by a real one without the DSL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefetchd.targets import Target

# The directory that `cute_link.py` filled on a machine with the DSL.
VARIABLE = "PREFETCHD_TEST_CUTE_OBJECTS"
# Single precision against double, over sums of 32.
TOLERANCE = 1e-4


def test_kernels_of_the_null_device_compute_what_torch_does(device: Target) -> None:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} is not set: fill a directory by tests/gpu/cute_link.py where the DSL is")
    if device.capability != 90:
        pytest.skip(f"the kernels are for sm_90a, this is {device.name}")
    pytest.importorskip("tvm_ffi")
    script = Path(__file__).with_name("cute_run.py")

    done = subprocess.run(
        [sys.executable, str(script), named], capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert set(answer["differences"]) == {"scale", "decode"}
    assert max(answer["differences"].values()) < TOLERANCE
    assert answer["dsl_imported"] is False
