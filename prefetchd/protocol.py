"""The messages: what a scheduler tells us about a batch (`Batch`), and what is asked for (`Request`).

Every message is a msgspec struct, MessagePack on the wire. This is the one module to import from: requests
and their types, the codec and the sweeps have modules of their own behind it. An unknown op is kept,
counted and reported, never dropped in silence.
"""

from __future__ import annotations

import msgspec

from prefetchd.codec import (
    REQUEST_TYPES,
    AnyRequest,
    MalformedRequest,
    decode_request,
    encode_request,
    op_of,
    request_from_fields,
    request_to_fields,
)
from prefetchd.request import Request, UnknownRequest
from prefetchd.sweeps import Sweep, decode_sweeps, encode_sweeps, expand, spans, sweeps

__all__ = [
    "PROTOCOL_VERSION",
    "REQUEST_TYPES",
    "AnyRequest",
    "Batch",
    "MalformedRequest",
    "Request",
    "Sweep",
    "UnknownRequest",
    "decode_request",
    "decode_sweeps",
    "encode_request",
    "encode_sweeps",
    "expand",
    "op_of",
    "request_from_fields",
    "request_to_fields",
    "spans",
    "sweeps",
]

PROTOCOL_VERSION = 1


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one scheduler step will run: tokens in all, new tokens per prefill, decode and draft counts."""

    tokens: int
    prefill_lengths: tuple[int, ...] = ()
    decodes: int = 0
    speculative_tokens: int = 0
