"""Beside the scheduler: from its next batch to requests nobody has asked for yet.

The scheduler's thread may lose microseconds, and a provider's `plan` takes up to milliseconds. So
`on_schedule` only looks up what each provider says it depends on (`Provider.batch_keys`) in a set of what was
met before; a batch with something new in it is left to the client's background thread. The subtle rule is
that keys are independent of each other: a batch is known when each of its keys was met in *some* batch, or
else lengths and counts would make nearly every batch a new one for ever.

Everything is bounded. A batch that had to be dropped is forgotten, so that the next like it is planned.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import msgspec

from prefetchd.client import Client
from prefetchd.guard import guarded
from prefetchd.profiles import Profile
from prefetchd.protocol import Batch, Request, Sweep
from prefetchd.provider import Limits, Provider

# Batches that wait to be planned. The background thread plans hundreds a second; a backlog of more is older
# than the steps it was meant for.
MAX_PENDING = 256
# DeepGEMM's keys are two for each token count; more than this means a provider that tells every batch apart.
MAX_KEYS = 1 << 16
# For each provider. DeepSeek-V3 at 8192 tokens has 82,000 requests; one takes about 150 bytes.
MAX_ASKED = 1 << 17
# Planned before the background thread looks at its socket again.
BATCHES_AT_ONCE = 8
# After so many requests (about 50 us) the interpreter lock is given away for long enough that the scheduler's
# thread, if it waits for it, wakes up and takes it; else it would wait for Python's switch interval of 5 ms.
REQUESTS_AT_ONCE = 64
YIELD_S = 50e-6
NOTHING: list[Request] = []


class _Family:
    """One provider, which keys of batches it has met, and what was asked for already.

    A set of requests holds nothing the garbage collector looks at, however large it gets; pairs or lists of
    them would make each of its full rounds, which stop every thread, take tens of milliseconds longer.
    """

    def __init__(self, name: str, provider: Provider) -> None:
        self.name, self.provider = name, provider
        self.met: set[Hashable] = set()
        self.asked: set[Request] = set()
        # Made when it is first looked at.
        self.universe: tuple[Sweep, ...] | None = None


class _Pending(NamedTuple):
    family: _Family
    batch: Batch
    keys: tuple[Hashable, ...]


def holds(sweep: Sweep, request: Request) -> bool:
    """Whether the sweep has this request as a member."""
    field = sweep.request.sweep_field
    if type(sweep.request) is not type(request) or field is None or not sweep.values:
        return sweep.request == request
    value = getattr(request, field)
    if not sweep.holds(value):
        return False
    return msgspec.structs.replace(sweep.request, **{field: value}) == request


class Planner:
    """One profile's planner. `on_schedule` belongs to the scheduler's thread, the rest to the client's."""

    def __init__(
        self,
        profile: Profile,
        providers: Mapping[str, Provider],
        client: Client,
        limits: Callable[[], Limits | None] = lambda: None,
    ) -> None:
        # Of the universe that was asked for; asked only where it is looked into.
        self._limits = limits
        self.guard = client.guard
        # Batches that were not planned because too many waited.
        self.dropped = 0
        self._profile, self._client = profile, client
        self._families = tuple(_Family(name, provider) for name, provider in providers.items())
        self._pending: deque[_Pending] = deque()
        self._losses = client.losses
        client.add_source(self.work)

    def on_schedule(self, batch: Batch) -> None:
        """Tells what the next step will run. Returns in microseconds and raises nothing."""
        try:
            if self._losses != self._client.losses:
                self._forget_all()
            for family in self._families:
                keys = family.provider.batch_keys(batch, self._profile)
                if not family.met.issuperset(keys):
                    self._leave(_Pending(family, batch, keys))
        except Exception as error:
            self.guard.caught("Planner.on_schedule", error)

    def _leave(self, pending: _Pending) -> None:
        """To the background thread, at once known so that the same batch is not left twice."""
        met = pending.family.met
        if len(met) > MAX_KEYS:
            met.clear()
        met.update(pending.keys)
        self._pending.append(pending)
        if len(self._pending) > MAX_PENDING:
            oldest = self._pending.popleft()
            oldest.family.met.difference_update(oldest.keys)
            self.dropped += 1
        self._client.wake()

    def _forget_all(self) -> None:
        self._losses = self._client.losses
        for family in self._families:
            family.met.clear()
            family.asked.clear()

    @guarded(False)
    def asked(self, request: Request) -> bool:
        """Whether this was asked for: by a batch, or with the universe. Not for the scheduler's thread."""
        return any(request in family.asked or self._in_universe(family, request) for family in self._families)

    def _in_universe(self, family: _Family, request: Request) -> bool:
        if family.universe is None and (limits := self._limits()) is not None:
            family.universe = tuple(family.provider.universe_sweeps(self._profile, limits))
        return any(holds(sweep, request) for sweep in family.universe or ())

    @guarded(False)
    def work(self) -> bool:
        """Plans some of what is pending and sends what is new as one plan; True if more is pending."""
        fresh: dict[_Family, list[Request]] = {}
        for _ in range(BATCHES_AT_ONCE):
            if not self._pending:
                break
            family, batch, _ = self._pending.popleft()
            if found := self._new_requests(family, batch):
                fresh.setdefault(family, []).extend(found)
            time.sleep(YIELD_S)
        if fresh and not self._client.plan({family.name: found for family, found in fresh.items()}):
            for family, found in fresh.items():
                family.asked.difference_update(found)
        return bool(self._pending)

    @guarded(NOTHING)
    def _new_requests(self, family: _Family, batch: Batch) -> list[Request]:
        asked = family.asked
        if len(asked) > MAX_ASKED:
            asked.clear()
        found: list[Request] = []
        for count, request in enumerate(family.provider.plan(batch, self._profile), 1):
            if request not in asked:
                found.append(request)
            if count % REQUESTS_AT_ONCE == 0:
                time.sleep(YIELD_S)
        asked.update(found)
        return found
