"""How often a woken thread runs before its waker has gone on, on one core: run as a program of its own.

With a system call that releases the interpreter lock it is every fifth time.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time

from prefetchd.client.wakeup import Wakeup

ROUNDS = 300
wakeup = Wakeup()
woken = 0


def count() -> None:
    global woken
    while True:
        select.select([wakeup.fileno()], [], [])
        woken += 1
        wakeup.clear()


os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
# Longer than the program: the lock changes hands only where it is given away.
sys.setswitchinterval(60.0)
threading.Thread(target=count, daemon=True).start()
overtaken = 0
for _ in range(ROUNDS):
    # Lets the other thread get back to its waiting.
    time.sleep(0.0005)
    before = woken
    wakeup.set()
    overtaken += woken != before
print(overtaken, "of", ROUNDS, flush=True)
os._exit(0)
