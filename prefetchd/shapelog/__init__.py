"""The shape log: what engines compiled themselves, one file a rank, to be compiled ahead the next time."""

from __future__ import annotations

from prefetchd.shapelog.compacting import Compacted, compact, write_merged
from prefetchd.shapelog.merging import Merged
from prefetchd.shapelog.reading import Problems, Unreadable, log_files, read_log
from prefetchd.shapelog.record import (
    MAX_LINE_BYTES,
    RECORD_VERSION,
    Cause,
    Ended,
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
    "Compacted",
    "Ended",
    "Line",
    "LogUnusable",
    "Merged",
    "Problems",
    "Published",
    "Record",
    "RecordError",
    "ShapeLog",
    "Started",
    "UnknownKind",
    "Unreadable",
    "compact",
    "decode_line",
    "decode_record",
    "encode_line",
    "encode_record",
    "log_directory",
    "log_files",
    "log_name",
    "read_log",
    "write_merged",
]
