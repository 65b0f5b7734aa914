"""A daemon in the test's own process, engines on its real socket, a helper and a compiler of sh.

Everything between is the real thing: sockets, broker, job runner, cache directories. A sweep of the fake
helper is a `fp8_gemm_nt`, whose `n` names the variant; what its compile does is a line of shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
import zmq
import zmq.asyncio

from prefetchd import compilers
from prefetchd.compilers.base import Capture, Command, Compiler, EntryState, Job
from prefetchd.config import Settings
from prefetchd.daemon import Daemon
from prefetchd.node import attaching, groups
from prefetchd.node.allow import own_library_directories
from prefetchd.node.helpers import Desk, Helper, Limits, Start
from prefetchd.node.state import Node
from prefetchd.protocol import (
    Hello,
    Message,
    Plan,
    Stats,
    StatsQuery,
    Sweep,
    Welcome,
    decode,
    encode,
    encode_sweeps,
)
from prefetchd.requests.deep_gemm import Fp8GemmNt
from prefetchd.store import publish_directory
from prefetchd.targets import Target, load_target
from prefetchd.trace import Failure, Mode, Ready, Report
from prefetchd.tracer import HelperFailed

# Only a failed test waits this long.
LIMIT_S = 20.0
VARIABLE = "TEST_SHELL_CACHE"
PROVIDER = "fake"

M = TypeVar("M", bound=Message)


class ShellCompiler(Compiler):
    """Its payload is a line of shell that leaves `out`, with `good` in it, in the working directory."""

    name = "shell"
    cache_variable = VARIABLE
    # By key, what its compile does before it writes.
    hooks: ClassVar[dict[str, str]] = {}

    def __init__(self, target: Target, environment: Mapping[str, str]) -> None:
        self._root = Path(environment.get(VARIABLE, "/nonexistent/cache"))

    def fingerprint(self) -> Mapping[str, str]:
        return {}

    def cache_root(self) -> Path:
        return self._root

    @contextmanager
    def capture(self, scratch: Path) -> Iterator[Capture]:
        raise AssertionError("the daemon traces nothing itself")

    forbid = capture

    def compile(self, job: Job, staging: Path) -> Command:
        (staging / "entry").mkdir()
        argv = ("sh", "-c", job.payload.decode())
        return Command(argv=argv, environment={"PATH": os.environ["PATH"]}, directory=staging / "entry")

    def verify(self, job: Job, staging: Path) -> None:
        assert (staging / "entry/out").read_text() == "good"

    def entry_path(self, key: str, root: Path) -> Path:
        return root / "cache" / key

    def state(self, key: str, root: Path) -> EntryState:
        there = (self.entry_path(key, root) / "out").exists()
        return EntryState.PUBLISHED if there else EntryState.MISSING

    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        return publish_directory(staging / "entry", self.entry_path(job.key, root))


class FakeHelper:
    """A helper of the test. What the class holds is what all of them do."""

    started: ClassVar[list[FakeHelper]] = []
    refuse: ClassVar[str] = ""
    # Shell that runs before `out` is written, for every variant.
    hook: ClassVar[str] = "true"
    facts: ClassVar[dict[str, dict[str, str]]] = {}

    def __init__(self, providers: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.providers, self.environment = providers, environment
        self.traced: list[int] = []
        # The same by order.
        self.batches: list[list[int]] = []
        self.holds = False
        self.deaf = False
        self._end = asyncio.Event()
        self._waiting: list[asyncio.Future[Report]] = []
        self.ready = Ready(pid=os.getpid(), unavailable={}, fingerprints=self.facts)

    async def __aenter__(self) -> FakeHelper:
        FakeHelper.started.append(self)
        if FakeHelper.refuse:
            raise HelperFailed(FakeHelper.refuse)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end.set()

    async def trace_all(self, provider: str, sweeps: Sequence[Sweep], mode: Mode) -> Report:
        numbers = [sweep.request.n for sweep in sweeps if isinstance(sweep.request, Fp8GemmNt)]
        assert len(numbers) == len(sweeps)
        self.traced += numbers
        self.batches.append(numbers)
        if self.holds:
            future: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            return await future
        return Report(id=0, seconds=0.0, jobs=tuple(job(n, self.hook) for n in numbers))

    async def answers(self, limit_s: float) -> bool:
        return not self.deaf

    async def ended(self) -> None:
        await self._end.wait()

    def die(self) -> None:
        """As if it had been killed: what waits is answered as lost."""
        failure = Failure(request="x", kind="crash", text="it was killed")
        for future in self._waiting:
            future.set_result(Report(id=0, seconds=0.0, failures=(failure,), lost=True))
        self._end.set()


def job(n: int, hook: str = "true") -> Job:
    return Job(compiler="shell", key=f"key{n}", payload=f"{hook} && printf good >out".encode())


def sweep(n: int) -> Sweep:
    return Sweep(Fp8GemmNt(m=1, n=n, k=128))


def plan(id: int, *ns: int, **options: Any) -> Plan:
    return Plan(id=id, requests={PROVIDER: encode_sweeps([sweep(n) for n in ns])}, **options)


class Engine:
    """One connection, driven by the test."""

    # Those that `run` closes, if their test failed before it did: the garbage collector would wait for them.
    left_open: ClassVar[list[Engine]] = []

    def __init__(self, address: str, prepare: Callable[[zmq.asyncio.Socket], None] = lambda _: None) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        prepare(self.socket)
        self.socket.connect(address)
        self.heard: list[Message] = []
        Engine.left_open.append(self)

    async def send(self, message: Message) -> None:
        await self.socket.send(encode(message))

    async def next(self, kind: type[M]) -> M:
        """The next message of this kind; the others are kept in `heard`."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                message = decode((await self.socket.recv_multipart())[-1])
                self.heard.append(message)
                if isinstance(message, kind):
                    return message

    async def attach(self, root: Path | None = None, **fields: Any) -> Welcome:
        await self.send(hello(root, **fields))
        return await self.next(Welcome)

    def close(self) -> None:
        self._context.destroy(linger=0)
        if self in Engine.left_open:
            Engine.left_open.remove(self)


def hello(root: Path | None = None, **fields: Any) -> Hello:
    base: dict[str, Any] = {
        "engine": "test",
        "pid": os.getpid(),
        "generation": "first",
        "target": load_target("h200"),
        "interpreter": sys.executable,
        "library_directories": own_library_directories(),
    }
    if root is not None:
        base["cache_roots"] = {"shell": (str(root),)}
    return Hello(**{**base, **fields})


class Place:
    """Where a daemon of a test lives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = f"ipc://{directory}/daemon"
        self.environment = {"HOME": str(directory), "PATH": os.environ["PATH"]}

    def root(self, name: str = "cache") -> Path:
        path = self.directory / name
        path.mkdir(exist_ok=True)
        return path

    def settings(self, **changes: Any) -> Settings:
        base: dict[str, Any] = {"endpoint": self.address, "metrics": "off", "jobs": 2, "stop_timeout_s": 5.0}
        return Settings(**{**base, **changes})

    @asynccontextmanager
    async def serving(self, **changes: Any) -> AsyncIterator[Daemon]:
        """A daemon that serves inside the block and has ended behind it."""
        daemon = Daemon(self.settings(**changes), self.environment)
        running = asyncio.create_task(daemon.run())
        engine = Engine(self.address)
        try:
            await asyncio.wait(
                {running, asyncio.create_task(engine.attach(target=None))}, return_when="FIRST_COMPLETED"
            )
            if running.done():
                await running
            engine.close()
            yield daemon
        finally:
            daemon.end()
            async with asyncio.timeout(LIMIT_S):
                await running

    def leftovers(self) -> list[Path]:
        """Whatever a daemon may not leave behind."""
        found = [*self.directory.rglob("owner-*"), *self.directory.glob("daemon")]
        return found


class Clock:
    """Puts a node's clock ahead."""

    def __init__(self, node: Node) -> None:
        self._offset = 0.0
        real = node.clock
        node.clock = lambda: real() + self._offset

    def ahead(self, seconds: float) -> None:
        self._offset += seconds


async def figures(engine: Engine) -> dict[str, float]:
    await engine.send(StatsQuery(id=1))
    return dict((await engine.next(Stats)).figures)


async def still_serves(place: Place) -> Stats:
    """Asks a daemon for its figures by a connection of its own."""
    engine = Engine(place.address)
    await engine.send(StatsQuery(id=9))
    found = await engine.next(Stats)
    engine.close()
    return found


def soon_again(name: str, start: Start, desk: Desk, limits: Limits) -> Helper:
    """A helper that is not paused for long when it fails."""
    return Helper(name, start, desk, msgspec.structs.replace(limits, first_pause_s=0.05))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeHelper]:
    """The fake helper and compiler in place of the real ones."""
    monkeypatch.setitem(compilers._CLASSES, "shell", (__name__, "ShellCompiler"))
    for module in (attaching, groups):
        monkeypatch.setattr(module, "COMPILERS", ("shell",))
    monkeypatch.setattr(
        groups.Group, "tracer", lambda self, providers: FakeHelper(providers, self.environment)
    )
    monkeypatch.setattr(groups, "Helper", soon_again)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "default"))
    monkeypatch.setattr(FakeHelper, "started", [])
    monkeypatch.setattr(FakeHelper, "refuse", "")
    monkeypatch.setattr(FakeHelper, "hook", "true")
    monkeypatch.setattr(FakeHelper, "facts", {})
    return FakeHelper


async def eventually(condition: Callable[[], object]) -> None:
    """Returns when the condition holds, looked at as often as the loop turns."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Any) -> None:
    """Runs a coroutine and restores what a daemon changes of its process."""
    cpus = os.sched_getaffinity(0)
    try:
        asyncio.run(_closing_engines(test))
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


async def _closing_engines(test: Any) -> None:
    try:
        async with asyncio.timeout(3 * LIMIT_S):
            await test
    finally:
        for engine in list(Engine.left_open):
            engine.close()
