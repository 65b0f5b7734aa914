"""What a service manager wants to hear: ready, alive, stopping. One datagram each, as sd_notify(3) has it.

Without `NOTIFY_SOCKET` every call does nothing. A manager that does not listen is no reason to fail.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class Notifier:
    """Speaks to the manager that started this process."""

    def __init__(self, environment: Mapping[str, str], pid: int | None = None) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog(environment, os.getpid() if pid is None else pid)

    def ready(self, status: str) -> None:
        """The service serves."""
        self._send(f"READY=1\nSTATUS={status}")

    def alive(self, status: str) -> None:
        """Not sent for `watchdog_s` seconds, the manager ends us; twice as often is recommended."""
        self._send(f"WATCHDOG=1\nSTATUS={status}" if self.watchdog_s else f"STATUS={status}")

    def stopping(self) -> None:
        """The service ends on purpose."""
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if not self._address.startswith(("/", "@")):
            return
        # An abstract address begins with a zero byte, which a variable cannot hold.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.setblocking(False)
            manager.sendto(text.encode(), address)


def _watchdog(environment: Mapping[str, str], pid: int) -> float:
    """Seconds between signs of life at most; 0 where none are wanted from this process."""
    try:
        limit = int(environment.get("WATCHDOG_USEC", "0")) / 1e6
        meant = int(environment.get("WATCHDOG_PID", str(pid)))
    except ValueError:
        return 0.0
    return limit if meant == pid else 0.0
