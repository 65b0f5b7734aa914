"""No exception of ours ever reaches the engine: the one place where that promise is kept.

What is called by an engine is decorated with `guarded` and answers its harmless value when something inside
fails. The failure is counted, and logged the first time it happens at a place: a message per scheduler step
would harm as much as the exception. Interrupts and exits are not ours and pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

log = logging.getLogger("prefetchd")

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Counts what was caught. `places` is bounded by the number of guarded functions."""

    def __init__(self) -> None:
        self.errors = 0
        self._places: set[str] = set()

    def caught(self, place: str, error: BaseException) -> None:
        """Notes one failure; itself it cannot fail."""
        self.errors += 1
        if place in self._places:
            return
        self._places.add(place)
        try:
            log.warning(
                "prefetchd: %s failed and goes on without effect (%s: %s); the engine is not affected, "
                "further failures there are only counted",
                place,
                type(error).__name__,
                error,
            )
        except Exception:
            # A handler of the engine's that fails is not ours to repair.
            self.errors += 1


class Guarded(Protocol):
    """Whose methods may be decorated."""

    guard: Guard


G = TypeVar("G", bound=Guarded)


def guarded(default: R) -> Callable[[Callable[Concatenate[G, P], R]], Callable[Concatenate[G, P], R]]:
    """The method, answering `default` instead of raising."""

    def decorate(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
        place = method.__qualname__

        @wraps(method)
        def call(self: G, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.guard.caught(place, error)
                return default

        return cast(Callable[Concatenate[G, P], R], call)

    return decorate
