"""The shape log's record: one line for each variant first seen, enough to compile it again elsewhere.

A record outlives the process, the release and the machine that wrote it, so each line carries its own
version, fields a reader does not know are ignored, and a line that cannot be read is reported and skipped,
never a reason to lose the others. Writing and replaying logs build on this type.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

RECORD_VERSION = 1

# A generated kernel source is a few KB; a line beyond this is not one of ours.
MAX_LINE_BYTES = 1 << 20

Cause = Literal["planned", "late", "unplanned", "mismatch"]


class RecordError(ValueError):
    """A line is not a record; the text names the field and what was expected."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One variant, first seen. `seconds` is the engine's own compile time, 0 for a disk hit."""

    compiler: str
    # The library's own cache key.
    key: str
    fingerprint: str
    version: int = RECORD_VERSION
    # sha256 of (source, flags without paths, nvcc's version text), for compiles seen without their key.
    job_digest: str = ""
    cause: Cause = "unplanned"
    seconds: float = 0.0
    # The request that reached it, as its wire fields; None when nobody knew.
    request: dict[str, Any] | None = None
    # What rebuilds it without a provider: Triton's specialization, a generated source, a CuTe key.
    rebuild: dict[str, Any] | None = None


def encode_record(record: Record) -> bytes:
    """One line, with its newline. Raises `RecordError` if it would be longer than a reader accepts."""
    line = msgspec.json.encode(record) + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise RecordError(f"record {record.key}: {len(line)} bytes, more than {MAX_LINE_BYTES}")
    return line


def decode_record(line: bytes) -> Record:
    """The record of one line. Raises `RecordError`; a newer version is read as far as it is known."""
    if len(line) > MAX_LINE_BYTES:
        raise RecordError(f"line of {len(line)} bytes, more than {MAX_LINE_BYTES}")
    try:
        return msgspec.json.decode(line, type=Record)
    except msgspec.DecodeError as error:
        raise RecordError(str(error)) from error
