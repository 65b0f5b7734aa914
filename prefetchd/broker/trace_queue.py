"""From a plan to the keys it comes to: tasks, who wants them and how urgently, and what helpers report.

What a want is and how it ends is told in `wants.py`; a helper that dies gives its tasks back.

Single requests of one site are traced many at a time, since a fork costs more than most of them. The subtle
rule: what one of them needs, all of them are taken to need, because a library shows a key at its first use
only; so only those that the same ranks want as urgently are put together, and none of other sites, whose
keys would be asked for in vain again and again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import chain

import msgspec

from prefetchd.broker.job_queue import JobQueue
from prefetchd.broker.keys import MAX_TEXT, Key, KeyTable
from prefetchd.broker.ranks import Ranks, RankState
from prefetchd.broker.tasks import MAX_CRASHES, MAX_TASKS, GroupState, Task, TaskState, Universe, Want
from prefetchd.broker.types import Accepted, Group, Priority, Rank, RequestState, TraceOrder
from prefetchd.broker.wants import Wants
from prefetchd.sweeps import Sweep
from prefetchd.trace import Failure, Report

# Groups without a rank that are kept: an engine that restarts finds its universe traced.
MAX_IDLE_GROUPS = 16
# Enough to see what is wrong; the rest is in the log.
MAX_PROBLEMS = 32
# Single requests traced in one process. A fork, with all that a library does at its first use, takes some ten
# ms and a request one; the dearest take 0.2 s, and what is more urgent should not wait for many of them.
MAX_BATCH = 32
# So often batches go before the universe, then it has a turn: its sweeps are what answers every later batch,
# and under steady traffic they would never be traced. Urgent requests always go first.
MOST_PASSED_OVER = 2
# Of a site's waiting requests, those looked at for one batch: keeps the search short.
MOST_LOOKED_AT = 128
# Failures of one sweep kept with their text; the count is kept for all.
MAX_TASK_FAILURES = 8


class TraceQueue(Wants):
    """The groups and their tasks."""

    def __init__(
        self,
        keys: KeyTable,
        ranks: Ranks,
        jobs: JobQueue,
        max_tasks: int = MAX_TASKS,
        max_batch: int = MAX_BATCH,
    ) -> None:
        super().__init__(keys, ranks, jobs, max_tasks)
        self._max_batch = max_batch
        self._groups: OrderedDict[Group, GroupState] = OrderedDict()
        # By order; the first task gives it its id.
        self._tracing: dict[int, tuple[Task, ...]] = {}
        # The latest reasons for which something is not covered.
        self.problems: deque[str] = deque(maxlen=MAX_PROBLEMS)
        self.traced_total = 0
        self.uncovered_total = 0

    @property
    def busy(self) -> bool:
        """Whether anything asked for is not settled yet."""
        return bool(self._open_wants or self._tracing or any(g.universes for g in self._groups.values()))

    @property
    def tracing(self) -> int:
        """How many tasks helpers have."""
        return sum(map(len, self._tracing.values()))

    def groups(self) -> list[GroupState]:
        """Every known group."""
        return list(self._groups.values())

    def group(self, name: Group) -> GroupState:
        """The group of this name; the longest unused ones without ranks are forgotten."""
        state = self._groups.get(name)
        if state is None:
            idle = [group for group in self._groups.values() if not group.ranks]
            for oldest in idle[: max(0, len(idle) - MAX_IDLE_GROUPS + 1)]:
                del self._groups[oldest.name]
            self._groups[name] = state = GroupState(name, self._max_tasks)
        self._groups.move_to_end(name)
        return state

    def plan(
        self,
        rank: RankState,
        provider: str,
        sweeps: Iterable[Sweep],
        priority: Priority,
        deadline: float | None,
        now: float,
    ) -> Accepted:
        """Makes sure that each sweep is traced and its keys published, at this priority or better."""
        table = rank.group.table(provider)
        name = rank.name
        new = known = refused = 0
        for sweep in sweeps:
            task = table.find(sweep)
            if task is None:
                if not sweep.values and self._covered(table.covering(sweep.request), rank):
                    known += 1
                    continue
                task = Task(next(self._ids), rank.group, provider, sweep)
                if not rank.group.add(task):
                    refused += 1
                    continue
                new += 1
            else:
                known += 1
                want = task.wants.get(name)
                if want is not None:
                    self._ask_again(task, rank, want, priority, deadline)
                    continue
                if self._is_done(task, rank):
                    continue
            self._want(task, rank, priority, deadline, now)
        self.asked_total += new + known + refused
        self.refused_total += refused
        return Accepted(new, known, refused)

    def add_universe(self, rank: RankState, provider: str, sweeps: Iterable[Sweep], now: float) -> None:
        """Sweeps to pull one at a time when nothing else is left to trace in the group."""
        rank.account.to_trace += 1
        rank.group.universes.append(Universe(rank.name, provider, iter(sweeps), now))

    def leave(self, rank: RankState) -> None:
        """The rank's wants vanish; others' remain."""
        for task in list(rank.tasks):
            for key in task.wants[rank.name].left or ():
                self._jobs.drop(key, rank.name)
            self._end_want(task, rank, done=False)
        group = rank.group
        group.ranks.discard(rank.name)
        group.queue.forget(rank.name)
        for universe in [each for each in group.universes if each.rank == rank.name]:
            group.universes.remove(universe)
        rank.account.to_trace = 0
        rank.account.settle_undecided()

    def next_trace(self, name: Group, now: float) -> TraceOrder | None:
        """The next tasks for a free helper of the group."""
        group = self._groups.get(name)
        while group is not None and (taken := self._pop(group, now)) is not None:
            task, rank, priority = taken
            group.forget_single(task)
            if self._follows(task):
                continue
            tasks = (task, *self._companions(task, rank, priority))
            for each in tasks:
                each.state = TaskState.TRACING
            self._tracing[task.id] = tasks
            sweeps = tuple(each.sweep for each in tasks if each.sweep is not None)
            return TraceOrder(
                id=task.id, group=name, provider=task.provider, sweeps=sweeps, priority=priority
            )
        return None

    def traced(self, identity: int, report: Report, now: float) -> None:
        """A helper's report: its keys are asked for at the priority of whoever wants the tasks."""
        tasks = self._tracing.pop(identity, ())
        if not tasks:
            return
        self.traced_total += len(tasks)
        for task, failures in zip(tasks, _failures_each(tasks, report.failures), strict=True):
            self._uncovered(task, failures)
            self._begin_traced(task)
        keys = []
        for job in report.jobs:
            key = self._take(job, tasks[0].group, now)
            keys.append(key)
            for task in tasks:
                self._join_all(task, key)
        for task in tasks:
            self._end_traced(task, keys)
            self._release(task)

    def trace_lost(self, identity: int, reason: str, now: float) -> None:
        """The helper that had the tasks is gone; another gets them, unless too many died of one."""
        for task in self._tracing.pop(identity, ()):
            self._lost(task, reason)

    def _lost(self, task: Task, reason: str) -> None:
        task.crashes += 1
        if task.crashes < MAX_CRASHES:
            task.state = TaskState.QUEUED
            self._queue(task)
            if not task.wants:
                task.group.remove(task)
                self._release(task)
            return
        assert task.sweep is not None
        task.state = TaskState.LOST
        text = f"the helper died {task.crashes} times while it traced this: {reason}"
        failure = Failure(
            request=task.sweep.label(), kind="crash", text=text[:MAX_TEXT], requests=len(task.sweep)
        )
        self._uncovered(task, (failure,))
        for name in list(task.wants):
            rank = self._ranks.attached[name]
            self._end_want(task, rank, done=True)
            self._one_traced(rank)
        self._release(task)

    def _pop(self, group: GroupState, now: float) -> tuple[Task, Rank, Priority] | None:
        taken = None
        if group.passed_over >= MOST_PASSED_OVER and not group.queue.depth[Priority.URGENT]:
            taken = self._pop_from(group, now, Priority.UNIVERSE)
        taken = taken or self._pop_from(group, now, Priority.URGENT)
        if taken is None or taken[2] is Priority.UNIVERSE:
            group.passed_over = 0
        elif taken[2] is not Priority.URGENT:
            group.passed_over += 1
        return taken

    def _pop_from(self, group: GroupState, now: float, best: Priority) -> tuple[Task, Rank, Priority] | None:
        taken = group.queue.pop(best=best)
        while taken is None and group.universes and self._pull(group, now):
            taken = group.queue.pop(best=best)
        return taken

    def _companions(self, task: Task, rank: Rank, priority: Priority) -> list[Task]:
        """Further single requests to trace in the same process; an urgent one waits for no others."""
        if not task.single or priority is Priority.URGENT:
            return []
        group = task.group
        found: list[Task] = []
        for other in group.singles_beside(task, MOST_LOOKED_AT):
            alike = other.asks.best_of(rank) is priority and other.wants.keys() == task.wants.keys()
            if alike and len(found) < self._max_batch - 1:
                group.forget_single(other)
                group.queue.take(other)
                found.append(other)
        return [other for other in found if not self._follows(other)]

    def _follows(self, task: Task) -> bool:
        """Whether a sweep that holds this request is traced, or about to be, for all who want it."""
        if task.sweep is None or task.sweep.values:
            return False
        for sweep in task.group.table(task.provider).covering(task.sweep.request):
            gone = sweep.failures or sweep.state is TaskState.LOST or any(key.evicted for key in sweep.keys)
            if gone or not all(self._serves(sweep, name, want) for name, want in task.wants.items()):
                continue
            if sweep.state is TaskState.TRACED:
                self._begin_traced(task)
                for key in sweep.keys:
                    self._join_all(task, key)
                self._end_traced(task, sweep.keys)
            else:
                sweep.followers.append(task)
            return True
        return False

    def _serves(self, sweep: Task, name: Rank, want: Want) -> bool:
        """Whether the sweep is settled for the rank, or wanted by it as urgently as this."""
        if self._is_done(sweep, self._ranks.attached[name]):
            return True
        other = sweep.wants.get(name)
        return other is not None and other.urgency <= want.urgency

    def _begin_traced(self, task: Task) -> None:
        """From here on `_join_all` tells what the task's wants are waiting for."""
        task.state = TaskState.TRACED
        for want in task.wants.values():
            want.left = {}

    def _join_all(self, task: Task, key: Key) -> None:
        for name, want in task.wants.items():
            self._join(task, key, self._ranks.attached[name], want)

    def _end_traced(self, task: Task, keys: Iterable[Key]) -> None:
        """These are all keys of the task."""
        task.keys = tuple(dict.fromkeys(keys))
        for name, want in list(task.wants.items()):
            rank = self._ranks.attached[name]
            self._one_traced(rank)
            if not want.left:
                self._end_want(task, rank, done=True)

    def retry(self, rank: RankState, now: float) -> None:
        """Traces again, for this rank, whatever of its group could not be traced."""
        self.invalidate()
        for task in rank.group.failed():
            if task.idle() and task.sweep is not None:
                rank.group.remove(task)
                self.plan(rank, task.provider, (task.sweep,), Priority.UNIVERSE, None, now)

    def state(self, rank: RankState, provider: str, sweep: Sweep) -> RequestState:
        """How far a planned request or sweep is for this rank."""
        table = rank.group.table(provider)
        task = table.find(sweep)
        if task is None:
            covering = [] if sweep.values else table.covering(sweep.request)
            done = [each for each in covering if not each.failures and self._is_done(each, rank)]
            # A sweep of which something failed vouches for none of its requests.
            states = sorted((_how_far(each, rank) for each in done), key=lambda state: state != "published")
            return states[0] if states else "unknown"
        if task.state is TaskState.QUEUED:
            return "queued"
        if task.state is TaskState.TRACING:
            return "tracing"
        if task.state is TaskState.LOST or task.failures:
            return "uncovered"
        if any(key.evicted for key in task.keys) and not self._is_done(task, rank):
            return "unknown"
        return _how_far(task, rank)

    def _uncovered(self, task: Task, failures: tuple[Failure, ...]) -> None:
        self.uncovered_total += sum(failure.requests for failure in failures)
        task.failures = failures[:MAX_TASK_FAILURES]
        for failure in task.failures:
            self.problems.append(f"{failure.request}: {failure.kind}: {failure.text}"[:MAX_TEXT])

    def _pull(self, group: GroupState, now: float) -> bool:
        """Plans the next sweep of the universe whose turn it is; False if the group can take none now."""
        universe = group.universes[0]
        rank = self._ranks.attached[universe.rank]
        try:
            sweep = next(universe.sweeps, None)
        except ValueError as error:
            sweep = None
            self.uncovered_total += 1
            self.problems.append(f"the universe of {universe.provider} ended early: {error}"[:MAX_TEXT])
        if sweep is None:
            group.universes.popleft()
            self._one_traced(rank)
            return True
        accepted = self.plan(rank, universe.provider, (sweep,), Priority.UNIVERSE, None, now)
        if accepted.refused:
            universe.sweeps = chain((sweep,), universe.sweeps)
            return False
        group.universes.rotate(-1)
        return True


def _how_far(task: Task, rank: RankState) -> RequestState:
    """Of a traced task, by its keys. One that was forgotten had been settled: it failed, or is there."""
    roots = [(key, rank.roots(key.id[0])) for key in task.keys]
    if any(not where for _, where in roots):
        return "uncovered"
    if any(key.failed_in(where) for key, where in roots):
        return "failed"
    return "published" if all(key.evicted or key.published_in(where) for key, where in roots) else "open"


def _failures_each(tasks: tuple[Task, ...], failures: tuple[Failure, ...]) -> list[tuple[Failure, ...]]:
    """The failures of each task of an order; one may stand for the requests behind its own, too."""
    if len(tasks) < 2 or not failures:
        return [failures] * len(tasks)
    labels = [task.sweep.label() for task in tasks if task.sweep is not None]
    found: list[tuple[Failure, ...]] = [()] * len(tasks)
    for failure in failures:
        last = max(0, len(tasks) - failure.requests)
        first = labels.index(failure.request) if failure.request in labels else last
        for place in range(first, min(first + failure.requests, len(tasks))):
            found[place] += (msgspec.structs.replace(failure, request=labels[place], requests=1),)
    return found
