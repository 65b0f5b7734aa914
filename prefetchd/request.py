"""What every request is, whichever kernel family it belongs to.

One request type stands for one public entry point of a kernel library; its tag is that entry point's own
name, so that a message, a log line and the library's documentation say the same word.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

Size = Annotated[int, msgspec.Meta(ge=1)]
# Zero stands for "the library's or the provider's own choice".
SizeOrDefault = Annotated[int, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    """This op will run with this shape. Equality is the de-duplication key; the tag is the op's name."""

    # The integer field along which many requests of one site differ; None when there is no such field.
    sweep_field: ClassVar[str | None] = None


class UnknownRequest(Request, frozen=True, kw_only=True, tag="unknown"):
    """A request whose op this version does not know, kept with all that it said (`raw`, its op included)."""

    raw: dict[str, Any]

    def __hash__(self) -> int:
        return hash(repr(sorted(self.raw.items(), key=repr)))
