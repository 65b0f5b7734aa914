"""Who wants what of a task, how urgently, until when, and which of its keys are still to come for each.

The promise: a want ends only when every key of its task is settled for its rank, when the task cannot be
traced, or when the rank leaves. A deadline that passes makes a want less urgent and never ends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from math import inf

from prefetchd.broker.job_queue import JobQueue
from prefetchd.broker.keys import Key, KeyTable
from prefetchd.broker.ranks import Ranks, RankState
from prefetchd.broker.tasks import MAX_TASKS, GroupState, Task, TaskState, Want
from prefetchd.broker.timers import Timers
from prefetchd.broker.types import Accepted, Priority, Rank
from prefetchd.compilers.base import Job


class Wants:
    """The wants of every rank, and how they end."""

    def __init__(self, keys: KeyTable, ranks: Ranks, jobs: JobQueue, max_tasks: int = MAX_TASKS) -> None:
        self._keys = keys
        self._ranks = ranks
        self._jobs = jobs
        self._max_tasks = max_tasks
        self._ids = count(1)
        self._deadlines: Timers[tuple[Task, Rank, Want]] = Timers(
            lambda item, _: item[0].wants.get(item[1]) is item[2]
        )
        # Grows when something once settled is open again: what tasks remember as done is then looked at anew.
        self._epoch = 0
        self._open_wants = 0
        self.asked_total = 0
        self.refused_total = 0
        self.demoted_total = 0

    def invalidate(self) -> None:
        """What ranks had found settled may not be so any more."""
        self._epoch += 1

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

    def moved(self, rank: RankState, now: float) -> None:
        """The rank's roots are others now."""
        self.invalidate()
        open_keys = {key: None for task in rank.tasks for key in task.wants[rank.name].left or ()}
        for key in open_keys:
            self._jobs.moved(key, rank, now)

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

    def _covered(self, tasks: list[Task], rank: RankState) -> bool:
        """Whether a sweep that holds the request is settled for the rank, with nothing left uncovered."""
        return any(not task.failures and self._is_done(task, rank) for task in tasks)

    def _is_done(self, task: Task, rank: RankState) -> bool:
        """Whether every key of the task is settled for the rank; what was invalidated is looked at anew.

        Nobody asks again for a universe that was settled once, and all that batches plan is answered by it.
        """
        self._renew(task)
        if task.done & rank.account.bit:
            return True
        if task.state is not TaskState.TRACED or rank.name in task.wants:
            return False
        bit = rank.account.bit
        if any(key.evicted for key in task.keys):
            # What was known of them is old, above all that one failed.
            return False
        if not all(key.planned & bit and self._jobs.is_settled(key, rank) for key in task.keys):
            # Not those of a rank that has not been told of them: what it planned is counted for each.
            return False
        task.done |= bit
        return True

    def _renew(self, task: Task) -> None:
        if task.epoch != self._epoch:
            task.done, task.epoch = 0, self._epoch

    def _want(
        self, task: Task, rank: RankState, priority: Priority, deadline: float | None, now: float
    ) -> None:
        self._renew(task)
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
        # One that did not wait, as it follows a sweep, lies in no lane of those who asked before. It must not
        # wait in this rank's alone, which may leave.
        only = (name,) if name is not None and task.waiting else task.wants
        task.waiting = bool(task.wants)
        if task.waiting and task.single:
            task.group.queue_single(task)
        for rank in only:
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

    def _release(self, sweep: Task) -> None:
        """Those that follow the sweep are looked at again."""
        followers, sweep.followers = sweep.followers, []
        for task in followers:
            if task.state is TaskState.QUEUED and task.wants and not task.waiting:
                self._queue(task)

    def _one_traced(self, rank: RankState) -> None:
        rank.account.to_trace -= 1
        if not rank.account.to_trace:
            rank.account.settle_undecided()
