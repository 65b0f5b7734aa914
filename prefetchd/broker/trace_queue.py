"""From a plan to the keys it comes to: tasks, who wants them and how urgently, and what helpers report.

The promise: a want ends only when every key of its task is settled for its rank, when the task cannot be
traced, or when the rank leaves. A deadline that passes makes a want less urgent and never ends it; a helper
that dies gives its tasks back.

Single requests are traced many at a time, since a fork costs more than most of them. The subtle rule: what
one of them needs, all of them are taken to need, because a library shows a key at its first use only; so only
those that the same ranks want as urgently are put together.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import chain, count
from math import inf

import msgspec

from prefetchd.broker.job_queue import JobQueue
from prefetchd.broker.keys import MAX_TEXT, Key, KeyTable
from prefetchd.broker.ranks import Ranks, RankState
from prefetchd.broker.tasks import MAX_CRASHES, MAX_TASKS, GroupState, Task, TaskState, Universe, Want
from prefetchd.broker.timers import Timers
from prefetchd.broker.types import Accepted, Group, Priority, Rank, RequestState, TraceOrder
from prefetchd.compilers.base import Job
from prefetchd.sweeps import Sweep
from prefetchd.trace import Failure, Report

# Groups without a rank that are kept: an engine that restarts finds its universe traced.
MAX_IDLE_GROUPS = 16
# Enough to see what is wrong; the rest is in the log.
MAX_PROBLEMS = 32
# Single requests traced in one process. A fork, with all that a library does at its first use, takes some ten
# ms and a request one; the dearest take 0.2 s, and what is more urgent should not wait for many of them.
MAX_BATCH = 32
# Failures of one sweep kept with their text; the count is kept for all.
MAX_TASK_FAILURES = 8


class TraceQueue:
    """The groups and their tasks."""

    def __init__(
        self,
        keys: KeyTable,
        ranks: Ranks,
        jobs: JobQueue,
        max_tasks: int = MAX_TASKS,
        max_batch: int = MAX_BATCH,
    ) -> None:
        self._keys = keys
        self._ranks = ranks
        self._jobs = jobs
        self._max_tasks = max_tasks
        self._max_batch = max_batch
        self._groups: OrderedDict[Group, GroupState] = OrderedDict()
        # By order; the first task gives it its id.
        self._tracing: dict[int, tuple[Task, ...]] = {}
        self._ids = count(1)
        self._deadlines: Timers[tuple[Task, Rank, Want]] = Timers(
            lambda item, _: item[0].wants.get(item[1]) is item[2]
        )
        # Grows when something once settled is open again: what tasks remember as done is then looked at anew.
        self._epoch = 0
        self._open_wants = 0
        # The latest reasons for which something is not covered.
        self.problems: deque[str] = deque(maxlen=MAX_PROBLEMS)
        self.asked_total = 0
        self.refused_total = 0
        self.traced_total = 0
        self.uncovered_total = 0
        self.demoted_total = 0

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

    def invalidate(self) -> None:
        """What ranks had found settled may not be so any more."""
        self._epoch += 1

    # Asking.

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
        bit, epoch, name = rank.account.bit, self._epoch, rank.name
        new = known = refused = 0
        for sweep in sweeps:
            task = table.find(sweep)
            if task is None:
                if not sweep.values and self._covered(table.covering(sweep.request), bit):
                    known += 1
                    continue
                task = Task(next(self._ids), rank.group, provider, sweep)
                if not rank.group.add(task):
                    refused += 1
                    continue
                new += 1
            else:
                known += 1
                if task.done & bit and task.epoch == epoch:
                    continue
                want = task.wants.get(name)
                if want is not None:
                    self._ask_again(task, rank, want, priority, deadline)
                    continue
            self._want(task, rank, priority, deadline, now)
        self.asked_total += new + known + refused
        self.refused_total += refused
        return Accepted(new, known, refused)

    def plan_jobs(
        self, rank: RankState, jobs: Iterable[Job], priority: Priority, deadline: float | None, now: float
    ) -> Accepted:
        """The same for jobs that need no trace, such as those of a log."""
        new = known = refused = 0
        for job in jobs:
            key = self._take(job, rank.group, now)
            if key in rank.direct:
                task = rank.direct[key]
                self._ask_again(task, rank, task.wants[rank.name], priority, deadline)
                known += 1
            elif len(rank.direct) >= self._max_tasks:
                refused += 1
            elif self.want_key(rank, key, priority, deadline, now):
                new += 1
            else:
                known += 1
        self.asked_total += new + known + refused
        self.refused_total += refused
        return Accepted(new, known, refused)

    def want_key(
        self, rank: RankState, key: Key, priority: Priority, deadline: float | None, now: float
    ) -> bool:
        """The rank wants one key directly; False if it is settled already."""
        task = Task(next(self._ids), rank.group, "", None)
        task.state = TaskState.TRACED
        task.keys = (key,)
        self._want(task, rank, priority, deadline, now)
        if not task.wants:
            return False
        rank.direct[key] = task
        return True

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

    def moved(self, rank: RankState, now: float) -> None:
        """The rank's roots are others now."""
        self.invalidate()
        open_keys = {key: None for task in rank.tasks for key in task.wants[rank.name].left or ()}
        for key in open_keys:
            self._jobs.moved(key, rank, now)

    # Tracing.

    def next_trace(self, name: Group, now: float) -> TraceOrder | None:
        """The next tasks for a free helper of the group."""
        group = self._groups.get(name)
        while group is not None and (taken := self._pop(group, now)) is not None:
            task, rank, priority = taken
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
        taken = group.queue.pop()
        while taken is None and group.universes and self._pull(group, now):
            taken = group.queue.pop()
        return taken

    def _companions(self, task: Task, rank: Rank, priority: Priority) -> list[Task]:
        """Further single requests to trace in the same process; an urgent one waits for no others."""
        if not task.single or priority is Priority.URGENT:
            return []

        def fits(other: Task) -> bool:
            return (
                other.single and other.provider == task.provider and other.wants.keys() == task.wants.keys()
            )

        found = task.group.queue.pop_more(rank, priority, fits, self._max_batch - 1)
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
        if sweep.done & self._ranks.attached[name].account.bit and sweep.epoch == self._epoch:
            return True
        other = sweep.wants.get(name)
        return other is not None and other.urgency <= want.urgency

    def _release(self, sweep: Task) -> None:
        """Those that follow the sweep are looked at again."""
        followers, sweep.followers = sweep.followers, []
        for task in followers:
            if task.state is TaskState.QUEUED and task.wants and not task.waiting:
                self._queue(task)

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

    def settled(self, key: Key, name: Rank) -> None:
        """Nothing more will be done on the key for the rank: wants that waited for it alone end."""
        rank = self._ranks.attached[name]
        for task in list(key.tasks):
            want = task.wants.get(name)
            if want is not None and want.left is not None and key in want.left:
                want.left.pop(key, None)
                if not want.left:
                    self._end_want(task, rank, done=True)

    def tick(self, now: float) -> float:
        """Demotes what was not ready in time; when to come again."""
        for task, name, want in self._deadlines.due(now):
            if want.deadline is None or want.priority is Priority.UNIVERSE:
                continue
            if want.deadline > now:
                self._deadlines.push(want.deadline, (task, name, want))
                continue
            want.deadline = None
            self.demoted_total += 1
            self._move(task, self._ranks.attached[name], want, Priority.UNIVERSE)
        return self._deadlines.next_at()

    def state(self, rank: RankState, provider: str, sweep: Sweep) -> RequestState:
        """How far a planned request or sweep is for this rank."""
        table = rank.group.table(provider)
        task = table.find(sweep)
        if task is None:
            covering = [] if sweep.values else table.covering(sweep.request)
            return "published" if self._covered(covering, rank.account.bit) else "unknown"
        if task.state is TaskState.QUEUED:
            return "queued"
        if task.state is TaskState.TRACING:
            return "tracing"
        if task.state is TaskState.LOST or task.failures:
            return "uncovered"
        if any(key.evicted for key in task.keys):
            return "published" if self._covered([task], rank.account.bit) else "unknown"
        roots = [(key, rank.roots(key.id[0])) for key in task.keys]
        if any(not where for _, where in roots):
            return "uncovered"
        if any(key.failed_in(where) for key, where in roots):
            return "failed"
        return "published" if all(key.published_in(where) for key, where in roots) else "open"

    # Wants.

    def _covered(self, tasks: list[Task], bit: int) -> bool:
        """Whether a sweep that holds the request is settled for the rank, with nothing left uncovered."""
        return any(task.done & bit and task.epoch == self._epoch and not task.failures for task in tasks)

    def _want(
        self, task: Task, rank: RankState, priority: Priority, deadline: float | None, now: float
    ) -> None:
        if task.epoch != self._epoch:
            task.done, task.epoch = 0, self._epoch
        if task.state is TaskState.LOST:
            return
        if task.state is TaskState.TRACED and any(key.evicted for key in task.keys):
            task.state, task.keys = TaskState.QUEUED, ()
        want = Want(priority, deadline, now)
        task.wants[rank.name] = want
        rank.tasks[task] = None
        self._open_wants += 1
        task.asks.add(rank.name, priority)
        if task.state is TaskState.TRACED:
            want.left = {}
            for key in task.keys:
                self._join(task, key, rank, want)
            if not want.left:
                self._end_want(task, rank, done=True)
                return
        else:
            rank.account.to_trace += 1
            if task.state is TaskState.QUEUED:
                self._queue(task, rank.name)
        if deadline is not None:
            self._deadlines.push(deadline, (task, rank.name, want))

    def _ask_again(
        self, task: Task, rank: RankState, want: Want, priority: Priority, deadline: float | None
    ) -> None:
        if priority < want.priority:
            want.deadline = deadline
            if deadline is not None:
                self._deadlines.push(deadline, (task, rank.name, want))
            self._move(task, rank, want, priority)
        elif priority == want.priority and want.deadline is not None:
            # Another batch wants it too: it stays urgent until the later one.
            want.deadline = None if deadline is None else max(deadline, want.deadline)

    def _move(self, task: Task, rank: RankState, want: Want, priority: Priority) -> None:
        old, want.priority = want.priority, priority
        self._release(task)
        if task.asks.move(rank.name, old, priority) and task.state is TaskState.QUEUED:
            self._queue(task, rank.name)
        for key in want.left or ():
            self._jobs.move(key, rank, old, priority)

    def _queue(self, task: Task, name: Rank | None = None) -> None:
        task.waiting = bool(task.wants)
        for rank in task.wants if name is None else (name,):
            deadline = task.wants[rank].deadline
            task.group.queue.push(task, rank, (inf if deadline is None else deadline, 0.0))
        task.group.queue.recount(task)

    def _join(self, task: Task, key: Key, rank: RankState, want: Want) -> None:
        """The rank's want needs the key."""
        assert want.left is not None
        if key in want.left:
            return
        rank.account.planned(key, want.since)
        if self._jobs.ask(key, rank, want.priority, want.deadline):
            want.left[key] = None
            key.tasks[task] = None
        elif key.published_in(rank.roots(key.id[0])):
            rank.account.on_disk(key)

    def _end_want(self, task: Task, rank: RankState, *, done: bool) -> None:
        want = task.wants.pop(rank.name)
        task.asks.drop(rank.name)
        rank.tasks.pop(task, None)
        self._open_wants -= 1
        if done:
            task.done |= rank.account.bit
        elif want.left is None:
            rank.account.to_trace -= 1
        if task.sweep is None:
            rank.direct.pop(task.keys[0], None)
        if task.wants:
            return
        for key in task.keys:
            key.tasks.pop(task, None)
        if task.state is TaskState.QUEUED:
            task.waiting = False
            task.group.queue.recount(task)
            task.group.remove(task)
            self._release(task)

    def _take(self, job: Job, group: GroupState, now: float) -> Key:
        key = self._keys.touch((job.compiler, job.key))
        if key.failure is not None and group.name not in key.failure.groups:
            # Another fingerprint: its job may differ in what the key does not show.
            self._keys.give_job(key, job, group.name)
            self._jobs.forgive(key, now)
        elif key.job is None:
            self._keys.give_job(key, job, group.name)
        return key

    def _uncovered(self, task: Task, failures: tuple[Failure, ...]) -> None:
        self.uncovered_total += sum(failure.requests for failure in failures)
        task.failures = failures[:MAX_TASK_FAILURES]
        for failure in task.failures:
            self.problems.append(f"{failure.request}: {failure.kind}: {failure.text}"[:MAX_TEXT])

    def _one_traced(self, rank: RankState) -> None:
        rank.account.to_trace -= 1
        if not rank.account.to_trace:
            rank.account.settle_undecided()

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
