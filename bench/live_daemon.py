"""A real `prefetchd serve` in a process of its own, for measurements: started, asked, stopped, killed.

It lives in one directory: socket, temporary files, log, home. That directory as HOME is also the mark by
which every process that belongs to it is found, since both helpers and compiles inherit HOME. The subtle
rule: a zombie is not alive; it holds nothing, and whoever must wait for it may be init.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import zmq

from prefetchd.protocol import Stats, StatsQuery, decode, encode

# A daemon serves within a second of its start; far more than that, and it never will.
START_S = 60.0
ANSWER_MS = 20_000
STOP_S = 60.0
POLL_S = 0.02

T = TypeVar("T")


class Failed(Exception):
    """What was measured did not happen; the text says what, with the end of the daemon's log."""


class Process(NamedTuple):
    """A living process, as /proc has it."""

    pid: int
    parent: int
    command: str


class LiveDaemon:
    """The daemon of one directory. `start` may be called again after any end."""

    def __init__(
        self, place: Path, environment: Mapping[str, str] = {}, prefix: tuple[str, ...] = ()
    ) -> None:
        self.place = place
        # What runs the daemon's command, as another user for example.
        self._prefix = prefix
        self.address = f"ipc://{place}/daemon"
        self.temporary = place / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "TMPDIR": str(self.temporary),
            "PREFETCHD_ENDPOINT": self.address,
            "PREFETCHD_METRICS": "127.0.0.1:0",
            **environment,
        }
        self.log = place / "daemon.log"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0

    @property
    def pid(self) -> int:
        """The running daemon's."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Returns once it answers. Raises `Failed`."""
        self._log_begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "prefetchd", "serve"],
                env=self.environment, cwd=self.place, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.wait_for(self.served, START_S, "the daemon does not serve")

    def served(self) -> bool:
        """Whether this start has got so far as to serve. Raises `Failed` when it has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise Failed(f"the daemon ended with status {self.process.returncode}: {self.tail()}")
        return "serving ipc://" in self._own_log()

    def stats(self) -> Stats:
        """Its figures. Raises `Failed` when it does not answer."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(self.address)
            socket.send(encode(StatsQuery(id=1)))
            if not socket.poll(ANSWER_MS):
                raise Failed(f"the daemon does not answer: {self.tail()}")
            answer = decode(socket.recv())
        finally:
            socket.close()
        if not isinstance(answer, Stats):
            raise Failed(f"the daemon answers a question for figures with {answer}")
        return answer

    def page(self, path: str) -> tuple[int, str]:
        """Status and text of a page of its window."""
        found = re.search(r"metrics on (http://\S+)/metrics", self._own_log())
        if found is None:
            raise Failed(f"the daemon has named no window: {self.tail()}")
        try:
            with urllib.request.urlopen(found[1] + path, timeout=ANSWER_MS / 1000) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; its exit status. Raises `Failed` when it does not end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failed(f"the daemon did not end within {STOP_S:.0f} s: {self.tail()}") from None

    def close(self) -> None:
        """Ends what is left of it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        self._context.term()

    def wait_for(self, condition: Callable[[], T], limit_s: float, what: str) -> T:
        """The first true answer. Raises `Failed`."""
        deadline = time.monotonic() + limit_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise Failed(f"{what} within {limit_s:.0f} s: {self.tail()}\n{self.scene()}")
            time.sleep(POLL_S)
        return found

    def scene(self) -> str:
        """What lives, what each process waits for, and what the daemon has open."""
        lines = [
            f"{each.pid} (of {each.parent}) {_waits_for(each.pid)}: {each.command[:200]}"
            for each in self.processes()
        ]
        try:
            figures = {name: value for name, value in self.stats().figures.items() if value}
        except Failed as error:
            return "\n".join([*lines, str(error)])
        return "\n".join([*lines, str(figures)])

    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def processes(self) -> list[Process]:
        """Everything alive that was started in this place, the daemon and engines included."""
        return list(_living(self.place))

    def family(self) -> list[Process]:
        """The living descendants of the daemon."""
        found, wanted = [], {self.pid}
        living = sorted(self.processes())
        while more := [process for process in living if process.parent in wanted and process not in found]:
            found += more
            wanted |= {process.pid for process in more}
        return found

    def tail(self) -> str:
        """The end of its log."""
        return self._own_log()[-3000:]

    def _own_log(self) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self._log_begin)
            return file.read().decode(errors="replace")


def _waits_for(pid: int) -> str:
    """Each thread's state and the kernel's function it sleeps in."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            found.append(f"{state} {(thread / 'wchan').read_text()}")
    return ", ".join(found)


def _living(home: Path) -> Iterator[Process]:
    mark = f"HOME={home}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark not in (place / "environ").read_bytes().split(b"\0"):
                continue
            # Behind the name, which may contain anything: state, parent.
            state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state not in "ZX":
            yield Process(int(place.name), int(parent), command.strip())
