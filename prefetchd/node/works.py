"""Drives the broker: pulls what there is to do, does it, says how it ended, to the broker and to the peers.

`pump` is called after whatever may have changed something. It starts as much as the node's budget allows and
returns; each piece ends in a task of its own, which pumps again. The subtle rule: every piece that was taken
is answered, also one whose group is gone or whose task was cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefetchd.broker.job_queue import RESERVED_SLOTS
from prefetchd.broker.types import Answer, Check, Compile, End, Priority, Publish, Slots, TraceOrder
from prefetchd.compilers.base import Compiler, CompilerUnavailable, Job
from prefetchd.cores import usable_cores
from prefetchd.node.compiles import look
from prefetchd.node.groups import Group, Replay
from prefetchd.node.peers import Peer
from prefetchd.node.state import DIGEST_KEY, Node
from prefetchd.node.workshop import Workshop
from prefetchd.protocol import Failed, Published, Settled, Sweep, encode
from prefetchd.trace import Report
from prefetchd.winners import Tuning
from prefetchd.workplace import in_thread

log = logging.getLogger("prefetchd.daemon")

# Looks at the disk in one go: some milliseconds on a local disk.
CHECKS_AT_ONCE = 256
# Copies from root to root are disk work, not compiles.
PUBLISHES_AT_ONCE = 4
# That a plan needs nothing more is no urgent news, and looking at every open plan takes milliseconds.
SETTLE_PAUSE_S = 0.05
# Peers whose plans are looked at in a row.
SETTLE_AT_ONCE = 16
# Job digests remembered; one is two short texts.
MAX_DIGESTS = 100_000
ENDED = "the daemon ended it"
# Of a failure's text, what an engine is told; the whole of it stays here.
MAX_REASON = 2000


class Works:
    """`spawn` starts a task that the daemon waits for or cancels when it ends."""

    def __init__(
        self,
        node: Node,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        answer: Callable[[Answer], None],
    ) -> None:
        self._node = node
        self._spawn = spawn
        self._answer = answer
        self._checking = False
        self._compiling = 0
        self._publishing = 0
        self._to_settle: deque[Peer] = deque()
        self._settling = False

    @property
    def busy(self) -> int:
        """Compiles and copies that run now."""
        return self._compiling + self._publishing

    @property
    def slots(self) -> int:
        """How many compiles may run at a time on this node.

        By default one more than cores: background work leaves one free, and should still use every core.
        """
        return self._node.settings.jobs or usable_cores() + RESERVED_SLOTS

    def pump(self) -> None:
        """Starts whatever can be started, and says whatever can be said."""
        node = self._node
        if not node.stopping:
            self._start_work()
        for answer in node.broker.take_answers():
            self._answer(answer)
        if not node.ready and not node.expanding and node.broker.drained:
            node.ready = True
        self._settle_soon()

    def _start_work(self) -> None:
        node, broker = self._node, self._node.broker
        now = node.clock()
        if not self._checking and (checks := broker.next_checks(CHECKS_AT_ONCE)):
            self._checking = True
            self._spawn(self._check(checks))
        for name in broker.groups():
            if isinstance(name, str) and (group := node.groups.by_name.get(name)):
                group.helper.wake()
        slots = self.slots
        while work := broker.next_compile(Slots(slots - self._compiling, slots), now):
            self._compiling += 1
            self._spawn(self._compile(work))
        while self._publishing < PUBLISHES_AT_ONCE and (copy := broker.next_publish(now)):
            self._publishing += 1
            self._spawn(self._publish(copy))

    # Replay.

    def replay(self, group: Group, replay: Replay) -> None:
        """Every rank of the group, also one that joins later, gets what earlier runs compiled.

        At replay priority: behind what is scheduled to run, before the universe, the dearest first. `/ready`
        waits until each of it is published or failed. Jobs need no helper; requests start the group's. The
        caller bounds what it hands in, and brackets the reading of its logs with `Node.begin_expanding` and
        `end_expanding`. `Node.group_made` tells of a new group; its `workshop.compiler(name)` rebuilds
        records.
        """
        group.replays.append(replay)
        for rank in group.ranks:
            self._replay_to(group, rank, replay)
        self.pump()

    def joined(self, group: Group, rank: str) -> None:
        """The rank is of this group from now on."""
        for replay in group.replays:
            self._replay_to(group, rank, replay)
        if len(group.tunings):
            self._spawn(self._seed(group, group.tunings.all()))

    def _replay_to(self, group: Group, rank: str, replay: Replay) -> None:
        broker, now = self._node.broker, self._node.clock()
        self._node.ready = False
        broker.plan_jobs(rank, replay.jobs, Priority.REPLAY, now)
        for provider, sweeps in replay.requests.items():
            broker.plan(rank, provider, sweeps, Priority.REPLAY, now)
        if replay.requests:
            group.want(tuple(replay.requests))

    # Traces, called by the helpers.

    def next_order(self, group: str) -> TraceOrder | None:
        """The next order for a group's helper."""
        return None if self._node.stopping else self._node.broker.next_trace(group, self._node.clock())

    def traced(self, order: TraceOrder, report: Report) -> None:
        """A helper's report."""
        if isinstance(order.group, str) and (group := self._node.groups.by_name.get(order.group)):
            # Before the broker hears of the keys: what engines have compiled of them has its name first.
            self._remember_digests(group, report.jobs)
            if fresh := group.tunings.met(report.tunings):
                self._spawn(self._seed(group, fresh))
        self._node.broker.traced(order.id, report, self._node.clock())
        self._node.plans_changed = True
        self.pump()

    async def _seed(self, group: Group, tunings: list[Tuning]) -> None:
        problem = await in_thread(group.tunings.seed, group.tuned_roots(), tunings)
        if problem:
            text = "winners of %s could not all be given to its engines: %s"
            self._node.log.line(logging.WARNING, ("winners", group.name), text, group.name, problem)

    def lost(self, order: TraceOrder, reason: str) -> None:
        """The helper that had the order is gone."""
        self._node.broker.trace_lost(order.id, reason, self._node.clock())
        self._node.plans_changed = True
        self.pump()

    def _remember_digests(self, group: Group, jobs: tuple[Job, ...]) -> None:
        digests, broker, now = self._node.digests, self._node.broker, self._node.clock()
        for job in jobs:
            digest = getattr(self._compiler(group, job.compiler), "digest", None)
            if digest is None:
                continue
            try:
                name = digest(job)
            except CompilerUnavailable:
                return
            digests[job.compiler, name] = job.key
            broker.engine_named((job.compiler, DIGEST_KEY + name), (job.compiler, job.key), now)
            if len(digests) > MAX_DIGESTS:
                del digests[next(iter(digests))]

    # The disk.

    async def _check(self, checks: list[Check]) -> None:
        node = self._node
        found: list[bool] = []
        places = [(check, self._judges(check), node.later_roots.get(check.root, ())) for check in checks]
        try:
            found = await in_thread(_look_all, places)
        finally:
            self._checking = False
            now = node.clock()
            for number, check in enumerate(checks):
                node.broker.checked(check, number < len(found) and found[number], now)
            node.plans_changed = True
        self.pump()

    def _judges(self, check: Check) -> list[Compiler]:
        """A compiler judges for its own target: those whose groups use the root."""
        using = [group for group in self._node.groups.by_name.values() if group.uses(check.root)]
        return [made for group in using if (made := self._compiler(group, check.compiler)) is not None]

    def _compiler(self, group: Group, name: str) -> Compiler | None:
        try:
            return group.workshop.compiler(name)
        except CompilerUnavailable:
            return None

    # Compiles and copies.

    async def _compile(self, work: Compile) -> None:
        node = self._node
        end = End(ok=False, text=ENDED, retryable=True)
        try:
            with self._workshop(work) as workshop:
                end = await node.compiles.compile(work, workshop)
        except CompilerUnavailable as error:
            end = End(ok=False, text=str(error), retryable=True)
        finally:
            self._compiling -= 1
            node.broker.compiled(work, end, node.clock())
            self._tell(work.job, work.root, end)
        self.pump()

    async def _publish(self, work: Publish) -> None:
        node = self._node
        end = End(ok=False, text=ENDED, retryable=True)
        try:
            with self._workshop(work) as workshop:
                end = await node.compiles.publish(work, workshop)
        except CompilerUnavailable as error:
            end = End(ok=False, text=str(error), retryable=True)
        finally:
            self._publishing -= 1
            node.broker.published(work, end, node.clock())
            self._tell(work.job, work.root, end)
        self.pump()

    @contextmanager
    def _workshop(self, work: Compile | Publish) -> Iterator[Workshop]:
        """The workshop of the work's group; where that is gone, of one whose engines use the same root."""
        groups = self._node.groups.by_name
        group = groups.get(str(work.group)) or next(
            (each for each in groups.values() if each.uses(work.root)), None
        )
        if group is None:
            raise CompilerUnavailable(f"no engine uses {work.root} any more")
        group.busy += 1
        try:
            yield group.workshop
        finally:
            group.busy -= 1

    def _tell(self, job: Job, root: str, end: End) -> None:
        """Every attached engine that looks there hears of it."""
        node = self._node
        self._node.plans_changed = True
        if end.ok:
            frame = encode(Published(compiler=job.compiler, key=job.key, root=root))
        else:
            log.warning(
                "%s %s: %s", job.compiler, job.key, end.text.splitlines()[0] if end.text else "failed"
            )
            text = end.text[:MAX_REASON]
            frame = encode(Failed(compiler=job.compiler, key=job.key, root=root, text=text))
        for name, peer in node.peers.ranks().items():
            group = node.group_of(peer)
            if group is None or root not in group.roots.get(name, ()):
                continue
            if end.ok:
                node.send_frame(peer, frame, "Published")
            elif node.broker.key_status(name, (job.compiler, job.key)).state == "failed":
                node.send_frame(peer, frame, "Failed")

    # Plans.

    def _settle_soon(self) -> None:
        if self._node.plans_changed and not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_later(SETTLE_PAUSE_S, self._settle)

    def _settle(self) -> None:
        """Tells each peer which of its plans need nothing more, some peers at a time."""
        self._settling = False
        if not self._to_settle:
            self._node.plans_changed = False
            self._to_settle.extend(peer for peer in self._node.peers if peer.plans)
        for _ in range(min(SETTLE_AT_ONCE, len(self._to_settle))):
            self._settle_peer(self._to_settle.popleft())
        if self._to_settle:
            self._settling = True
            asyncio.get_running_loop().call_soon(self._settle)
        else:
            self._settle_soon()

    def _settle_peer(self, peer: Peer) -> None:
        settled = []
        for plan in peer.plans:
            while plan.next < len(plan.asks) and self._is_settled(peer, *plan.asks[plan.next]):
                plan.next += 1
            if plan.next == len(plan.asks):
                settled.append(plan)
        if settled and self._node.send(peer, Settled(plans=tuple(plan.id for plan in settled))):
            peer.drop_plans(settled)

    def _is_settled(self, peer: Peer, provider: str, sweep: Sweep) -> bool:
        if peer.rank is None:
            return False
        state = self._node.broker.request_state(peer.rank, provider, sweep)
        # Unknown: it was refused or forgotten, and nothing more will come of it.
        return state in ("published", "failed", "uncovered", "unknown")


def _look_all(places: list[tuple[Check, list[Compiler], tuple[str, ...]]]) -> list[bool]:
    return [
        any(look(check, judge, tuple(map(Path, later))) for judge in judges)
        for check, judges, later in places
    ]
