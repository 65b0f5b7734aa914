"""Ends this process when its parent ends, by the kernel's own signal.

The signal comes when the parent *thread* that started us ends, so a starter must be a thread that lives as
long as its process. A parent that ended before the request was made is noticed by its pid.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Asks for SIGKILL at the parent's end; exits at once if `parent` (its pid) has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
