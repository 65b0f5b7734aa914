"""What the KDA and the gated-delta-rule providers share: plan, universe, loading and running."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import ClassVar

from prefetchd.profiles import Profile
from prefetchd.protocol import Batch, Request
from prefetchd.provider import Limits, Provider
from prefetchd.requests.delta import Delta

from .cute_homes import is_cute
from .delta_plan import requests_of_batch, templates

# Batches that repeat are planned once; decoding repeats a few hundred sizes.
PLANS_REMEMBERED = 4096


class DeltaProvider(Provider):
    """A family whose sites are those of `kinds`, by their op."""

    compilers: ClassVar[tuple[str, ...]] = ("triton",)
    kinds: ClassVar[dict[str, type[Delta]]]

    def __init__(self) -> None:
        self._planned: tuple[Profile, Callable[[Batch], tuple[Request, ...]]] | None = None

    def plan(self, batch: Batch, profile: Profile) -> Iterable[Request]:
        """The requests of every site for this batch; a profile that is wrong asks for nothing."""
        if self._planned is None or self._planned[0] is not profile:
            self._planned = (profile, _planner(profile, self.kinds, self.serves))
        return self._planned[1](batch)

    def batch_keys(self, batch: Batch, profile: Profile) -> tuple[int, int, int]:
        """Prefill tokens, all tokens (with or without prefill, whose kernels they may use), and decodes."""
        prefill = sum(batch.prefill_lengths)
        # Numbers told apart by their last two bits: half the time of tuples, on a thread that has none.
        return (
            prefill << 2,
            (batch.tokens << 1 | (prefill > 0)) << 2 | 1,
            (batch.decodes << 32 | batch.speculative_tokens) << 2 | 2,
        )

    def universe(self, profile: Profile, limits: Limits) -> Iterable[Request]:
        """One request for each set of flags and class of token counts of every site."""
        found = templates(profile, self.kinds, self.serves)
        return [request for item in found for request in item.all(limits.max_tokens)]

    @staticmethod
    def serves(home: str) -> bool:
        """Whether a site of this home is this provider's."""
        return not is_cute(home)

    def warm_up(self) -> None:
        """Imports torch and the homes that are installed."""
        from .linear_ops.loading import load_homes

        load_homes()

    def run(self, request: Request) -> None:
        """One call of the library's own op."""
        from .linear_ops.driver import run

        run(request)


class CuteProvider(DeltaProvider):
    """A family's sites whose home has CuTe DSL kernels; of one op, another provider serves the others."""

    compilers: ClassVar[tuple[str, ...]] = ("cute_dsl", "flashinfer_cute")

    @staticmethod
    def serves(home: str) -> bool:
        """See `DeltaProvider`."""
        return is_cute(home)

    def warm_up(self) -> None:
        """Imports torch, the DSL and the homes that are installed."""
        from .cute_ops.driver import load_homes

        load_homes()

    def run(self, request: Request) -> None:
        """One call of the library's own op."""
        from .cute_ops.driver import run

        run(request)


def _planner(
    profile: Profile, kinds: dict[str, type[Delta]], serves: Callable[[str], bool]
) -> Callable[[Batch], tuple[Request, ...]]:
    try:
        items = templates(profile, kinds, serves)
    except ValueError:
        # `universe` says what is wrong with the profile; beside the scheduler nothing may raise.
        items = []

    @lru_cache(maxsize=PLANS_REMEMBERED)
    def planned(batch: Batch) -> tuple[Request, ...]:
        return tuple(dict.fromkeys(requests_of_batch(items, batch)))

    return planned
