"""The queue against a naive one: strict priorities, ranks in turn, nothing lost, depths true."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefetchd.broker.asks import PRIORITIES, Asks, FairQueue
from prefetchd.broker.types import Priority

RANKS = range(4)
ranks = st.sampled_from(RANKS)
priorities = st.sampled_from(PRIORITIES)
items = st.integers(0, 7)


class Item:
    def __init__(self, number: int) -> None:
        self.number = number
        self.asks = Asks()
        self.waiting = False
        self.counted: Priority | None = None


class QueueAgainstNaiveModel(RuleBasedStateMachine):
    """Every ask is kept as a plain list too; what is popped must be what that list calls for."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Item] = FairQueue()
        self.items = [Item(number) for number in range(8)]
        self.asks: list[tuple[int, int, Priority]] = []
        # For each priority and rank: who has waited there ever since that rank was served.
        self.owed: dict[tuple[Priority, int], set[int]] = {}

    def best(self, number: int, rank: int | None = None) -> Priority | None:
        found = [p for n, r, p in self.asks if n == number and (rank is None or r == rank)]
        return min(found, default=None)

    def live(self, priority: Priority, rank: int) -> bool:
        return any(item.waiting and self.best(item.number, rank) is priority for item in self.items)

    @initialize()
    def start(self) -> None:
        for item in self.items:
            item.waiting = True

    @rule(number=items, rank=ranks, priority=priorities)
    def ask(self, number: int, rank: int, priority: Priority) -> None:
        item = self.items[number]
        self.asks.append((number, rank, priority))
        if item.asks.add(rank, priority) and item.waiting:
            self.queue.push(item, rank)
        self.queue.recount(item)

    @precondition(lambda self: self.asks)
    @rule(data=st.data(), priority=priorities)
    def promote_or_demote(self, data: st.DataObject, priority: Priority) -> None:
        ask = data.draw(st.sampled_from(self.asks))
        number, rank, old = ask
        self.asks.remove(ask)
        self.asks.append((number, rank, priority))
        item = self.items[number]
        if item.asks.move(rank, old, priority) and item.waiting:
            self.queue.push(item, rank)
        self.queue.recount(item)

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        ask = data.draw(st.sampled_from(self.asks))
        number, rank, priority = ask
        self.asks.remove(ask)
        item = self.items[number]
        if item.asks.remove(rank, priority) and item.waiting:
            self.queue.push(item, rank)
        self.queue.recount(item)

    @rule(rank=ranks)
    def leave(self, rank: int) -> None:
        self.asks = [ask for ask in self.asks if ask[1] != rank]
        for item in self.items:
            item.asks.drop(rank)
            self.queue.recount(item)
        self.queue.forget(rank)

    @rule(number=items)
    def requeue(self, number: int) -> None:
        item = self.items[number]
        item.waiting = True
        for rank in item.asks.ranks():
            self.queue.push(item, rank)
        self.queue.recount(item)

    @rule(worst=priorities)
    def pop(self, worst: Priority) -> None:
        waiting = [i for i in self.items if i.waiting and self.best(i.number) is not None]
        best = min((self.best(item.number) for item in waiting), default=None)
        others = {r for r in RANKS if best is not None and self.live(best, r)}
        taken = self.queue.pop(worst)
        if best is None or best > worst:
            assert taken is None
            return
        assert taken is not None
        item, rank, priority = taken
        assert item in waiting
        assert not item.waiting
        assert priority is best
        assert self.best(item.number, rank) is best
        assert not self.owed.get((priority, rank)), f"rank {rank} is served twice before another once"
        self.owed[priority, rank] = others - {rank}
        for (level, _), waiting_ranks in self.owed.items():
            if level is priority:
                waiting_ranks.discard(rank)

    @invariant()
    def depths_are_true(self) -> None:
        found = [0] * len(PRIORITIES)
        for item in self.items:
            best = self.best(item.number)
            assert item.asks.best() is best
            if item.waiting and best is not None:
                found[best] += 1
        assert self.queue.depth == found
        for (priority, _), waiting_ranks in self.owed.items():
            waiting_ranks.intersection_update({r for r in RANKS if self.live(priority, r)})


TestQueue = QueueAgainstNaiveModel.TestCase
TestQueue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
