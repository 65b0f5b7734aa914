"""Lets a forked child go on using the null device its parent had.

torch refuses CUDA in a child of a process that has touched it, since a real driver's state does not survive
a fork. The null device's does: it is ordinary memory. The subtle rule: torch must then be initialised as a
whole before the fork, because a half-touched one (a library that asked for the device count at import) is
refused by an assertion that cannot be lifted.
"""

from __future__ import annotations

import sys

from prefetchd.null_device.guard import require_null_device


def survive_forks() -> None:
    """Prepares this process, if torch is imported in it. Raises `NullDeviceBroken` off the null device."""
    require_null_device()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.init()
        torch.cuda._is_in_bad_fork = lambda: False
