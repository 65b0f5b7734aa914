"""Who is connected: one entry a socket identity, bounded, the longest silent one forgotten first.

A peer that was forgotten is not lost: its next message is answered by `HelloWanted`, and it introduces itself
again. The subtle rule: a rank has a name that outlives its connections, so that a restarted engine finds its
figures, while two engines that call themselves alike at the same time get different ones.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from prefetchd.protocol import Hello, State, Sweep

# What is open of one peer's plans: a client keeps 4,096 plans itself, and most hold some dozen requests.
MAX_OPEN_PLANS = 4096
MAX_OPEN_ASKS = 200_000


class OpenPlan:
    """A plan that is not settled; `next` is the first of its asks that may be open."""

    __slots__ = ("asks", "id", "next")

    def __init__(self, id: int, asks: list[tuple[str, Sweep]]) -> None:
        self.id = id
        self.asks = asks
        self.next = 0


class OpenQuery:
    """A query whose keys the broker looks at; the states of its requests were known at once."""

    __slots__ = ("id", "identity", "requests")

    def __init__(self, identity: bytes, id: int, requests: dict[str, tuple[State, ...]]) -> None:
        self.identity = identity
        self.id = id
        self.requests = requests


class Peer:
    """One connection."""

    def __init__(self, identity: bytes, *, local: bool, hello: Hello, now: float) -> None:
        self.identity = identity
        self.local = local
        self.hello = hello
        self.heard = now
        # Set for an engine that was attached.
        self.rank: str | None = None
        self.generation = 0
        self.group = ""
        self.plans: deque[OpenPlan] = deque()
        self.open_asks = 0
        self.forgotten_plans = 0
        # A message to it did not fit into its queue: when it reads again it must ask anew.
        self.behind = False
        # The profile and the slots of its pool that it was expanded with.
        self.universe: tuple[bytes, int] | None = None
        self.mismatches: set[tuple[str, str, str]] = set()
        self.figures: dict[str, int | float] = {}

    def drop_plans(self, settled: list[OpenPlan]) -> None:
        """These need nothing more."""
        done = set(settled)
        self.plans = deque(plan for plan in self.plans if plan not in done)
        self.open_asks -= sum(len(plan.asks) for plan in settled)

    def add_plan(self, plan: OpenPlan) -> None:
        """One more to settle; the oldest give way."""
        self.plans.append(plan)
        self.open_asks += len(plan.asks)
        while len(self.plans) > MAX_OPEN_PLANS or self.open_asks > MAX_OPEN_ASKS:
            self.open_asks -= len(self.plans.popleft().asks)
            self.forgotten_plans += 1


class Peers:
    """The peers by identity, the longest silent first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._peers: OrderedDict[bytes, Peer] = OrderedDict()
        self._by_rank: dict[str, Peer] = {}
        self._generations: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def get(self, identity: bytes) -> Peer | None:
        """The peer of this connection."""
        return self._peers.get(identity)

    def of_rank(self, name: str) -> Peer | None:
        """The peer that speaks for the rank."""
        return self._by_rank.get(name)

    def ranks(self) -> dict[str, Peer]:
        """The attached ranks."""
        return dict(self._by_rank)

    def namesakes(self, hello: Hello) -> list[Peer]:
        """The attached ranks that call themselves as this one does."""
        return [
            peer
            for peer in self._by_rank.values()
            if (peer.hello.engine, peer.hello.rank) == (hello.engine, hello.rank)
        ]

    def heard(self, peer: Peer, now: float) -> None:
        """It lives."""
        peer.heard = now
        self._peers.move_to_end(peer.identity)

    def add(self, peer: Peer) -> list[Peer]:
        """A new connection; those that had to give way for it."""
        self._peers[peer.identity] = peer
        self._peers.move_to_end(peer.identity)
        excess = len(self._peers) - self._limit
        return [each for each, _ in zip(self._peers.values(), range(excess), strict=False)]

    def remove(self, peer: Peer) -> None:
        """The connection is gone; its rank is whoever else's it became."""
        self._peers.pop(peer.identity, None)
        if peer.rank is not None and self._by_rank.get(peer.rank) is peer:
            del self._by_rank[peer.rank]

    def silent(self, seconds: float, now: float) -> list[Peer]:
        """Those that have said nothing for so long."""
        found = []
        for peer in self._peers.values():
            if now - peer.heard < seconds:
                break
            found.append(peer)
        return found

    def name_rank(self, peer: Peer) -> Peer | None:
        """Gives the peer its rank's name; the peer that had it, of the same process, is answered.

        A name is free when nobody speaks for it, or the same process does by an older connection.
        """
        hello = peer.hello
        for number in range(len(self._by_rank) + 1):
            name = f"{hello.engine}/{hello.rank}" + (f"#{number + 1}" if number else "")
            holder = self._by_rank.get(name)
            if holder is None or holder is peer or holder.hello.generation == hello.generation:
                break
        same = holder is not None and holder.hello.generation == hello.generation
        if not same:
            self._generations[name] = self._generations.get(name, 0) + 1
            self._forget_generations()
        peer.rank, peer.generation = name, self._generations[name]
        self._by_rank[name] = peer
        return None if holder is peer else holder

    def _forget_generations(self) -> None:
        """Names come from strangers; those of nobody present are kept only so far."""
        for name in list(self._generations)[: len(self._generations) - 2 * self._limit]:
            if name not in self._by_rank:
                del self._generations[name]
