"""What the daemon's parts share: who is there, what is to be done, what was counted, how to speak to a peer.

No part calls another but through here. Time is asked for once a step, so that one step sees one moment.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from prefetchd.broker import Broker
from prefetchd.config import Settings
from prefetchd.node.allow import AllowList
from prefetchd.node.compiles import Compiles
from prefetchd.node.door import Door, Sent
from prefetchd.node.groups import Group, Groups
from prefetchd.node.peers import Peer, Peers
from prefetchd.node.roots import Roots
from prefetchd.node.sparse_log import SparseLog
from prefetchd.protocol import Message, Sweep, encode

# By what a compile is called that only its digest names, and no trace of ours has met.
DIGEST_KEY = "digest:"


class Node:
    """The daemon's state. `instance` names this run of it."""

    def __init__(
        self,
        settings: Settings,
        allow: AllowList,
        instance: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.allow = allow
        self.instance = instance
        self.clock = clock
        self.begun = clock()
        # For whatever a peer can say again and again.
        self.log = SparseLog(logging.getLogger("prefetchd.daemon"), clock)
        self.broker = Broker()
        self.peers = Peers(settings.max_peers)
        self.groups = Groups(allow, settings)
        self.roots = Roots()
        self.compiles = Compiles(self.roots)
        self.doors: list[Door] = []
        # What came in by type, what was wrong with it by problem, what could not be said.
        self.received: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        # Cache directories that are not written to, by compiler, as counted at hellos.
        self.refused_roots: Counter[str] = Counter()
        # What became of the records of earlier runs, summed over the groups.
        self.replayed: Counter[str] = Counter()
        # By directory that is written to: those an engine's library looks in after it.
        self.later_roots: dict[str, tuple[str, ...]] = {}
        # The compile's own name (see messages.Event) of what was traced here, and its key.
        self.digests: dict[tuple[str, str], str] = {}
        # Some plan may have been settled since the plans were last looked at.
        self.plans_changed = False
        # Whether the universe and the replay of every engine so far were done; new ones make it false again.
        self.ready = True
        # Profiles and logs from which it is being worked out what there is to do.
        self.expanding = 0
        # Told of each new group, before the engine that it was made for is welcomed.
        self.group_made: list[Callable[[Group], None]] = []
        self.stopping = False

    def begin_expanding(self) -> None:
        """More is to be done than the broker knows yet: it is not ready before `end_expanding`."""
        self.ready = False
        self.expanding += 1

    def end_expanding(self) -> None:
        """The broker knows it now, or it came to nothing; whoever calls this pumps."""
        self.expanding -= 1

    def allowed(self, peer: Peer, sweeps: Iterable[Sweep]) -> list[Sweep]:
        """Those whose kernels lie where this daemon may import from; the others are counted and told once."""
        found = []
        for sweep in sweeps:
            if problem := self.allow.home_problem(sweep.request):
                self.problems["home not allowed"] += 1
                self.log.line(
                    logging.WARNING, ("home", peer.rank), "not traced for %s: %s", peer.rank, problem
                )
            else:
                found.append(sweep)
        return found

    def send(self, peer: Peer, message: Message) -> bool:
        """Says something to a peer; one that has gone is detached, one that does not read must ask anew."""
        return self.send_frame(peer, encode(message), type(message).__name__)

    def send_frame(self, peer: Peer, frame: bytes, name: str) -> bool:
        """The same for a message encoded once for many."""
        for door in self.doors:
            if door.local is peer.local:
                outcome = door.send(peer.identity, frame)
                break
        else:
            return False
        if outcome is Sent.GONE:
            self.forget(peer)
        elif outcome is Sent.FULL:
            peer.behind = True
        self.sent[name if outcome is Sent.OK else f"not sent, {outcome.name.lower()}"] += 1
        return outcome is Sent.OK

    def forget(self, peer: Peer) -> None:
        """The peer is gone, and with it its rank, unless that speaks by another connection now."""
        mine = peer.rank is not None and self.peers.of_rank(peer.rank) is peer
        self.peers.remove(peer)
        if mine:
            self.detach(peer)

    def detach(self, peer: Peer) -> None:
        """The peer's rank wants nothing any more."""
        assert peer.rank is not None
        now = self.clock()
        self.broker.detach(peer.rank, peer.generation, now)
        if group := self.groups.by_name.get(peer.group):
            group.leave(peer.rank, now)

    def group_of(self, peer: Peer) -> Group | None:
        """The group of an attached peer."""
        return self.groups.by_name.get(peer.group)
