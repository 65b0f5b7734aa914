"""The shape log: what engines compiled themselves, one file a rank, to be compiled ahead the next time."""

from __future__ import annotations

from prefetchd.shapelog.record import (
    MAX_LINE_BYTES,
    RECORD_VERSION,
    Cause,
    Line,
    Published,
    Record,
    RecordError,
    Started,
    UnknownKind,
    decode_line,
    decode_record,
    encode_line,
    encode_record,
)
from prefetchd.shapelog.writer import LogUnusable, ShapeLog, log_directory, log_name

__all__ = [
    "MAX_LINE_BYTES",
    "RECORD_VERSION",
    "Cause",
    "Line",
    "LogUnusable",
    "Published",
    "Record",
    "RecordError",
    "ShapeLog",
    "Started",
    "UnknownKind",
    "decode_line",
    "decode_record",
    "encode_line",
    "encode_record",
    "log_directory",
    "log_name",
]
