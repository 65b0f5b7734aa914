"""Long work beside an event loop that can be cancelled: signals are handled by the loop, not by the work.

A command whose loop computes for a minute hears no Ctrl-C and no SIGTERM for a minute.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """The task that waits for the work was cancelled."""


async def interruptible(work: Callable[[Callable[[], None]], T]) -> T:
    """What `work` returns, done in a thread. It is given a function to call between its steps, which raises
    `Interrupted` as soon as this task is cancelled.
    """
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise Interrupted

    task = asyncio.ensure_future(asyncio.to_thread(work, check))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait({task})
        # Seen, so that the loop does not complain of an error that nobody fetched.
        task.exception()
        raise
