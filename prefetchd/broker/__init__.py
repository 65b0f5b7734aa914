"""The daemon's decisions: what is traced next, what is compiled next, where it is published, who is told.

Pure logic. There is no socket, clock, process or file in it: the daemon calls in with what happened and with
the time, pulls work, and reports how each piece ended. Every piece of work handed out must be answered, with
the object that was handed out; a lost process is an answer too (`trace_lost`, `End(retryable=True)`). Nothing
here raises for what a message says: an unknown rank is answered as such.

How it is driven, after every message and every end of work:

    for check in broker.next_checks(100):        broker.checked(check, present, now)
    while order := broker.next_trace(group):     ... broker.traced(order.id, report, now)
    while work := broker.next_compile(slots):    ... broker.compiled(work, end, now)
    while work := broker.next_publish():         ... broker.published(work, end, now)
    for answer in broker.take_answers():         send it
    sleep until broker.tick(now) or the next message

The promises: no plan is lost (it ends published, failed or uncovered, or is queued); a key is compiled once
at a time on the node, and not again where it is published; every query gets one answer; strict priorities,
ranks in turn within one; every table is bounded, by a constant with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from prefetchd.broker.accounting import MAX_RANKS, Accounts
from prefetchd.broker.asks import PRIORITIES
from prefetchd.broker.job_queue import JobQueue
from prefetchd.broker.keys import MAX_FAILURES, MAX_KEYS, Key, KeyTable
from prefetchd.broker.ranks import Ranks, RankState
from prefetchd.broker.tasks import MAX_TASKS
from prefetchd.broker.trace_queue import MAX_BATCH, TraceQueue
from prefetchd.broker.types import (
    Accepted,
    Answer,
    Check,
    Compile,
    End,
    Group,
    KeyId,
    KeyStatus,
    Priority,
    Publish,
    Rank,
    RequestState,
    Root,
    Slots,
    Stats,
    TraceOrder,
)
from prefetchd.broker.waiters import MAX_WAITERS, Waiters
from prefetchd.compilers.base import Job
from prefetchd.sweeps import Sweep
from prefetchd.trace import Report

# Differing fields counted by name; a fingerprint has some dozens.
MAX_MISMATCHES = 1000


class Broker:
    """All state of one daemon. The limits are parameters so that tests can reach them."""

    def __init__(
        self,
        *,
        max_keys: int = MAX_KEYS,
        max_failures: int = MAX_FAILURES,
        max_tasks: int = MAX_TASKS,
        max_batch: int = MAX_BATCH,
        max_ranks: int = MAX_RANKS,
        max_waiters: int = MAX_WAITERS,
    ) -> None:
        self._keys = KeyTable(max_keys, max_failures)
        self._ranks = Ranks()
        self._accounts = Accounts(max_ranks)
        self._jobs = JobQueue(self._keys, self._ranks, self)
        self._traces = TraceQueue(self._keys, self._ranks, self._jobs, max_tasks, max_batch)
        self._waiters = Waiters(self._keys, self._ranks, self._jobs, max_waiters)
        self._mismatches: Counter[str] = Counter()

    # Ranks.

    def attach(
        self,
        rank: Rank,
        generation: int,
        group: Group,
        roots: Mapping[str, tuple[Root, ...]],
        now: float,
    ) -> bool:
        """A hello: the rank is there, its engine looks for artifacts of each compiler in these roots.

        All of them get what the rank plans. A newer generation or another group starts anew; the same hello
        again keeps what is wanted, and what the rank had planned is looked for on disk again. False for an
        older generation than the attached one, and if there are too many ranks.
        """
        state = self._ranks.get(rank)
        if state is not None:
            if generation < state.generation:
                return False
            if generation == state.generation and state.group.name == group:
                if self._ranks.move(state, roots):
                    self._traces.moved(state, now)
                self._jobs.audit(state)
                return True
            self._leave(state, now)
        known = self._accounts.get(rank) is not None
        account = self._accounts.open(rank, self._ranks.attached, self._keys)
        if account is None:
            return False
        state = RankState(rank, generation, self._traces.group(group), roots, account)
        state.group.ranks.add(rank)
        self._ranks.add(state)
        # Whoever had this bit may have used other roots.
        self._traces.invalidate()
        if known:
            self._jobs.audit(state)
        return True

    def detach(self, rank: Rank, generation: int, now: float) -> None:
        """The rank is gone. A later generation than the one meant is left alone."""
        state = self._ranks.get(rank)
        if state is not None and state.generation <= generation:
            self._leave(state, now)

    # Plans.

    def plan(
        self,
        rank: Rank,
        provider: str,
        sweeps: Iterable[Sweep],
        priority: Priority,
        now: float,
        deadline: float | None = None,
    ) -> Accepted | None:
        """Each sweep is traced once in the rank's group and its keys published in the rank's roots.

        Asking again at a better priority promotes; after `deadline` it is worth no more than the universe.
        None for a rank that is not attached.
        """
        state = self._ranks.get(rank)
        if state is None:
            return None
        return self._traces.plan(state, provider, sweeps, priority, deadline, now)

    def plan_jobs(
        self,
        rank: Rank,
        jobs: Iterable[Job],
        priority: Priority,
        now: float,
        deadline: float | None = None,
    ) -> Accepted | None:
        """The same for jobs known without a trace, such as those of a shape log."""
        state = self._ranks.get(rank)
        return None if state is None else self._traces.plan_jobs(state, jobs, priority, deadline, now)

    def add_universe(self, rank: Rank, provider: str, sweeps: Iterable[Sweep], now: float) -> bool:
        """Sweeps at universe priority, pulled one at a time when the group has nothing better to trace.

        A `ValueError` from the iterator ends it and is kept among the problems. False for an unknown rank.
        """
        state = self._ranks.get(rank)
        if state is not None:
            self._traces.add_universe(state, provider, sweeps, now)
        return state is not None

    def retry(self, rank: Rank, now: float, keys: Sequence[KeyId] = ()) -> None:
        """Someone asks for failed keys again (none named: all that failed, and what could not be traced)."""
        state = self._ranks.get(rank)
        if state is None:
            return
        named = [self._keys.get(identity) for identity in keys]
        self._traces.invalidate()
        for key in named if keys else self._keys.failed():
            if key is not None and key.job is not None:
                self._jobs.retry(key, now)
                if rank not in key.asks:
                    self._traces.want_key(state, key, Priority.UNIVERSE, None, now)
        if not keys:
            self._traces.retry(state, now)

    # Work.

    def groups(self) -> list[Group]:
        """The groups that have something to trace."""
        return [group.name for group in self._traces.groups() if any(group.queue.depth) or group.universes]

    def next_trace(self, group: Group, now: float) -> TraceOrder | None:
        """The next sweep, or single requests, for a free helper of the group."""
        return self._traces.next_trace(group, now)

    def traced(self, order: int, report: Report, now: float) -> None:
        """A helper's report; requests that failed in it are uncovered until someone asks for a retry."""
        self._traces.traced(order, report, now)

    def trace_lost(self, order: int, reason: str, now: float) -> None:
        """The helper that had the order died. It is handed out again, `MAX_CRASHES` times in all."""
        self._traces.trace_lost(order, reason, now)

    def next_checks(self, limit: int) -> list[Check]:
        """Up to so many questions for the disk; nothing is compiled for a root before its answer."""
        return self._jobs.next_checks(limit)

    def checked(self, check: Check, present: bool, now: float) -> None:
        """Whether the root holds a complete entry under the key."""
        self._jobs.checked(check, present, now)

    def next_compile(self, slots: Slots, now: float) -> Compile | None:
        """The next job for a free slot; some slots are kept from background work."""
        self._jobs.tick(now)
        return self._jobs.next_compile(slots)

    def compiled(self, work: Compile, end: End, now: float) -> None:
        """How a compile (with its publish into `work.root`) ended."""
        self._jobs.compiled(work, end, now)

    def next_publish(self, now: float) -> Publish | None:
        """The next copy to make from one root into another; it needs no compile slot."""
        self._jobs.tick(now)
        return self._jobs.next_publish()

    def published(self, work: Publish, end: End, now: float) -> None:
        """How a publish ended."""
        self._jobs.published(work, end, now)

    def tick(self, now: float) -> float:
        """Deadlines, retries and time limits; the moment of the next one (infinity for none)."""
        return min(self._traces.tick(now), self._jobs.tick(now), self._waiters.tick(now))

    # What engines do.

    def engine_used(self, rank: Rank, key: KeyId, now: float) -> None:
        """The engine found the key on disk and loaded it."""
        state = self._ranks.get(rank)
        if state is not None:
            state.account.used(self._keys.touch(key), now)

    def engine_began(
        self, rank: Rank, key: KeyId, now: float, *, ago: float = 0.0, daemon_down: bool = False
    ) -> None:
        """The engine compiles the key itself, since `ago` seconds; nobody else starts to while it does."""
        state = self._ranks.get(rank)
        if state is None:
            return
        known = self._keys.touch(key)
        self._jobs.engine_ended(known, rank, now)
        roots = state.roots(key[0])
        compile_ = state.account.compiling(known, roots, now - ago, daemon_down)
        self._jobs.engine_began(known, rank, compile_, now)

    def engine_ended(
        self, rank: Rank, key: KeyId, seconds: float, now: float, *, daemon_down: bool = False
    ) -> None:
        """The engine's compile ended; what it left on disk serves the other ranks too."""
        state = self._ranks.get(rank)
        known = self._keys.get(key)
        if state is None:
            return
        if known is None or rank not in known.engines:
            self.engine_began(rank, key, now, ago=seconds, daemon_down=daemon_down)
            known = self._keys.touch(key)
        compile_ = self._jobs.engine_ended(known, rank, now)
        if compile_ is not None:
            state.account.compiled(compile_, seconds)

    def engine_named(self, old: KeyId, new: KeyId, now: float) -> None:
        """What engines called `old`, since they saw the compiler and not the key, is `new`.

        To be said before the report that tells of it, so that what was planned in time counts as late.
        """
        known = self._keys.get(old)
        if known is None:
            return
        key = self._keys.touch(new)
        for account in self._accounts.all():
            account.renamed(known, key)
        self._jobs.renamed(known, key, now)

    def mismatch(self, compiler: str, field: str) -> None:
        """The fingerprints of an engine and its helper differ in this field: an alarm, counted by name."""
        name = f"{compiler} {field}"
        if name in self._mismatches or len(self._mismatches) < MAX_MISMATCHES:
            self._mismatches[name] += 1

    # Questions.

    def query(
        self,
        rank: Rank,
        token: Hashable,
        keys: Sequence[KeyId],
        now: float,
        until: float | None = None,
    ) -> None:
        """Asks for the state of keys, looked up on disk again. The answer lies in `take_answers`, once.

        With `until` the answer waits for each key to be published or failed, which makes them urgent.
        """
        self._waiters.query(rank, token, keys, now, until)

    def take_answers(self) -> list[Answer]:
        """The answers that are ready."""
        answers = list(self._waiters.answers)
        self._waiters.answers.clear()
        return answers

    def key_status(self, rank: Rank, key: KeyId) -> KeyStatus:
        """What is known of a key, without a look at the disk."""
        state = self._ranks.get(rank)
        return KeyStatus(*key, "unknown") if state is None else self._waiters.status(state, key)

    def request_state(self, rank: Rank, provider: str, sweep: Sweep) -> RequestState:
        """How far a planned request or sweep is for this rank."""
        state = self._ranks.get(rank)
        return "unknown" if state is None else self._traces.state(state, provider, sweep)

    @property
    def drained(self) -> bool:
        """Whether nothing is left to trace, look up, compile or publish."""
        return not (self._traces.busy or self._jobs.busy)

    def stats(self) -> Stats:
        """All figures at this moment."""
        traces, jobs = self._traces, self._jobs
        groups = traces.groups()
        trace_depth = [sum(group.queue.depth[priority] for group in groups) for priority in PRIORITIES]
        return Stats(
            ranks={str(account.rank): account.snapshot() for account in self._accounts.all()},
            trace_depth=_by_priority(trace_depth),
            job_depth=_by_priority(jobs.compiles.depth),
            publish_depth=_by_priority(jobs.publishes.depth),
            tracing=traces.tracing,
            compiling=jobs.compiling,
            publishing=jobs.publishing,
            checking=jobs.checking,
            engines_compiling=len(jobs.engines),
            waiting=len(self._waiters),
            attached=len(self._ranks.attached),
            groups=len(groups),
            known_keys=len(self._keys),
            failed_keys=self._keys.failures,
            requests=sum(map(len, groups)),
            asked=traces.asked_total,
            refused=traces.refused_total,
            traced=traces.traced_total,
            uncovered=traces.uncovered_total,
            compiled=jobs.compiled_total,
            found=jobs.found_total,
            failures=jobs.failures_total,
            published=jobs.published_total,
            demoted=traces.demoted_total,
            mismatches=dict(self._mismatches),
            drained=self.drained,
            problems=list(traces.problems),
        )

    # What the queues tell (`job_queue.Listener`).

    def key_settled(self, key: Key, rank: Rank, now: float) -> None:
        """See `Listener`."""
        self._traces.settled(key, rank)

    def key_changed(self, key: Key, now: float) -> None:
        """See `Listener`."""
        if key.waiters:
            self._waiters.changed(key, now)

    def key_lost(self, key: Key, rank: RankState, now: float) -> None:
        """See `Listener`."""
        self._traces.invalidate()
        self._traces.want_key(rank, key, Priority.UNIVERSE, None, now)

    def _leave(self, state: RankState, now: float) -> None:
        self._waiters.leave(state, now)
        self._traces.leave(state)
        self._ranks.remove(state)
        self._jobs.leave(state, now)


def _by_priority(depth: Sequence[int]) -> dict[str, int]:
    return {priority.name.lower(): depth[priority] for priority in PRIORITIES}
