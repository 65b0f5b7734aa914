"""The messages: what is asked for (`Request`), and what a scheduler tells us about a batch (`Batch`).

Every message is a msgspec struct, MessagePack on the wire. Unknown fields are tolerated, so that an older
reader survives a newer writer; an unknown op decodes to `UnknownRequest`, is kept, counted and reported,
never dropped in silence.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

PROTOCOL_VERSION = 1


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one scheduler step will run: tokens in all, new tokens of each prefill, decode and draft counts."""

    tokens: int
    prefill_lengths: tuple[int, ...] = ()
    decodes: int = 0
    speculative_tokens: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    """This op will run with this shape. Equality is the de-duplication key; the tag is the op's name."""

    # The integer field along which many requests of one site differ; None when there is no such field.
    sweep_field: ClassVar[str | None] = None


class UnknownRequest(Request, frozen=True, kw_only=True, tag="unknown"):
    """A request whose op this version does not know, kept with all that it said."""

    raw: dict[str, Any]
