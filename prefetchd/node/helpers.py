"""One group's helper, kept alive: started when there is something to trace, watched, replaced.

A helper may refuse, hang, be killed or grow; none of that may lose an order. So an order that a helper had
when it ended goes back to the broker, a helper that stops reading is ended like one that died, and each new
try waits twice as long as the one before. The subtle rule: a helper is only replaced on purpose (too many
traces, too much memory, another family wanted) when nothing is in flight in it.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from prefetchd.broker.types import TraceOrder
from prefetchd.null_device.guard import NullDeviceBroken
from prefetchd.store import StoreUnwritable
from prefetchd.sweeps import Sweep
from prefetchd.trace import Mode, Ready, Report
from prefetchd.tracer import HelperFailed

log = logging.getLogger("prefetchd.daemon")

# A helper answers a ping within a millisecond; one that forks a large process, within a tenth of a second.
PING_EVERY_S = 5.0
PING_LIMIT_S = 15.0
# Between tries: long enough that a helper which dies at once costs nothing, short enough that a lost one is
# hardly missed.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Near(Protocol):
    """The near side of a running helper; `Tracer` is one."""

    ready: Ready

    async def trace_all(self, provider: str, sweeps: Sequence[Sweep], mode: Mode) -> Report:
        """See `Tracer`."""
        ...

    async def answers(self, limit_s: float) -> bool:
        """See `Tracer`."""
        ...

    async def ended(self) -> None:
        """See `Tracer`."""
        ...


class Desk(Protocol):
    """Where a helper gets its orders and leaves what came of them."""

    def next_order(self) -> TraceOrder | None:
        """The next order of this group."""
        ...

    def traced(self, order: TraceOrder, report: Report) -> None:
        """The report of an order."""
        ...

    def lost(self, order: TraceOrder, reason: str) -> None:
        """The helper that had it is gone."""
        ...

    def ready(self, ready: Ready) -> None:
        """A helper is up, and what it found."""
        ...


class HelperState(StrEnum):
    """What a person sees of a helper."""

    IDLE = "idle"  # nothing was asked of it yet
    STARTING = "starting"
    UP = "up"
    PAUSED = "paused"  # it ended or did not start, and is tried again
    ENDED = "ended"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When a helper is replaced on purpose, and how many traces it runs at a time."""

    at_once: int
    max_traces: int
    max_rss_bytes: int
    first_pause_s: float = FIRST_PAUSE_S
    ping_every_s: float = PING_EVERY_S
    ping_limit_s: float = PING_LIMIT_S


# Makes the near side of a new helper for these providers.
Start = Callable[[tuple[str, ...]], AbstractAsyncContextManager[Near]]


class Helper:
    """`run` keeps one helper alive until it is cancelled; everything else may be called meanwhile."""

    def __init__(self, name: str, start: Start, desk: Desk, limits: Limits) -> None:
        self.name = name
        self.state = HelperState.IDLE
        self.restarts = self.recycled = self.traces = 0
        self.pid: int | None = None
        self.problem = ""
        self._start = start
        self._desk = desk
        self._limits = limits
        self._providers: tuple[str, ...] = ()
        self._work = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    def want(self, providers: tuple[str, ...]) -> None:
        """These families are needed too."""
        more = tuple(name for name in dict.fromkeys(providers) if name not in self._providers)
        if more:
            self._providers += more
            self._work.set()

    def wake(self) -> None:
        """There may be an order."""
        self._work.set()

    @property
    def rss_bytes(self) -> int:
        """What the helper's own process holds; 0 while there is none."""
        return 0 if self.pid is None else rss_bytes(self.pid)

    async def run(self) -> None:
        """Returns only by cancellation; then the helper is gone and its orders are given back."""
        pause = self._limits.first_pause_s
        try:
            while True:
                while not self._providers:
                    await self._wait_for_work()
                begun = self.traces
                self.state = HelperState.STARTING
                if await self._one_life():
                    self.recycled += 1
                    pause = self._limits.first_pause_s
                    continue
                self.restarts += 1
                if self.traces > begun:
                    pause = self._limits.first_pause_s
                self.state = HelperState.PAUSED
                log.warning("helper %s: %s; trying again in %.0f s", self.name, self.problem, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:
            self.state = HelperState.ENDED

    async def _one_life(self) -> bool:
        """One helper from start to end; True if it was ended on purpose."""
        providers = self._providers
        try:
            async with self._start(providers) as near:
                self.pid, self.problem, self.state = near.ready.pid, "", HelperState.UP
                self._desk.ready(near.ready)
                try:
                    return await self._serve(near, providers)
                finally:
                    self.pid = None
        except (HelperFailed, NullDeviceBroken, StoreUnwritable, OSError) as error:
            self.problem = str(error)
            return False
        finally:
            # The helper is gone, and whoever still waits for its answer waits in vain.
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            self._running.clear()

    async def _serve(self, near: Near, providers: tuple[str, ...]) -> bool:
        """Until the helper ended by itself (False) or is to be replaced and has nothing in flight (True)."""
        done = 0
        ended = _task(near.ended())
        pings = _task(self._ping(near))
        try:
            while True:
                due = (
                    providers != self._providers
                    or done >= self._limits.max_traces
                    # One that is too large before its first trace would be replaced for ever.
                    or (done > 0 and self.rss_bytes > self._limits.max_rss_bytes)
                )
                if due and not self._running:
                    return True
                while not due and len(self._running) < self._limits.at_once:
                    order = self._desk.next_order()
                    if order is None:
                        break
                    done += 1
                    self._running.add(_task(self._trace(near, order)))
                work = _task(self._wait_for_work())
                await asyncio.wait({ended, pings, work, *self._running}, return_when=asyncio.FIRST_COMPLETED)
                work.cancel()
                self._running = {task for task in self._running if not task.done()}
                if ended.done():
                    await asyncio.gather(*self._running)
                    self.problem = self.problem or "it ended"
                    return False
                if pings.done():
                    self.problem = f"it did not answer for {self._limits.ping_limit_s:.0f} s"
                    return False
        finally:
            ended.cancel()
            pings.cancel()

    async def _trace(self, near: Near, order: TraceOrder) -> None:
        report: Report | None = None
        try:
            report = await near.trace_all(order.provider, order.sweeps, "capture")
        finally:
            if report is None or report.lost:
                if report is not None:
                    self.problem = report.failures[0].text
                self._desk.lost(order, self.problem or "it was ended")
            else:
                self.traces += 1
                self._desk.traced(order, report)

    async def _ping(self, near: Near) -> None:
        """Returns when the helper no longer answers."""
        while True:
            await asyncio.sleep(self._limits.ping_every_s)
            if not await near.answers(self._limits.ping_limit_s):
                return

    async def _wait_for_work(self) -> None:
        await self._work.wait()
        self._work.clear()


def rss_bytes(pid: int) -> int:
    """The resident memory of a process; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * resource.getpagesize()


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work)
