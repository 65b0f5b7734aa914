"""Tests that need a real device; elsewhere each says why it was not run."""

from __future__ import annotations

import pytest

from prefetchd.targets import Target, TargetError, probe_target


@pytest.fixture(scope="session")
def device() -> Target:
    """The real device, or a skip with the driver's own reason."""
    try:
        return probe_target()
    except TargetError as error:
        pytest.skip(f"needs a real GPU: {error}")
