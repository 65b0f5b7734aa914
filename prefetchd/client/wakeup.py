"""Waking a thread that waits on sockets, from a thread that must not lose a microsecond.

The subtle rule: the writing system call keeps the interpreter lock. Python's own calls (`os.eventfd_write`, a
socket's send) release it, and then the woken thread takes it, works, and gives it back only after Python's
switch interval of 5 ms: the caller would stand still that long. An eventfd that is not blocking returns at
once, so nothing is lost by keeping the lock, and the other thread begins when the caller next blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_ONE = (1).to_bytes(8, "little")

_write = ctypes.PyDLL(None).write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Wakeup:
    """`set` from any thread, `clear` in the one that polls `fileno()`."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_set = False

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._descriptor

    def set(self) -> None:
        """Wakes the poller, once however often it is called before `clear`."""
        if not self._is_set:
            self._is_set = True
            _write(self._descriptor, _ONE, 8)

    def clear(self) -> None:
        """To be called before looking for work, so that work which arrives meanwhile wakes again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
        self._is_set = False

    def __del__(self) -> None:
        # Not earlier: a descriptor closed under somebody who still calls `set` may be another file by then.
        os.close(self._descriptor)
