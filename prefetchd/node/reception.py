"""What comes in, turned into calls of the broker and answers.

A peer may be an engine, a tool, an older or newer version, or noise. Everything is counted by what it is or
by what is wrong with it, answered where there is somebody to answer, and never fatal. The subtle rule:
nothing a message says is used before the allow-list was asked; what is taken from it is numbers, names and
requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from prefetchd.broker.types import Answer as BrokerAnswer
from prefetchd.broker.types import Priority as Urgency
from prefetchd.node.door import Door
from prefetchd.node.peers import OpenPlan, OpenQuery, Peer
from prefetchd.node.state import DIGEST_KEY, Node
from prefetchd.protocol import (
    Answer,
    Event,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloWanted,
    MalformedMessage,
    MalformedRequest,
    Message,
    Plan,
    Query,
    Refused,
    State,
    Stats,
    StatsQuery,
    Sweep,
    Universe,
    UnknownMessage,
    decode,
    decode_sweeps,
    encode,
)
from prefetchd.sweeps import apart

log = logging.getLogger("prefetchd.daemon")

# DeepSeek-V3's largest sweep has 70,000 shapes; one of many more would hold a helper for hours.
MAX_SWEEP = 1 << 20
# A sweep of so few requests is what some batches need next, and planned as single ones.
MAX_APART = 32
# Of one message: a batch needs some dozens, and each takes the daemon some ten microseconds.
MAX_APART_IN_ALL = 2048

_KEY_STATES = {
    "unknown": State.UNKNOWN,
    "missing": State.QUEUED,
    "compiling": State.COMPILING,
    "published": State.PUBLISHED,
    "failed": State.FAILED,
}
# A sweep is as far as the first of these among its requests.
_LEAST_FAR = (State.UNKNOWN, State.QUEUED, State.COMPILING, State.FAILED, State.PUBLISHED)
# From least to most that can be told of a key known to several engines.
_FURTHEST = (State.UNKNOWN, State.FAILED, State.QUEUED, State.COMPILING, State.PUBLISHED)
_REQUEST_STATES = {
    "unknown": State.UNKNOWN,
    "queued": State.QUEUED,
    "tracing": State.QUEUED,
    "open": State.QUEUED,
    "published": State.PUBLISHED,
    "failed": State.FAILED,
    "uncovered": State.FAILED,
}


class Reception:
    """Hears the doors. `attach` handles a hello, `universe` a profile, `stats` gives the figures.

    `sooner` is called when the broker has a date that may lie before the one the daemon sleeps until.
    """

    def __init__(
        self,
        node: Node,
        *,
        attach: Callable[[Peer], None],
        universe: Callable[[Peer, Universe], None],
        stats: Callable[[int], Stats],
        pump: Callable[[], None],
        sooner: Callable[[], None],
    ) -> None:
        self._node = node
        self._attach = attach
        self._universe = universe
        self._stats = stats
        self._pump = pump
        self._sooner = sooner

    def frame(self, door: Door, identity: bytes, frame: bytes) -> None:
        """See `Visitor`."""
        node = self._node
        peer = node.peers.get(identity)
        if peer is not None:
            node.peers.heard(peer, node.clock())
        try:
            message = decode(frame)
        except MalformedMessage as error:
            node.problems[error.problem] += 1
            self._answer_stranger(door, identity, Refused(text=str(error)[:1000]))
            return
        node.received[type(message).__name__] += 1
        try:
            self._handle(door, identity, peer, message)
        except (MalformedRequest, MalformedMessage) as error:
            node.problems["malformed"] += 1
            who = peer.hello.engine if peer else "a stranger"
            node.log.line(logging.INFO, ("malformed", who), "a message of %s: %s", who, error)
        except Exception:
            # A defect of ours must not end what serves every engine of the node.
            node.problems["defect"] += 1
            log.exception("handling a %s", type(message).__name__)

    def pause(self) -> None:
        """See `Visitor`."""
        self._pump()

    def _handle(self, door: Door, identity: bytes, peer: Peer | None, message: Message) -> None:
        node = self._node
        if isinstance(message, Hello):
            self._hello(door, identity, peer, message)
        elif isinstance(message, StatsQuery):
            self._answer_stranger(door, identity, self._stats(message.id))
        elif isinstance(message, UnknownMessage):
            node.problems["unknown"] += 1
        elif peer is None:
            node.problems["stranger"] += 1
            self._answer_stranger(door, identity, HelloWanted(instance=node.instance))
        else:
            self._from_peer(peer, message)

    def _from_peer(self, peer: Peer, message: Message) -> None:
        node = self._node
        match message:
            case Plan():
                self._plan(peer, message)
            case Query():
                self._query(peer, message)
            case Event():
                self._event(peer, message)
            case Universe():
                self._universe(peer, message)
            case Heartbeat():
                peer.figures = dict(message.figures)
                if peer.behind:
                    # It reads again, and has missed something: all it still wants comes with its next hello.
                    peer.behind = False
                    node.send(peer, HelloWanted(instance=node.instance))
                else:
                    node.send(peer, HeartbeatAnswer(sequence=message.sequence, instance=node.instance))
            case Goodbye():
                node.forget(peer)
            case _:
                node.problems["unexpected"] += 1

    def _hello(self, door: Door, identity: bytes, peer: Peer | None, hello: Hello) -> None:
        node = self._node
        if peer is None:
            peer = Peer(identity, local=door.local, hello=hello, now=node.clock())
            for old in node.peers.add(peer):
                node.problems["crowded out"] += 1
                node.forget(old)
        else:
            peer.hello = hello
            # Whatever it still wants it says again after the welcome.
            peer.drop_plans(list(peer.plans))
        self._attach(peer)

    def _plan(self, peer: Peer, plan: Plan) -> None:
        node = self._node
        if peer.rank is None:
            node.problems["not attached"] += 1
            return
        now = node.clock()
        asks = [
            (provider, sweep)
            for provider, blob in plan.requests.items()
            for sweep in _singles(node.allowed(peer, _bounded(decode_sweeps(blob))))
        ]
        deadline = now + plan.deadline_s if plan.deadline_s else None
        self._ask(peer, asks, Urgency(plan.priority), now, deadline)
        peer.add_plan(OpenPlan(plan.id, asks))
        node.plans_changed = True
        if plan.priority >= Urgency.REPLAY:
            node.ready = False

    def _ask(
        self,
        peer: Peer,
        asks: Sequence[tuple[str, Sweep]],
        priority: Urgency,
        now: float,
        deadline: float | None,
    ) -> None:
        node = self._node
        assert peer.rank is not None
        by_provider: dict[str, list[Sweep]] = {}
        for provider, sweep in asks:
            by_provider.setdefault(provider, []).append(sweep)
        for provider, sweeps in by_provider.items():
            node.broker.plan(peer.rank, provider, sweeps, priority, now, deadline)
        group = node.group_of(peer)
        if group is not None and peer.local:
            # A peer of another node uses the helper that is there, and starts none.
            group.want(tuple(by_provider))

    def _query(self, peer: Peer, query: Query) -> None:
        node = self._node
        now = node.clock()
        if peer.rank is None:
            node.send(peer, Answer(id=query.id, keys=self._states_anywhere(query)))
            return
        states: dict[str, tuple[State, ...]] = {}
        asks = []
        for provider, blob in query.requests.items():
            sweeps = _bounded(decode_sweeps(blob))
            states[provider] = tuple(self._request_states(peer.rank, provider, sweeps))
            queued = [
                sweep for sweep, state in zip(sweeps, states[provider], strict=True) if state is State.QUEUED
            ]
            asks += [(provider, sweep) for sweep in _singles(queued)]
        if asks and query.priority is not None:
            deadline = now + query.deadline_s if query.deadline_s else None
            self._ask(peer, asks, Urgency(query.priority), now, deadline)
        if not query.keys:
            node.send(peer, Answer(id=query.id, requests=states))
            return
        token = OpenQuery(peer.identity, query.id, states)
        until = now + query.deadline_s if query.priority is not None and query.deadline_s else None
        node.broker.query(peer.rank, token, [(key.compiler, key.key) for key in query.keys], now, until)
        self._sooner()

    def _request_states(self, rank: str, provider: str, sweeps: Sequence[Sweep]) -> Iterator[State]:
        """Of a sweep that was planned apart, the state of the request that is least far."""
        left = MAX_APART_IN_ALL
        for sweep in sweeps:
            state = self._request_state(rank, provider, sweep)
            if state is State.UNKNOWN and sweep.values and sweep.size <= min(MAX_APART, left):
                left -= sweep.size
                singles = {self._request_state(rank, provider, Sweep(each)) for each in sweep.expand()}
                state = next(each for each in _LEAST_FAR if each in singles)
            yield state

    def _request_state(self, rank: str, provider: str, sweep: Sweep) -> State:
        return _REQUEST_STATES[self._node.broker.request_state(rank, provider, sweep)]

    def _states_anywhere(self, query: Query) -> tuple[State, ...]:
        """To a tool, which has no directories of its own: how far a key is for the best-off engine."""
        broker = self._node.broker
        ranks = {compiler: self._apart(compiler) for compiler in {name.compiler for name in query.keys}}
        return tuple(
            max(
                (
                    _KEY_STATES[broker.key_status(rank, (name.compiler, name.key)).state]
                    for rank in ranks[name.compiler]
                ),
                key=_FURTHEST.index,
                default=State.UNKNOWN,
            )
            for name in query.keys
        )

    def _apart(self, compiler: str) -> list[str]:
        """One rank for each directory of the compiler: a key is as far for all who share one."""
        found: dict[str | None, str] = {}
        for rank, peer in self._node.peers.ranks().items():
            group = self._node.group_of(peer)
            roots = {} if group is None else group.first_roots.get(rank, {})
            found.setdefault(roots.get(compiler), rank)
        return list(found.values())

    def answer(self, answer: BrokerAnswer) -> None:
        """Sends what the broker found for a query."""
        query = answer.token
        assert isinstance(query, OpenQuery)
        peer = self._node.peers.get(query.identity)
        if peer is None:
            return
        keys = tuple(_KEY_STATES[status.state] for status in answer.keys)
        self._node.send(peer, Answer(id=query.id, keys=keys, requests=query.requests))

    def _event(self, peer: Peer, event: Event) -> None:
        node = self._node
        if peer.rank is None:
            node.problems["not attached"] += 1
            return
        name = event.key or self._key_of_digest(event.compiler, event.digest)
        if not name:
            node.problems["nameless event"] += 1
            return
        now, key = node.clock(), (event.compiler, name)
        match event.what:
            case "started":
                down = event.daemon_down
                node.broker.engine_began(peer.rank, key, now, ago=event.seconds, daemon_down=down)
            case "ended":
                down = event.daemon_down
                node.broker.engine_ended(peer.rank, key, event.seconds, now, daemon_down=down)
            case "hit":
                node.broker.engine_used(peer.rank, key, now)
            case "load":
                # The time of a load is the engine's affair; that it happens is counted by type.
                pass

    def _key_of_digest(self, compiler: str, digest: str) -> str:
        if not digest:
            return ""
        return self._node.digests.get((compiler, digest), DIGEST_KEY + digest)

    def _answer_stranger(self, door: Door, identity: bytes, message: Message) -> None:
        """To whoever sits at the other end; nobody is remembered for it."""
        outcome = door.send(identity, encode(message))
        self._node.sent[f"{type(message).__name__}, {outcome.name.lower()}"] += 1


def _singles(sweeps: list[Sweep]) -> Iterator[Sweep]:
    return apart(sweeps, MAX_APART, MAX_APART_IN_ALL)


def _bounded(sweeps: list[Sweep]) -> list[Sweep]:
    """Raises `MalformedRequest` for a sweep that no model can need."""
    for sweep in sweeps:
        if sweep.size > MAX_SWEEP:
            raise MalformedRequest(f"a sweep of {sweep.size} shapes; at most {MAX_SWEEP} are traced as one")
    return sweeps
