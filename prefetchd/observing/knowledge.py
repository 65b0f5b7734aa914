"""Why an engine compiled a variant, from what this process knows of its daemon.

The subtle rule: a compile is judged by what was true when it began, because what is published while it runs
was late and not overlooked. Published for this engine before and compiled all the same is a *mismatch*; asked
for and not there yet is *late*, or a mismatch where the daemon has said that its keys differ from this
engine's; anything else is *unplanned*. Where a daemon was expected and none answers, that is the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol


class Reason(StrEnum):
    """Why an engine compiled, or (`PLANNED`) did not need to."""

    PLANNED = "planned"
    LATE = "late"
    UNPLANNED = "unplanned"
    MISMATCH = "mismatch"
    DAEMON_DOWN = "daemon_down"


class Knowledge(Protocol):
    """What this process knows of its daemon."""

    def reachable(self) -> bool:
        """Whether a daemon answers; False only where one was expected."""
        ...

    def published(self, compiler: str, key: str) -> bool:
        """Whether it said that this variant lies where the engine looks."""
        ...

    def asked(self, request: Mapping[str, Any]) -> bool:
        """Whether this request, by its wire fields, was asked for ahead."""
        ...

    def mismatched(self) -> bool:
        """Whether it said that its keys differ from this engine's."""
        ...


class Alone:
    """The knowledge of an engine without a daemon: nobody promised anything, so nothing is late."""

    def reachable(self) -> bool:
        """Nobody is missing."""
        return True

    def published(self, compiler: str, key: str) -> bool:
        """Nothing is."""
        return False

    def asked(self, request: Mapping[str, Any]) -> bool:
        """Nothing was."""
        return False

    def mismatched(self) -> bool:
        """There is nothing to differ from."""
        return False


def judge(
    known: Knowledge, compiler: str, key: str, was_published: bool, request: Mapping[str, Any] | None
) -> Reason:
    """The reason for one compile; `was_published` tells of its begin, the rest of now, when more is known."""
    if not known.reachable():
        return Reason.DAEMON_DOWN
    if was_published:
        return Reason.MISMATCH
    asked = request is not None and known.asked(request)
    if asked or (key and known.published(compiler, key)):
        return Reason.MISMATCH if known.mismatched() else Reason.LATE
    return Reason.UNPLANNED
