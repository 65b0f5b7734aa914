"""The allocator is told now and then to give back what the daemon no longer uses.

glibc keeps a freed page as long as anything above it in its heap is in use, so a burst of large messages, or
of many peers, would be counted as the daemon's for ever. The subtle rule: heaps are per thread, and what one
thread frees another's heap keeps; so there are few of them, which is set before any thread is started.
"""

from __future__ import annotations

import ctypes
from typing import Any

# malloc.h
_M_ARENA_MAX = -8
# The loop's own heap, and one for the threads that look at disks and carry sockets.
ARENAS = 2
# Going through a heap of 100 MB takes about a millisecond.
TRIM_EVERY_S = 2.0


class Allocator:
    """glibc's; with another library nothing is done, and nothing fails."""

    def __init__(self, libc: Any = None) -> None:
        libc = libc or ctypes.CDLL(None)
        self._limit = getattr(libc, "mallopt", None)
        self._trim = getattr(libc, "malloc_trim", None)
        self._next = 0.0

    def use_few_heaps(self) -> None:
        """From here on; heaps that are there stay."""
        if self._limit is not None:
            self._limit(_M_ARENA_MAX, ARENAS)

    def give_back(self, now: float) -> bool:
        """Returns unused memory to the system, if it is time for it (monotonic seconds)."""
        if self._trim is None or now < self._next:
            return False
        self._next = now + TRIM_EVERY_S
        self._trim(0)
        return True
