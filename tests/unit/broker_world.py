"""A small world round a broker: a disk, helpers and compile processes that do what a test tells them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prefetchd.broker import Broker
from prefetchd.broker.types import (
    Answer,
    Check,
    Compile,
    End,
    KeyId,
    Priority,
    Publish,
    Rank,
    RequestState,
    Slots,
    TraceOrder,
)
from prefetchd.compilers.base import Job
from prefetchd.protocol import Sweep, expand, request_from_fields
from prefetchd.trace import Failure, Report

COMPILER = "deep_jit"
PROVIDER = "deep_gemm"
MANY = Slots(64, 64)
OK = End(ok=True)
COMPILE_ERROR = End(ok=False, text="error: no such template")
TIMED_OUT = End(ok=False, text="did not end within its time limit", retryable=True)


def gemm(m: int, n: int = 128) -> Sweep:
    """One request."""
    return Sweep(request_from_fields({"op": "fp8_gemm_nt", "m": m, "n": n, "k": 7168}))


def gemms(first: int, last: int, n: int = 128) -> Sweep:
    """A site's sweep over token counts."""
    return Sweep(gemm(first, n).request, ((first, last + 1, 1),))


def key_of(m: int, n: int = 128) -> KeyId:
    """The key of a request, unless a world says otherwise: four token counts share one."""
    return COMPILER, f"{n}-{m // 4}"


def keys_of(sweep: Sweep) -> list[KeyId]:
    """The keys that a sweep comes to, each once."""
    found = [key_of(request.m, request.n) for request in expand([sweep])]  # type: ignore[attr-defined]
    return list(dict.fromkeys(found))


class World:
    """A broker, what lies on the disk, and a clock that tests set."""

    def __init__(self, **limits: int) -> None:
        self.broker = Broker(**limits)
        self.now = 100.0
        self.disk: set[tuple[KeyId, str]] = set()
        self.traces: Counter[Sweep] = Counter()
        self.compiles: list[Compile] = []
        self.publishes: list[Publish] = []
        self.answers: list[Answer] = []
        self.failures: dict[Sweep, tuple[Failure, ...]] = {}
        self.keys_of: Callable[[Sweep], list[KeyId]] = keys_of

    def attach(self, rank: Rank, *roots: str, group: str = "group", generation: int = 1) -> bool:
        """A hello of a rank whose engine uses these roots (`/cache` if none is named)."""
        return self.broker.attach(rank, generation, group, {COMPILER: roots or ("/cache",)}, self.now)

    def plan(
        self, rank: Rank, *sweeps: Sweep, priority: Priority = Priority.BATCH, deadline: float | None = None
    ) -> None:
        """The rank asks, and nothing is refused."""
        accepted = self.broker.plan(rank, PROVIDER, sweeps, priority, self.now, deadline)
        assert accepted is not None
        assert not accepted.refused

    def state(self, rank: Rank, sweep: Sweep) -> RequestState:
        return self.broker.request_state(rank, PROVIDER, sweep)

    def report(self, order: TraceOrder) -> Report:
        """What a helper would report."""
        self.traces.update(order.sweeps)
        keys = dict.fromkeys(key for sweep in order.sweeps for key in self.keys_of(sweep))
        jobs = tuple(Job(compiler=compiler, key=key, payload=b"source") for compiler, key in keys)
        failures = tuple(each for sweep in order.sweeps for each in self.failures.get(sweep, ()))
        return Report(id=order.id, seconds=0.0, jobs=jobs, failures=failures)

    def trace(self, group: str = "group") -> list[TraceOrder]:
        """Traces all that is handed out; the orders in their order."""
        orders = []
        while (order := self.broker.next_trace(group, self.now)) is not None:
            orders.append(order)
            self.broker.traced(order.id, self.report(order), self.now)
        return orders

    def look(self) -> list[Check]:
        """Answers every question for the disk by what lies there."""
        asked = []
        while checks := self.broker.next_checks(7):
            for check in checks:
                asked.append(check)
                present = ((check.compiler, check.key), check.root) in self.disk
                self.broker.checked(check, present, self.now)
        return asked

    def next_compile(self, slots: Slots = MANY) -> Compile | None:
        """The next compile, recorded."""
        work = self.broker.next_compile(slots, self.now)
        if work is not None:
            self.compiles.append(work)
        return work

    def end(self, work: Compile, end: End = OK) -> None:
        """A compile ends; if well, it lies on the disk."""
        if end.ok:
            self.disk.add(((work.job.compiler, work.job.key), work.root))
        self.broker.compiled(work, end, self.now)

    def compile(self, end: End = OK) -> list[Compile]:
        """Compiles all that is handed out."""
        done = []
        while (work := self.next_compile()) is not None:
            done.append(work)
            self.end(work, end)
        return done

    def publish(self, end: End = OK) -> list[Publish]:
        """Makes every copy that is handed out."""
        done = []
        while (work := self.broker.next_publish(self.now)) is not None:
            done.append(work)
            if end.ok:
                self.disk.add(((work.job.compiler, work.job.key), work.root))
            self.broker.published(work, end, self.now)
        self.publishes += done
        return done

    def settle(self, groups: Iterable[str] = ("group",)) -> None:
        """Works everything off, well."""
        done: list[object] = [None]
        while done:
            done = [
                *(order for group in groups for order in self.trace(group)),
                *self.look(),
                *self.compile(),
                *self.publish(),
            ]
        self.take_answers()

    def to_compile(self, rank: Rank, *sweeps: Sweep, priority: Priority = Priority.BATCH) -> None:
        """Plans, traces and looks: what is missing can be compiled now."""
        self.plan(rank, *sweeps, priority=priority)
        self.trace()
        self.look()

    def take_answers(self) -> list[Answer]:
        """The answers since the last time."""
        new = self.broker.take_answers()
        self.answers += new
        return new
