"""An engine introduces itself: what it reports is compared, it joins a group, and its directories are opened.

The subtle rule: a hello may be repeated at any time, with more or other content, on a new connection or an
old one. Each time the whole of it is gone through, and what is the same changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from prefetchd.compilers import COMPILERS, compiler_class
from prefetchd.cute.pools import with_state_pool
from prefetchd.node.groups import Group, admitted_roots, installed_providers, refused_roots
from prefetchd.node.peers import Peer
from prefetchd.node.state import Node
from prefetchd.profiles.architectures import ProfileError
from prefetchd.profiles.codec import decode_profile
from prefetchd.protocol import Goodbye, HeartbeatAnswer, Mismatch, Refused, Sweep, Universe, Welcome
from prefetchd.provider import Limits, load_providers
from prefetchd.store import StoreUnwritable
from prefetchd.targets import Target
from prefetchd.workplace import in_thread

# Differences of one connection that are counted and logged; more are one cause, or noise.
MAX_MISMATCHES = 64
# Of a value that differs, what the log shows; the engine is told the whole of it.
MAX_SHOWN = 500
# Engines that call themselves alike and are asked whether they are still there when one more comes.
MAX_PROBES = 16
# Kinds of engine on one node at a time, each with a helper of some hundred megabytes; a rank for each GPU and
# each of several engines where ranks share none.
MAX_GROUPS, MAX_GROUPS_PER_RANK = 8, 64


class Attaching:
    """Handles hellos and profiles. `make_group` starts a group's helper, `pump` does what became possible.

    `joined` hears of a rank that was not in the group before, has other directories, or comes back by a new
    connection.
    """

    def __init__(
        self,
        node: Node,
        pid: int,
        make_group: Callable[[Peer, Target], Group],
        spawn: Callable[..., object],
        pump: Callable[[], None],
        joined: Callable[[Group, str], None],
    ) -> None:
        self._node = node
        self._pid = pid
        self._make_group = make_group
        self._spawn = spawn
        self._pump = pump
        self._joined = joined

    @property
    def _most_groups(self) -> int:
        return MAX_GROUPS_PER_RANK if self._node.settings.helper_per_rank else MAX_GROUPS

    def attach(self, peer: Peer) -> None:
        """After each hello of a peer."""
        node, hello = self._node, peer.hello
        if node.stopping:
            node.send(peer, Goodbye(text="the daemon is ending"))
            return
        if hello.target is not None and not self._join(peer, hello.target):
            return
        node.send(peer, Welcome(instance=node.instance, pid=self._pid))

    def _join(self, peer: Peer, target: Target) -> bool:
        node, hello = self._node, peer.hello
        before = node.group_of(peer)
        if before is not None and before.suits(hello, target, node.allow):
            group = before
        elif (found := node.groups.find(hello, target)) is not None:
            group = found
        elif peer.local and len(node.groups.by_name) >= self._most_groups:
            node.problems["too many kinds of engine"] += 1
            text = (
                f"{self._most_groups} kinds of engine (target, interpreter, packages, fingerprint) are here "
                "already, and each has its helper; end some, or wait a minute until their helpers are gone"
            )
            node.send(peer, Refused(text=text))
            return False
        elif peer.local:
            group = self._make_group(peer, target)
        else:
            node.problems["remote without a helper"] += 1
            text = (
                "no engine of the daemon's own node is like this one (target, interpreter, packages), and a "
                "peer of another node does not start a helper; start the daemon on the engine's node"
            )
            node.send(peer, Refused(text=text))
            return False
        if not self._name(peer):
            node.send(
                peer, Refused(text="too many ranks are attached; end some, or wait until they are gone")
            )
            return False
        assert peer.rank is not None
        if before is not None and before is not group:
            before.leave(peer.rank, node.clock())
            # The broker starts this rank anew in another group.
            peer.universe = None
        peer.group = group.name
        group.join(peer.rank, hello)
        roots, mismatches = self._roots(peer, group)
        group.roots[peer.rank] = frozenset(path for paths in roots.values() for path in paths)
        first = {name: paths[0] for name, paths in roots.items()}
        moved = group.first_roots.get(peer.rank) != first
        group.first_roots[peer.rank] = first
        now = node.clock()
        if not node.broker.attach(peer.rank, peer.generation, group.name, roots, now):
            group.leave(peer.rank, now)
            node.send(peer, Refused(text="too many ranks were attached; restart the daemon"))
            return False
        if before is not group or moved:
            self._joined(group, peer.rank)
        self.report(peer, [*mismatches, *node.allow.differences(hello), *group.mismatches(hello)])
        return True

    def _name(self, peer: Peer) -> bool:
        """Gives the peer a rank's name; a connection that has ended no longer holds one."""
        node = self._node
        if peer.rank is None:
            for other in node.peers.namesakes(peer.hello)[:MAX_PROBES]:
                node.send(other, HeartbeatAnswer(sequence=0, instance=node.instance))
        elif node.peers.of_rank(peer.rank) is peer:
            return True
        previous = node.peers.name_rank(peer)
        if previous is not None:
            # The same process by an older connection: what it wanted it will say again here.
            node.peers.remove(previous)
        return peer.rank is not None

    def _roots(self, peer: Peer, group: Group) -> tuple[dict[str, tuple[str, ...]], list[Mismatch]]:
        """By compiler where to publish for this engine, and what is wrong with what it reported."""
        node, hello = self._node, peer.hello
        mismatches = refused_roots(hello, node.allow) if peer.local else []
        admitted = admitted_roots(hello, node.allow) if peer.local else {}
        found: dict[str, tuple[str, ...]] = {}
        for name in COMPILERS:
            reported = hello.cache_roots.get(name)
            paths = admitted.get(name, ()) if reported and peer.local else group.default_roots(name)
            if not paths:
                continue
            if not reported and not Path(paths[0]).is_dir():
                # A library that this engine may never use: its directory is made when something is for it.
                found[name] = (paths[0],)
                node.later_roots[paths[0]] = paths[1:]
                continue
            try:
                # What a killed daemon left there goes now.
                node.roots.get(paths[0], compiler_class(name).cache_variable)
            except StoreUnwritable as error:
                mismatches.append(
                    Mismatch(compiler=name, field="cache_root", engine=paths[0], helper="", fix=str(error))
                )
                continue
            found[name] = (paths[0],)
            node.later_roots[paths[0]] = paths[1:]
        return found, mismatches

    def report(self, peer: Peer, mismatches: list[Mismatch]) -> None:
        """Tells the engine, and counts each difference once for it."""
        node = self._node
        for mismatch in mismatches:
            name = (mismatch.compiler, mismatch.field, mismatch.engine)
            if name not in peer.mismatches and len(peer.mismatches) < MAX_MISMATCHES:
                peer.mismatches.add(name)
                node.broker.mismatch(mismatch.compiler, mismatch.field)
                if mismatch.field == "cache_root":
                    node.refused_roots[mismatch.compiler] += 1
                what = f"{mismatch.compiler} {mismatch.field}".strip()
                node.log.line(
                    logging.WARNING, ("mismatch", peer.rank, what),
                    "mismatch of %s: %s: the engine has %r, here it is %r; %s",
                    peer.rank, what, mismatch.engine[:MAX_SHOWN], mismatch.helper[:MAX_SHOWN], mismatch.fix,
                )  # fmt: skip
            node.send(peer, mismatch)

    def universe(self, peer: Peer, universe: Universe) -> None:
        """After each profile that a peer sends; the same again changes nothing."""
        node = self._node
        if peer.rank is None:
            node.problems["not attached"] += 1
            return
        slots = peer.hello.state_slots
        if peer.universe == (universe.profile, slots):
            return
        peer.universe = universe.profile, slots
        group = node.group_of(peer)
        if group is not None and peer.local:
            known = tuple(name for name in universe.providers if name in installed_providers())
            group.want(known)
            node.begin_expanding()
            self._spawn(self._expand(peer, group, universe, known, slots))

    async def _expand(
        self, peer: Peer, group: Group, universe: Universe, names: tuple[str, ...], slots: int
    ) -> None:
        node = self._node
        generation = peer.generation
        try:
            sweeps = await in_thread(_sweeps, universe, names, group.target, slots)
        except (ProfileError, ValueError) as error:
            node.problems["profile"] += 1
            text = "the profile of %s cannot be used: %s"
            node.log.line(logging.WARNING, ("profile", peer.rank), text, peer.rank, error)
            return
        finally:
            node.end_expanding()
        if peer.rank is None or peer.generation != generation:
            return
        for name, found in sweeps.items():
            node.broker.add_universe(peer.rank, name, node.allowed(peer, found), node.clock())
        self._pump()


def _sweeps(universe: Universe, names: tuple[str, ...], target: Target, slots: int) -> dict[str, list[Sweep]]:
    profile = with_state_pool(decode_profile(universe.profile), slots)
    limits = Limits(max_tokens=universe.max_tokens, target=target)
    return {
        name: list(provider.universe_sweeps(profile, limits))
        for name, provider in load_providers(names).items()
    }
