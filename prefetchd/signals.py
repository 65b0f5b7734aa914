"""A supervisor's SIGTERM and a closed terminal end a command as cleanly as Ctrl-C does."""

from __future__ import annotations

import asyncio
import signal


def cancel_on_signals() -> None:
    """From now on they cancel the running task; Ctrl-C is asyncio.run's own."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
