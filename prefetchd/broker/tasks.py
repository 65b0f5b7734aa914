"""What has been asked for in each group: one task a sweep, from the first ask to the keys it came to.

A task is traced once a group, whoever asks and however often. The one subtle rule: a single request inside a
sweep that is published already, or that will be traced as soon, needs no trace of its own; inside one that is
less urgent it gets its own, because only its own trace tells which of the sweep's keys it needs now.

Whatever is iterated is a dict, never a set, so that equal events give equal decisions.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from enum import Enum, auto
from itertools import islice
from math import inf

from prefetchd.broker.asks import Asks, FairQueue
from prefetchd.broker.keys import EVICTION_TRIES, Key
from prefetchd.broker.types import Group, Priority, Rank
from prefetchd.request import Request
from prefetchd.sweeps import Sweep, site_of
from prefetchd.trace import Failure

# Tasks of one group. A universe is tens of sweeps, and what batches add are single requests; a request with
# its task is about 1 KB.
MAX_TASKS = 100_000
# Of one site, those in which single requests are looked for. A model has one, ranks of other limits more.
MAX_SWEEPS_OF_SITE = 64
# A helper that died this often under a task is likely to die of it.
MAX_CRASHES = 3


class TaskState(Enum):
    """How far a task is."""

    QUEUED = auto()
    TRACING = auto()
    TRACED = auto()
    # It was never traced to the end; asking again changes nothing, a retry does.
    LOST = auto()


class Want:
    """One rank's ask for a task. `left`: the keys not settled for it yet, None before the trace."""

    __slots__ = ("deadline", "left", "priority", "since")

    def __init__(self, priority: Priority, deadline: float | None, since: float) -> None:
        self.priority = priority
        self.deadline = deadline
        self.since = since
        self.left: dict[Key, None] | None = None

    @property
    def urgency(self) -> tuple[Priority, float]:
        """Smaller is more urgent."""
        return self.priority, inf if self.deadline is None else self.deadline


class Task:
    """One sweep of one provider in one group; without a sweep, jobs that were asked for directly."""

    __slots__ = (
        "asks",
        "counted",
        "crashes",
        "done",
        "epoch",
        "failures",
        "followers",
        "group",
        "id",
        "keys",
        "provider",
        "state",
        "sweep",
        "waiting",
        "wants",
    )

    def __init__(self, identity: int, group: GroupState, provider: str, sweep: Sweep | None) -> None:
        self.id = identity
        self.group = group
        self.provider = provider
        self.sweep = sweep
        self.state = TaskState.QUEUED
        self.wants: dict[Rank, Want] = {}
        self.asks = Asks()
        self.keys: tuple[Key, ...] = ()
        self.failures: tuple[Failure, ...] = ()
        self.crashes = 0
        # Single requests that this sweep is traced for too.
        self.followers: list[Task] = []
        # A bit for each rank for which every key was settled, true as long as nothing was lost since `epoch`.
        self.done = 0
        self.epoch = -1
        self.waiting = False
        self.counted: Priority | None = None

    @property
    def single(self) -> bool:
        """Whether it is one request, and not known to end helpers: it may be traced beside others."""
        return self.sweep is not None and not self.sweep.values and not self.crashes

    def idle(self) -> bool:
        """Whether nobody asks for it and no helper has it."""
        return not self.wants and self.state is not TaskState.TRACING


class TaskTable:
    """The tasks of one provider in one group, by what they stand for."""

    def __init__(self) -> None:
        self.requests: dict[Request, Task] = {}
        self.sweeps: dict[Sweep, Task] = {}
        self._sites: dict[Hashable, dict[Task, None]] = {}

    def find(self, sweep: Sweep) -> Task | None:
        """The task of exactly this sweep."""
        return self.sweeps.get(sweep) if sweep.values else self.requests.get(sweep.request)

    def covering(self, request: Request) -> list[Task]:
        """The larger sweeps that hold this request."""
        if not self._sites:
            return []
        site, value = site_of(request)
        if value is None:
            return []
        known = self._sites.get(site, {})
        return [task for task in known if task.sweep is not None and task.sweep.holds(value)]

    def add(self, task: Task) -> None:
        """Files a task under its sweep."""
        assert task.sweep is not None
        if task.sweep.values:
            self.sweeps[task.sweep] = task
            known = self._sites.setdefault(site_of(task.sweep.request)[0], {})
            if len(known) < MAX_SWEEPS_OF_SITE:
                known[task] = None
        else:
            self.requests[task.sweep.request] = task

    def remove(self, task: Task) -> None:
        """Forgets a task."""
        assert task.sweep is not None
        if not task.sweep.values:
            del self.requests[task.sweep.request]
            return
        del self.sweeps[task.sweep]
        site = site_of(task.sweep.request)[0]
        known = self._sites.get(site, {})
        known.pop(task, None)
        if not known:
            self._sites.pop(site, None)


class Universe:
    """Sweeps that are pulled one by one when nothing better is left to trace."""

    __slots__ = ("provider", "rank", "since", "sweeps")

    def __init__(self, rank: Rank, provider: str, sweeps: Iterator[Sweep], since: float) -> None:
        self.rank = rank
        self.provider = provider
        self.sweeps = sweeps
        self.since = since


class GroupState:
    """All that is known of one group."""

    def __init__(self, name: Group, max_tasks: int = MAX_TASKS) -> None:
        self.name = name
        self.queue: FairQueue[Task] = FairQueue()
        self.universes: deque[Universe] = deque()
        # Orders in a row that were not the universe's.
        self.passed_over = 0
        self.ranks: set[Rank] = set()
        self._tables: dict[str, TaskTable] = {}
        self._tasks: OrderedDict[Task, None] = OrderedDict()
        self._max_tasks = max_tasks
        self._singles: dict[tuple[str, Hashable], dict[Task, None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def table(self, provider: str) -> TaskTable:
        """The provider's tasks."""
        table = self._tables.get(provider)
        if table is None:
            self._tables[provider] = table = TaskTable()
        return table

    def add(self, task: Task) -> bool:
        """Files a new task; False if the group is full of tasks that somebody still asks for."""
        for _ in range(EVICTION_TRIES):
            if len(self._tasks) < self._max_tasks:
                break
            oldest = next(iter(self._tasks))
            if oldest.idle():
                self.remove(oldest)
            else:
                self._tasks.move_to_end(oldest)
        else:
            return False
        self._tasks[task] = None
        self.table(task.provider).add(task)
        return True

    def remove(self, task: Task) -> None:
        """Forgets a task."""
        if self._tasks.pop(task, task) is None:
            self.table(task.provider).remove(task)
            self.forget_single(task)

    def queue_single(self, task: Task) -> None:
        """The single request waits to be traced, beside others of its site."""
        self._singles.setdefault(_site(task), {})[task] = None

    def forget_single(self, task: Task) -> None:
        """It does so no longer."""
        site = _site(task)
        waiting = self._singles.get(site)
        if waiting is not None:
            waiting.pop(task, None)
            if not waiting:
                del self._singles[site]

    def singles_beside(self, task: Task, limit: int) -> list[Task]:
        """Up to so many of the single requests that wait at this one's site."""
        return list(islice(self._singles.get(_site(task), ()), limit))

    def failed(self) -> list[Task]:
        """The tasks that were not traced, or not all of whose requests were."""
        return [task for task in self._tasks if task.state is TaskState.LOST or task.failures]


def _site(task: Task) -> tuple[str, Hashable]:
    assert task.sweep is not None
    return task.provider, site_of(task.sweep.request)[0]
