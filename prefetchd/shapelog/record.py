"""The shape log's record: one line for each variant first seen, enough to compile it again elsewhere.

A record outlives the process, the release and the machine that wrote it, so each line carries its own
version, fields a reader does not know are ignored, and a line that cannot be read is reported and skipped,
never a reason to lose the others. Everything in it is data from a stranger: bounded here, believed nowhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

RECORD_VERSION = 1

# A generated kernel source is a few KB; a line beyond this is not one of ours.
MAX_LINE_BYTES = 1 << 20

# What the engine knew when it compiled: `planned` asked for and since published (a hit), `late` asked for and
# not there yet, `unplanned` nobody asked, `mismatch` published for this engine and yet not found by it.
Cause = Literal["planned", "late", "unplanned", "mismatch"]

Name = Annotated[str, msgspec.Meta(max_length=1024)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class RecordError(ValueError):
    """A line is not a record; the text names the field and what was expected."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One variant, first seen by one rank. `seconds` is what the engine's own compile of it took."""

    compiler: Name
    # The library's own cache key; empty where only the compiler's run was seen, then `job_digest` names it.
    key: Name
    # Names the compiler's whole fingerprint (`fingerprint_id`), to be compared only.
    fingerprint: Name
    version: int = RECORD_VERSION
    # sha256 of (source, flags without paths, nvcc's version text), for compiles seen without their key.
    job_digest: Name = ""
    cause: Cause = "unplanned"
    seconds: Seconds = 0.0
    # Whether the engine's compile succeeded.
    ok: bool = True
    # When it began, in seconds since 1970, by the wall clock of `host`.
    at: float = 0.0
    host: Name = ""
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    # The device it was compiled for: the driver's name, compute capability (90 is 9.0), multiprocessors.
    gpu: Name = ""
    capability: Annotated[int, msgspec.Meta(ge=0)] = 0
    sm_count: Annotated[int, msgspec.Meta(ge=0)] = 0
    # For people: the caller's place in the source, and how the key differs from the nearest one known.
    site: Text = ""
    changed: Text = ""
    # The request that reached it, as its wire fields, and its provider; None when nobody knew.
    provider: Name = ""
    request: dict[str, Any] | None = None
    # What rebuilds it without a provider; only its compiler can read it (`Compiler.rebuild`).
    rebuild: dict[str, Any] | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        """Two records with the same identity are the same variant."""
        return (self.compiler, self.key or self.job_digest, self.fingerprint)


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
