"""The observer's sink: its reports go to the shape log, the winners and the daemon, on another thread.

The engine's thread puts a report into a queue and goes on: a disk that is slow, full or read-only, and a
fingerprint that takes a second to work out, are this thread's affair. The subtle rule: a record must say what
it is valid for (fingerprint, device, rank), and none of that is known or cheap at the moment of a compile; so
it is filled in here.

Bounded: a full queue drops and counts. At the interpreter's exit the rest is written, within a limit.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from prefetchd.guard import Guard, guarded
from prefetchd.observer import Started
from prefetchd.protocol import Event
from prefetchd.shapelog import Ended, Line, LogUnusable, Published, Record, ShapeLog
from prefetchd.shapelog import Started as StartedLine
from prefetchd.winners import Winner, WinnersUnreadable, append_winners, known_in

log = logging.getLogger("prefetchd")

# An engine's first step without us compiles some hundred variants.
MAX_QUEUE = 4096
# How often what nobody announces is looked for (see `nvcc.py`).
TICK_S = 1.0
# An interpreter that exits waits this long for what is still to be written.
FLUSH_S = 2.0
WINNERS_FILE = "winners.jsonl"

Task = Callable[[], None]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What records of this process are valid for, by the name of a compiler where that matters."""

    fingerprints: Mapping[str, str] = {}
    gpu: str = ""
    capability: int = 0
    sm_count: int = 0


class Listener(Protocol):
    """Who tells the daemon."""

    def event(self, event: Event) -> bool:
        """Reports what the engine did."""
        ...


class Recorder:
    """One process's thread and what it writes; `origin` and `rank` are asked on it, when they are needed.

    Without a directory nothing is kept, and events still go to the daemon.
    """

    def __init__(
        self,
        directory: Path | None,
        origin: Callable[[], Origin],
        rank: Callable[[], int],
        *,
        max_bytes: int,
        max_queue: int = MAX_QUEUE,
    ) -> None:
        self.guard = Guard()
        self.dropped = 0
        # Where events go; there may be none, now or ever.
        self.listener: Listener | None = None
        self._ticks: list[Task] = []
        self._directory, self._origin, self._find_rank = directory, origin, rank
        self._max_bytes, self._max_queue = max_bytes, max_queue
        self._complained = False
        self._start_anew()

    def _start_anew(self) -> None:
        """At the beginning, and in a forked child, which has neither the thread nor what waited for it."""
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._log: ShapeLog | None = None
        self._rank = -1
        # What the file of winners is known to hold.
        self._winners: set[str] | None = None
        self.closed = False

    @guarded(None)
    def start(self) -> None:
        """Starts the thread now; otherwise the first report does."""
        if self._thread is not None or self.closed:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prefetchd-observer", daemon=True)
                self._thread.start()

    @guarded(False)
    def submit(self, task: Task) -> bool:
        """Has the thread do this. False where too much waits already, or after the end."""
        # What the thread's own last looks find is still written.
        ended = self.closed and threading.current_thread() is not self._thread
        if ended or self._queue.qsize() >= self._max_queue:
            self.dropped += 1
            return False
        self._queue.put(task)
        if self._thread is None:
            self.start()
        return True

    def every_second(self, tick: Task) -> None:
        """Has the thread do this every `TICK_S`, and once more at the end."""
        self._ticks.append(tick)
        self.submit(lambda: None)

    def began(self, started: Started) -> None:
        """See `observer.Sink`."""
        line = StartedLine(
            compiler=started.compiler,
            token=started.token,
            key=started.key,
            job_digest=started.digest,
            at=started.at,
            site=started.site,
        )
        self.submit(lambda: self._append(line))

    def over(self, token: int) -> None:
        """See `observer.Sink`."""
        line = Ended(token=token, at=time.time())
        self.submit(lambda: self._append(line))

    def found(self, started: Started) -> None:
        """See `observer.Sink`."""
        line = Published(compiler=started.compiler, key=started.key, at=started.at)
        self.submit(lambda: self._append(line))

    def record(self, record: Record) -> None:
        """See `observer.Sink`."""
        self.submit(lambda: self._append(record))

    def winner(self, winner: Winner) -> None:
        """See `observer.Sink`."""
        self.submit(lambda: self._add_winner(winner))

    def event(self, event: Event) -> None:
        """See `observer.Sink`; the client has a queue and a thread of its own."""
        if self.listener is not None:
            self.listener.event(event)

    @guarded(None)
    def close(self, seconds: float = FLUSH_S) -> None:
        """Writes what waits, for so long at most; later reports are dropped."""
        if self.closed:
            return
        if self._ticks:
            # A forked child has no thread until it reports something; its last look takes place all the same.
            self.start()
        self.closed = True
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    @guarded(None)
    def forget_parent(self) -> None:
        """In a forked child; the parent's log stays open and is not written to."""
        self._start_anew()

    def _run(self) -> None:
        due = time.monotonic() + TICK_S
        while True:
            try:
                task = self._queue.get(timeout=max(due - time.monotonic(), 0.0) if self._ticks else None)
            except queue.Empty:
                due = time.monotonic() + TICK_S
                for tick in self._ticks:
                    self._do(tick)
                continue
            if task is None:
                break
            self._do(task)
        for tick in self._ticks:
            self._do(tick)
        while not self._queue.empty():
            last = self._queue.get()
            if last is not None:
                self._do(last)

    def _do(self, task: Task) -> None:
        try:
            task()
        except Exception as error:
            self.guard.caught("writing down what the engine compiled", error)

    def _append(self, line: Line) -> None:
        opened = self._opened(self._find_rank())
        if opened is None:
            return
        if isinstance(line, Record):
            origin = self._origin()
            line = msgspec.structs.replace(
                line,
                fingerprint=origin.fingerprints.get(line.compiler, ""),
                gpu=origin.gpu,
                capability=origin.capability,
                sm_count=origin.sm_count,
            )
        opened.append(line)

    def _opened(self, rank: int) -> ShapeLog | None:
        """The log of this rank, which an engine may learn after its first compile; None: it has none."""
        if self._directory is None:
            return None
        if self._log is None or rank != self._rank:
            try:
                opened = ShapeLog(self._directory, socket.gethostname(), rank, max_bytes=self._max_bytes)
            except LogUnusable as error:
                self._complain(error)
                return None
            if self._log is not None:
                self._log.close()
            self._log, self._rank = opened, rank
        return self._log

    def _add_winner(self, winner: Winner) -> None:
        # Opening the log is what makes the directory, private.
        if self._opened(self._find_rank()) is None or self._directory is None:
            return
        path = self._directory / WINNERS_FILE
        try:
            if self._winners is None:
                # Once: a file of many runs takes a tenth of a second, and the engine's threads wait.
                self._winners = known_in(path)
            append_winners(path, [winner], self._winners)
        except WinnersUnreadable as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        self.dropped += 1
        if not self._complained:
            self._complained = True
            log.warning("prefetchd: %s. What this engine compiles is not kept for its next start", error)
