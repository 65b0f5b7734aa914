"""What a kernel family must be able to do: name requests, and run one by the library's own op.

Providers know *what* is launched, never how it is compiled or cached. `plan` and `universe` run beside the
scheduler: pure Python, no torch, microseconds. `run` happens in a traced process on the null device, where
torch and the library are imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from importlib.metadata import entry_points
from typing import ClassVar

import msgspec

from prefetchd.profiles import Profile
from prefetchd.protocol import Batch, Request, Sweep, sweeps
from prefetchd.targets import Target

PROVIDER_GROUP = "prefetchd.providers"


class Unavailable(Exception):
    """The installed library has no such entry point, or not for this target; the text says which and why."""


class UnknownProvider(LookupError):
    """No installed package registers a provider of this name; the text lists those that are."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a universe: the largest batch the scheduler may build (tokens), and the device."""

    max_tokens: int
    target: Target


class Provider(ABC):
    """One kernel family. Instances hold no state between requests that changes what a request launches."""

    name: ClassVar[str]
    # The compilers whose cache this family's kernels land in, by their registered names.
    compilers: ClassVar[tuple[str, ...]]

    @abstractmethod
    def plan(self, batch: Batch, profile: Profile) -> Iterable[Request]:
        """Requests that this batch will cause; over-asking is fine. Raises nothing: it may answer none."""

    def batch_keys(self, batch: Batch, profile: Profile) -> tuple[Hashable, ...]:
        """What `plan` looks at, as keys independent of each other; on the scheduler's thread, so quick.

        The promise: where each key of a batch was met in some earlier batch, not necessarily the same one,
        `plan` has nothing for this batch that it had not for those. Unless a family says better, every
        batch is its own key. Raises nothing.
        """
        return (batch,)

    @abstractmethod
    def universe(self, profile: Profile, limits: Limits) -> Iterable[Request]:
        """Every request the profile can cause within the limits.

        Raises `ValueError` naming a site whose fields it cannot serve; ops of other families are left alone.
        """

    def universe_sweeps(self, profile: Profile, limits: Limits) -> Iterable[Sweep]:
        """The same universe as sweeps, which a family of many shapes names directly. Raises as `universe`."""
        return sweeps(self.universe(profile, limits))

    @abstractmethod
    def warm_up(self) -> None:
        """Imports the library, once, in the helper's parent; must not initialise CUDA or launch anything.

        Raises `Unavailable` when the library is not installed or does not load, with the reason.
        """

    @abstractmethod
    def run(self, request: Request) -> None:
        """Calls the library's own op on null-device tensors of the request's shape.

        Raises `Unavailable` for an entry point the library lacks. Whatever else the library raises passes
        through and is reported with the request; a crash of the process costs this request only.
        """


def load_providers(names: Iterable[str] = ()) -> dict[str, Provider]:
    """The installed providers by name, all of them or those named. Raises `UnknownProvider`."""
    found = {point.name: point for point in entry_points(group=PROVIDER_GROUP)}
    wanted = tuple(names) or tuple(found)
    for name in wanted:
        if name not in found:
            installed = ", ".join(sorted(found)) or "none"
            raise UnknownProvider(f"provider {name!r} is not installed; installed: {installed}")
    return {name: found[name].load()() for name in wanted}
