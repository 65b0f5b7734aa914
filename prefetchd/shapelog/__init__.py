"""The shape log: what engines compiled themselves, one file a rank, to be compiled ahead the next time."""

from __future__ import annotations

from prefetchd.shapelog.record import (
    MAX_LINE_BYTES,
    RECORD_VERSION,
    Cause,
    Record,
    RecordError,
    decode_record,
    encode_record,
)

__all__ = [
    "MAX_LINE_BYTES",
    "RECORD_VERSION",
    "Cause",
    "Record",
    "RecordError",
    "decode_record",
    "encode_record",
]
