"""The messages: what a scheduler tells us about a batch (`Batch`), and what is asked for (`Request`).

Every message is a msgspec struct, MessagePack on the wire. This is the one module to import from: requests
and their types, the codec, the sweeps and the messages of the socket have modules of their own behind it. An
unknown op is kept, counted and reported, never dropped in silence.
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
from prefetchd.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Answer,
    Event,
    Failed,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloWanted,
    KeyName,
    MalformedMessage,
    Message,
    Mismatch,
    Plan,
    Priority,
    Published,
    Query,
    Refused,
    Settled,
    State,
    Stats,
    StatsQuery,
    Universe,
    UnknownMessage,
    Welcome,
    decode,
    encode,
)
from prefetchd.request import Request, UnknownRequest
from prefetchd.sweeps import Sweep, decode_sweeps, encode_sweeps, expand, spans, sweeps

__all__ = [
    "MAX_MESSAGE_BYTES",
    "PROTOCOL_VERSION",
    "REQUEST_TYPES",
    "Answer",
    "AnyRequest",
    "Batch",
    "Event",
    "Failed",
    "Goodbye",
    "Heartbeat",
    "HeartbeatAnswer",
    "Hello",
    "HelloWanted",
    "KeyName",
    "MalformedMessage",
    "MalformedRequest",
    "Message",
    "Mismatch",
    "Plan",
    "Priority",
    "Published",
    "Query",
    "Refused",
    "Request",
    "Settled",
    "State",
    "Stats",
    "StatsQuery",
    "Sweep",
    "Universe",
    "UnknownMessage",
    "UnknownRequest",
    "Welcome",
    "decode",
    "decode_request",
    "decode_sweeps",
    "encode",
    "encode_request",
    "encode_sweeps",
    "expand",
    "op_of",
    "request_from_fields",
    "request_to_fields",
    "spans",
    "sweeps",
]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one scheduler step will run: tokens in all, new tokens per prefill, decode and draft counts."""

    tokens: int
    prefill_lengths: tuple[int, ...] = ()
    decodes: int = 0
    speculative_tokens: int = 0
