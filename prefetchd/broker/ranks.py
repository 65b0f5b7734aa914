"""The attached ranks: their group, the roots their engines use, what they ask for at this moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefetchd.broker.accounting import Account
from prefetchd.broker.types import Rank, Root

if TYPE_CHECKING:
    from prefetchd.broker.keys import Key
    from prefetchd.broker.tasks import GroupState, Task
    from prefetchd.broker.waiters import Waiter


class RankState:
    """One attached rank, of one generation."""

    def __init__(
        self,
        name: Rank,
        generation: int,
        group: GroupState,
        roots: Mapping[str, tuple[Root, ...]],
        account: Account,
    ) -> None:
        self.name = name
        self.generation = generation
        self.group = group
        self.account = account
        self.all_roots = dict(roots)
        self.tasks: dict[Task, None] = {}
        # The tasks among them that stand for one key each, without a request.
        self.direct: dict[Key, Task] = {}
        self.waiters: dict[Waiter, None] = {}

    def roots(self, compiler: str) -> tuple[Root, ...]:
        """Where artifacts of this compiler must lie for this rank's engine."""
        return self.all_roots.get(compiler, ())


class Ranks:
    """The attached ranks by name."""

    def __init__(self) -> None:
        self.attached: dict[Rank, RankState] = {}
        # Who uses a root, by compiler and root.
        self._users: dict[tuple[str, Root], dict[Rank, RankState]] = {}

    def get(self, name: Rank) -> RankState | None:
        """The rank, if it is attached."""
        return self.attached.get(name)

    def add(self, rank: RankState) -> None:
        """Attaches a rank of a name that is not attached."""
        self.attached[rank.name] = rank
        self._use(rank)

    def remove(self, rank: RankState) -> None:
        """Detaches a rank."""
        del self.attached[rank.name]
        self._leave(rank)

    def move(self, rank: RankState, roots: Mapping[str, tuple[Root, ...]]) -> bool:
        """The rank's roots are these now; whether that is a change."""
        if dict(roots) == rank.all_roots:
            return False
        self._leave(rank)
        rank.all_roots = dict(roots)
        self._use(rank)
        return True

    def uses(self, compiler: str, root: Root) -> bool:
        """Whether any attached rank's engine looks there."""
        return (compiler, root) in self._users

    def users(self, compiler: str, root: Root) -> list[RankState]:
        """The attached ranks whose engines look there."""
        return list(self._users.get((compiler, root), {}).values())

    def _use(self, rank: RankState) -> None:
        for compiler, roots in rank.all_roots.items():
            for root in roots:
                self._users.setdefault((compiler, root), {})[rank.name] = rank

    def _leave(self, rank: RankState) -> None:
        for compiler, roots in rank.all_roots.items():
            for root in roots:
                users = self._users.get((compiler, root), {})
                users.pop(rank.name, None)
                if not users:
                    self._users.pop((compiler, root), None)
