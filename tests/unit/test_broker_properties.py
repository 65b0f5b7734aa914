"""The broker under any order of events: nothing lost, nothing compiled twice, every waiter answered."""

from __future__ import annotations

from typing import Any

import pytest
from broker_world import COMPILE_ERROR, COMPILER, OK, PROVIDER, TIMED_OUT, World, gemm, gemms, key_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefetchd.broker.engine_compiles import ENGINE_LIMIT_S
from prefetchd.broker.types import Check, Compile, End, KeyId, Priority, Publish, Slots, TraceOrder
from prefetchd.broker.waiters import DISK_LIMIT_S
from prefetchd.compilers.base import Job
from prefetchd.protocol import Sweep

GROUPS = ("hopper", "other")
ranks = st.integers(0, 3)
roots = st.lists(st.sampled_from(("/a", "/b", "/c")), min_size=1, max_size=2, unique=True)
sweeps = st.one_of(
    st.integers(1, 24).map(gemm), st.sampled_from((gemms(1, 24), gemms(5, 12), gemms(1, 3, 256)))
)
priorities = st.sampled_from(Priority)
numbers = st.integers(1, 24)
# The first of these is likely: most work ends well.
ends = st.sampled_from((OK, OK, OK, COMPILE_ERROR, TIMED_OUT))


class BrokerMachine(RuleBasedStateMachine):
    """Work is handed out and ends in any order, while ranks come, go and move."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.broker = self.world.broker
        self.orders: list[TraceOrder] = []
        self.checks: list[Check] = []
        self.compiles: list[Compile] = []
        self.publishes: list[Publish] = []
        self.attached: dict[int, tuple[int, str]] = {}
        self.generation = 0
        self.wanted: dict[int, set[Sweep]] = {}
        # What the broker was told lies on disk, and not that it is gone.
        self.told: set[tuple[KeyId, str]] = set()
        # The latest answer about each root was that it does not hold the key.
        self.denied: set[tuple[KeyId, str]] = set()
        self.engines: dict[tuple[int, KeyId], float] = {}
        self.tokens: list[int] = []
        self.limits: dict[int, float] = {}
        self.answered: list[Any] = []

    @initialize()
    def two_ranks_are_there(self) -> None:
        self.attach(0, "hopper", ["/a"])
        self.attach(1, "hopper", ["/b"])

    @rule(rank=ranks, group=st.sampled_from(GROUPS), where=roots)
    def attach(self, rank: int, group: str, where: list[str]) -> None:
        self.generation += 1
        assert self.world.attach(rank, *where, group=group, generation=self.generation)
        self.attached[rank] = (self.generation, group)
        self.engines = {each: since for each, since in self.engines.items() if each[0] != rank}
        self.wanted[rank] = set()

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), where=roots)
    def hello_again_with_other_roots(self, data: st.DataObject, where: list[str]) -> None:
        rank = data.draw(st.sampled_from(sorted(self.attached)))
        generation, group = self.attached[rank]
        assert self.world.attach(rank, *where, group=group, generation=generation)

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.attached)))
        self.broker.detach(rank, self.attached.pop(rank)[0], self.world.now)
        self.engines = {each: since for each, since in self.engines.items() if each[0] != rank}
        del self.wanted[rank]

    @precondition(lambda self: self.attached)
    @rule(
        data=st.data(),
        asked=st.lists(sweeps, min_size=1, max_size=4),
        priority=priorities,
        seconds=st.none() | st.floats(0, 5),
    )
    def plan(
        self, data: st.DataObject, asked: list[Sweep], priority: Priority, seconds: float | None
    ) -> None:
        rank = data.draw(st.sampled_from(sorted(self.attached)))
        deadline = None if seconds is None else self.world.now + seconds
        self.world.plan(rank, *asked, priority=priority, deadline=deadline)
        self.wanted[rank].update(asked)

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), number=numbers, priority=priorities)
    def plan_a_job(self, data: st.DataObject, number: int, priority: Priority) -> None:
        rank = data.draw(st.sampled_from(sorted(self.attached)))
        job = Job(compiler=COMPILER, key=key_of(number)[1], payload=b"source")
        self.broker.plan_jobs(rank, [job], priority, self.world.now)

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), asked=st.lists(sweeps, max_size=4))
    def universe(self, data: st.DataObject, asked: list[Sweep]) -> None:
        rank = data.draw(st.sampled_from(sorted(self.attached)))
        self.broker.add_universe(rank, PROVIDER, iter(asked), self.world.now)
        self.wanted[rank].update(asked)

    @rule(group=st.sampled_from(GROUPS))
    def take_trace(self, group: str) -> None:
        order = self.broker.next_trace(group, self.world.now)
        if order is not None:
            # No sweep is with two helpers of a group at a time.
            others = [o.sweeps for o in self.orders if o.group == group]
            assert not {sweep for sweeps in others for sweep in sweeps} & set(order.sweeps)
            self.orders.append(order)

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), lost=st.sampled_from((False, False, True)))
    def end_trace(self, data: st.DataObject, lost: bool) -> None:
        order = self.orders.pop(data.draw(st.integers(0, len(self.orders) - 1)))
        if lost:
            self.broker.trace_lost(order.id, "killed by SIGKILL", self.world.now)
        else:
            self.broker.traced(order.id, self.world.report(order), self.world.now)

    @rule(group=st.sampled_from(GROUPS))
    def trace_and_look(self, group: str) -> None:
        """What usually happens at once; without it few runs would come as far as a compile."""
        self.world.trace(group)
        self.checks += self.broker.next_checks(1000)
        while self.checks:
            self.answer(self.checks.pop())

    @rule(limit=st.integers(1, 5))
    def take_checks(self, limit: int) -> None:
        found = self.broker.next_checks(limit)
        assert len(found) <= limit
        self.checks += found

    @precondition(lambda self: self.checks)
    @rule(data=st.data())
    def answer_check(self, data: st.DataObject) -> None:
        self.answer(self.checks.pop(data.draw(st.integers(0, len(self.checks) - 1))))

    def answer(self, check: Check) -> None:
        identity = ((check.compiler, check.key), check.root)
        present = identity in self.world.disk
        self.broker.checked(check, present, self.world.now)
        (self.told.add if present else self.told.discard)(identity)
        (self.denied.discard if present else self.denied.add)(identity)

    @rule(free=st.integers(0, 3))
    def take_compile(self, free: int) -> None:
        work = self.broker.next_compile(Slots(free, 4), self.world.now)
        if work is None:
            return
        assert free
        assert work.root in {"/a", "/b", "/c"}
        identity = (work.job.compiler, work.job.key)
        assert all(other.job.key != work.job.key for other in self.compiles), "compiled twice at a time"
        assert not any((identity, root) in self.told for root in ["/a", "/b", "/c"]), "compiled again"
        assert (identity, work.root) in self.denied, "compiled before the disk was asked"
        assert all(key != identity for _, key in self.engines), "an engine compiles it"
        self.compiles.append(work)

    @precondition(lambda self: self.compiles)
    @rule(data=st.data(), end=ends)
    def end_compile(self, data: st.DataObject, end: End) -> None:
        work = self.compiles.pop(data.draw(st.integers(0, len(self.compiles) - 1)))
        self.world.end(work, end)
        if end.ok:
            self.told.add(((work.job.compiler, work.job.key), work.root))

    @rule()
    def take_publish(self) -> None:
        work = self.broker.next_publish(self.world.now)
        if work is not None:
            assert all((o.job.key, o.root) != (work.job.key, work.root) for o in self.publishes)
            assert work.source != work.root
            self.publishes.append(work)

    @precondition(lambda self: self.publishes)
    @rule(data=st.data(), end=ends)
    def end_publish(self, data: st.DataObject, end: End) -> None:
        work = self.publishes.pop(data.draw(st.integers(0, len(self.publishes) - 1)))
        identity = (work.job.compiler, work.job.key)
        if end.ok and (identity, work.source) not in self.world.disk:
            end = End(ok=False, source_gone=True)
        if end.ok:
            self.world.disk.add((identity, work.root))
            self.told.add((identity, work.root))
        if end.source_gone:
            self.told.discard((identity, work.source))
        self.broker.published(work, end, self.world.now)

    @precondition(lambda self: self.world.disk)
    @rule(data=st.data())
    def somebody_deletes(self, data: st.DataObject) -> None:
        self.world.disk.remove(data.draw(st.sampled_from(sorted(self.world.disk))))

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), asked=st.lists(numbers, max_size=3), seconds=st.none() | st.floats(-1, 5))
    def query(self, data: st.DataObject, asked: list[int], seconds: float | None) -> None:
        rank = data.draw(st.sampled_from(sorted(self.attached)))
        until = None if seconds is None else self.world.now + seconds
        self.tokens.append(len(self.tokens))
        self.limits[self.tokens[-1]] = self.world.now + DISK_LIMIT_S if until is None else until
        self.broker.query(rank, self.tokens[-1], [key_of(m) for m in asked], self.world.now, until)

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), number=numbers, step=st.sampled_from(("use", "begin", "end", "end and leave it")))
    def engine(self, data: st.DataObject, number: int, step: str) -> None:
        rank = data.draw(st.sampled_from(sorted(self.attached)))
        key = key_of(number)
        if step == "use":
            self.broker.engine_used(rank, key, self.world.now)
        elif step == "begin":
            self.broker.engine_began(rank, key, self.world.now)
            self.engines[rank, key] = self.world.now
        else:
            if step == "end and leave it":
                self.world.disk.add((key, "/a"))
            self.broker.engine_ended(rank, key, 0.5, self.world.now)
            self.engines.pop((rank, key), None)

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        self.broker.retry(data.draw(st.sampled_from(sorted(self.attached))), self.world.now)

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        assert self.broker.tick(self.world.now) > self.world.now
        oldest = self.world.now - ENGINE_LIMIT_S
        self.engines = {each: since for each, since in self.engines.items() if since > oldest}
        self.each_query_has_at_most_one_answer()
        for token, limit in self.limits.items():
            assert limit > self.world.now or token in self.answered, "a waiter waits beyond its limit"

    @invariant()
    def each_query_has_at_most_one_answer(self) -> None:
        self.answered += [answer.token for answer in self.world.take_answers()]
        assert len(set(self.answered)) == len(self.answered)

    @invariant()
    def what_is_in_flight_is_counted(self) -> None:
        stats = self.broker.stats()
        traced = sum(len(order.sweeps) for order in self.orders)
        assert (stats.tracing, stats.compiling) == (traced, len(self.compiles))
        assert stats.publishing == len(self.publishes)
        for counts in (c for by_compiler in stats.ranks.values() for c in by_compiler.values()):
            assert counts.hits <= counts.planned + counts.unplanned + counts.hits
            assert min(counts.wasted, counts.undecided) >= 0
            assert sum(counts.engine_compiles.values()) >= counts.late

    def teardown(self) -> None:
        """Everything in flight ends well, engines end, time passes: then nothing may be left."""
        for order in self.orders:
            self.broker.traced(order.id, self.world.report(order), self.world.now)
        for check in self.checks:
            identity = ((check.compiler, check.key), check.root)
            self.broker.checked(check, identity in self.world.disk, self.world.now)
        for work in self.compiles:
            self.world.end(work)
        for copy in self.publishes:
            self.world.disk.add(((copy.job.compiler, copy.job.key), copy.root))
            self.broker.published(copy, OK, self.world.now)
        for _ in range(4):
            self.world.now += 1000.0
            self.broker.tick(self.world.now)
            self.settle()
        assert self.broker.drained, self.broker.stats()
        assert not any(group._singles for group in self.broker._traces.groups()), "kept though nothing waits"
        for rank, asked in self.wanted.items():
            for sweep in asked:
                state = self.world.state(rank, sweep)
                assert state in ("published", "failed", "uncovered"), (rank, sweep, state)
        stats = self.broker.stats()
        assert not any(
            (*stats.trace_depth.values(), *stats.job_depth.values(), *stats.publish_depth.values())
        )
        assert stats.waiting == stats.engines_compiling == 0
        assert all(c.undecided == 0 for by in stats.ranks.values() for c in by.values())
        self.each_query_has_at_most_one_answer()
        assert sorted(self.answered) == self.tokens

    def settle(self) -> None:
        before = len(self.world.answers)
        self.world.settle(GROUPS)
        self.answered += [answer.token for answer in self.world.answers[before:]]


class TestBroker(BrokerMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.ci
class TestBrokerAtLength(BrokerMachine.TestCase):
    """What 150 runs seldom meet: three ranks, a sweep and a request inside it, in one order of many."""

    settings = settings(max_examples=1000, stateful_step_count=50, deadline=None)
