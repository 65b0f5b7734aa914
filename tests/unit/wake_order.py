"""Who runs first after a wake-up, with a switch interval nobody reaches: run as a program of its own."""

from __future__ import annotations

import select
import sys
import threading
import time

from prefetchd.wakeup import Wakeup

order: list[str] = []
wakeup = Wakeup()
waiting = threading.Event()


def woken() -> None:
    waiting.set()
    select.select([wakeup.fileno()], [], [])
    order.append("woken")


sys.setswitchinterval(60.0)
thread = threading.Thread(target=woken)
thread.start()
waiting.wait()
# The other thread has given the lock back, so it is in its system call or about to be.
wakeup.set()
begun = time.perf_counter()
while time.perf_counter() - begun < 0.05:
    pass
order.append("waker")
thread.join()
print("\n".join(order))
