"""`prefetchd serve`: one process a node and user that plans, traces, compiles and publishes for its engines.

This module only puts the parts together, starts them and ends them; each is a module of `prefetchd/node/`. It
imports no kernel library and no torch. The subtle rule is the order of the end: nothing new is begun, what
runs may finish within the stated time, then everything is cancelled and waited for, and only when no child
is left are the directories given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import zmq

from prefetchd.config import Settings
from prefetchd.curve import keys_directory, read_keys
from prefetchd.endpoint import Endpoint, find_endpoint
from prefetchd.node.affinity import least_claimed
from prefetchd.node.allow import own_allow_list
from prefetchd.node.attaching import Attaching
from prefetchd.node.door import Door
from prefetchd.node.figures import Figures
from prefetchd.node.groups import Group, GroupDesk
from prefetchd.node.http import parse_address, window
from prefetchd.node.lock import sole_daemon
from prefetchd.node.memory import Allocator
from prefetchd.node.peers import Peer
from prefetchd.node.reception import Reception
from prefetchd.node.replaying import LogReplay
from prefetchd.node.state import Node
from prefetchd.node.systemd import Notifier
from prefetchd.node.tcp import Gatekeeper, allowed_peers, server_options
from prefetchd.node.works import Works
from prefetchd.protocol import Goodbye, HeartbeatAnswer
from prefetchd.store import Staging
from prefetchd.targets import Target
from prefetchd.tracer import private_root

log = logging.getLogger("prefetchd.daemon")

# How often peers, groups and limits are looked after.
HOUSEKEEPING_S = 1.0
# A peer that says nothing (its heartbeats are a second apart) is asked whether it is there; one that says
# nothing for the longer time is gone, whatever its socket says.
PROBE_AFTER_S, GONE_AFTER_S = 3.0, 60.0
# An engine that restarts comes back within this time; until then its helper stays warm.
GROUP_LINGER_S = 60.0
# Restarting the timer for less than this is not worth a system call.
SHORTEST_SLEEP_S = 0.001


class Daemon:
    """One run of the daemon, from `run` to its end."""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self._settings = settings
        self._environment = environment
        self.endpoint: Endpoint = find_endpoint(environment, settings.endpoint)
        self._notifier = Notifier(environment)
        self._allocator = Allocator()
        self._gatekeepers: list[Gatekeeper] = []
        self._own_cpus = frozenset(os.sched_getaffinity(0))
        self._tasks: set[asyncio.Task[None]] = set()
        self._helpers: dict[str, asyncio.Task[None]] = {}
        self._node = Node(settings, own_allow_list(settings), secrets.token_hex(8))
        self._works = Works(self._node, self._spawn, lambda answer: self._reception.answer(answer))
        LogReplay(self._node, environment, self._spawn, self._works.replay, self._works.pump)
        self._figures = Figures(self._node, self._works)
        attaching = Attaching(
            self._node,
            os.getpid(),
            self._make_group,
            self._spawn,
            self._works.pump,
            joined=self._works.joined,
        )
        self._attaching = attaching
        self._reception = Reception(
            self._node,
            attach=attaching.attach,
            universe=attaching.universe,
            stats=self._figures.message,
            pump=self._works.pump,
            sooner=self._wake,
        )
        self._ending = False
        self._woken = asyncio.Event()
        self._asked_to_end = 0
        self._idle_since: float | None = None

    async def run(self) -> None:
        """Serves until SIGTERM, SIGINT or idleness.

        Raises `AlreadyRunning`, `EndpointError`, `DoorError`, `AddressError`, `KeysError`, `HelperFailed` and
        `StoreUnwritable` before anything is served.
        """
        address = parse_address(self._settings.metrics)
        self._allocator.use_few_heaps()
        with ExitStack() as stack:
            stack.enter_context(sole_daemon(self.endpoint))
            # What helpers of a killed daemon left goes now.
            stack.enter_context(Staging(private_root(), variable="TMPDIR"))
            stack.callback(self._node.roots.close)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.term)
            self._open_doors(context, stack)
            self._hear_signals()
            async with contextlib.AsyncExitStack() as pages:
                if address is not None:
                    port = await pages.enter_async_context(window(address, self._pages()))
                    log.info("metrics on http://%s:%d/metrics", address[0], port)
                log.info("serving %s", ", ".join(door.address for door in self._node.doors))
                self._notifier.ready("serving")
                try:
                    await self._serve()
                finally:
                    await self._stop()

    def _open_doors(self, context: zmq.Context[zmq.Socket[bytes]], stack: ExitStack) -> None:
        local = Door(context, self.endpoint.address, self._reception, local=True)
        self._add_door(local, stack)
        if path := self.endpoint.socket_path:
            stack.callback(path.unlink, missing_ok=True)
            # For a directory that a user named: only this user may speak.
            path.chmod(0o600)
        if self._settings.listen:
            keys = read_keys(keys_directory(self._settings, self._environment))
            if not self._settings.allow_peers:
                log.warning(
                    "%s lets nobody in: allow_peers is empty; put other nodes' public keys into it",
                    self._settings.listen,
                )
            gatekeeper = Gatekeeper(context, allowed_peers(self._settings))
            self._gatekeepers.append(gatekeeper)
            stack.callback(gatekeeper.close)
            remote = Door(
                context, self._settings.listen, self._reception, local=False, prepare=server_options(keys)
            )
            self._add_door(remote, stack)

    def _add_door(self, door: Door, stack: ExitStack) -> None:
        self._node.doors.append(door)
        stack.callback(door.close)

    def _pages(self) -> dict[str, Any]:
        figures = self._figures
        return {
            "/metrics": figures.metrics_page,
            "/ready": figures.ready_page,
            "/healthz": figures.health_page,
        }

    def _hear_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        log.info("%s: ending", signal.Signals(number).name)
        self.end()

    def end(self) -> None:
        """Ends `run`; asked a second time it no longer waits for what runs."""
        self._asked_to_end += 1
        self._ending = True
        self._wake()
        if self._asked_to_end > 1:
            # Whoever asks twice does not want to wait for compiles.
            for task in self._tasks:
                task.cancel()

    # While it serves.

    async def _serve(self) -> None:
        node = self._node
        next_round = node.clock()
        while not self._ending:
            now = due = node.clock()
            try:
                due = node.broker.tick(now)
                if now >= next_round:
                    # A daemon that was stopped for a while hears first what its peers have said meanwhile.
                    late = now - next_round > HOUSEKEEPING_S
                    next_round = now + HOUSEKEEPING_S
                    self._keep_house(now, late=late)
                self._works.pump()
            except Exception:
                # A defect of ours must not end what serves every engine of the node.
                node.problems["defect"] += 1
                due = next_round
                log.exception("a round of the daemon failed")
            pause = max(min(due, next_round) - node.clock(), SHORTEST_SLEEP_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), pause)
            self._woken.clear()

    def _wake(self) -> None:
        """Has `_serve` ask again how long it may sleep."""
        self._woken.set()

    def _keep_house(self, now: float, *, late: bool) -> None:
        node = self._node
        if not late:
            for peer in node.peers.silent(GONE_AFTER_S, now):
                node.forget(peer)
            for peer in node.peers.silent(PROBE_AFTER_S, now):
                node.send(peer, HeartbeatAnswer(sequence=0, instance=node.instance))
        for group in node.groups.empty_longer_than(GROUP_LINGER_S, now):
            self._spawn(self._close_group(group))
        used = {
            root for group in node.groups.by_name.values() for roots in group.roots.values() for root in roots
        }
        node.roots.close_unused(frozenset(used))
        for root in node.later_roots.keys() - used:
            del node.later_roots[root]
        self._allocator.give_back(now)
        self._keep_off_engines()
        self._notifier.alive(f"{len(node.peers.ranks())} ranks, {self._works.busy} compiles")
        self._end_if_idle(now)

    def _keep_off_engines(self) -> None:
        """Everything that is started from here on runs where the fewest engines do."""
        engines = [peer.hello.cpus for peer in self._node.peers.ranks().values() if peer.local]
        cpus = least_claimed(self._own_cpus, engines)
        if cpus != os.sched_getaffinity(0):
            # Refused where the cpuset of the container has changed: then we stay where we are.
            with suppress(OSError):
                os.sched_setaffinity(0, cpus)

    def _end_if_idle(self, now: float) -> None:
        limit = self._settings.idle_exit_s
        idle = not len(self._node.peers) and self._node.broker.drained and not self._works.busy
        if not limit or not idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= limit:
            log.info("nobody has been here for %.0f s: ending", limit)
            self._ending = True

    # Helpers.

    def _make_group(self, peer: Peer, target: Target) -> Group:
        works = self._works
        group = self._node.groups.make(
            peer.hello,
            target,
            lambda made: GroupDesk(
                made, next_order=works.next_order, traced=works.traced, lost=works.lost, ready=self._compare
            ),
        )
        self._helpers[group.name] = asyncio.create_task(group.helper.run())
        for tell in self._node.group_made:
            tell(group)
        return group

    def _compare(self, group: Group) -> None:
        """A helper is up: whoever uses it hears where they differ."""
        for name, peer in self._node.peers.ranks().items():
            if name in group.ranks:
                self._attaching.report(peer, group.mismatches(peer.hello))

    async def _close_group(self, group: Group) -> None:
        self._node.groups.by_name.pop(group.name, None)
        task = self._helpers.pop(group.name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await group.workshop.close()

    # The end.

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop(self) -> None:
        self._notifier.stopping()
        node = self._node
        node.stopping = True
        for helper in self._helpers.values():
            helper.cancel()
        if self._tasks and self._asked_to_end < 2:
            await asyncio.wait(self._tasks, timeout=self._settings.stop_timeout_s)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._helpers.values(), return_exceptions=True)
        for group in list(node.groups.by_name.values()):
            await group.workshop.close()
        for peer in node.peers:
            node.send(peer, Goodbye(text="the daemon ends"))


def serve(settings: Settings, environment: Mapping[str, str]) -> None:
    """Runs a daemon in this process until it is asked to end; see `Daemon.run` for what it raises."""
    asyncio.run(Daemon(settings, environment).run())
