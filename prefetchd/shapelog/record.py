"""The shape log's lines: a record for each variant first seen, enough to compile it again elsewhere.

Beside records a log holds lines of other kinds, which name their kind first: that a compile began and that
it ended, so that a hang or a kill in the middle can be told, and that a variant was published, for the
timeline. They lack what every record has, so a reader that knows records alone reports and skips them.

A record outlives the process, the release and the machine that wrote it, so each line carries its own
version, fields a reader does not know are ignored, and a line that cannot be read is reported and skipped,
never a reason to lose the others. Everything in it is data from a stranger: bounded here, believed nowhere.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

RECORD_VERSION = 1

# A generated kernel source is a few KB; a line beyond this is not one of ours.
MAX_LINE_BYTES = 1 << 20

# What the engine knew when it compiled: `planned` asked for and since published (a hit), `late` asked for and
# not there yet, `unplanned` nobody asked, `mismatch` published for this engine and yet not found by it.
Cause = Literal["planned", "late", "unplanned", "mismatch"]

Name = Annotated[str, msgspec.Meta(max_length=1024)]
MAX_TEXT = 4096
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
# What every JSON reader holds exactly.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


# Of a key, in a message.
SHOWN = 64


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
    rank: Count = 0
    # Which process of `host` it was, told from earlier ones with its number.
    process: Name = ""
    # The device it was compiled for: the driver's name, compute capability (90 is 9.0), multiprocessors.
    gpu: Name = ""
    capability: Count = 0
    sm_count: Count = 0
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


class Started(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="started"):
    """A compile began in the engine; an `Ended` of the same process and token tells of its end.

    One without is a compile that hangs, or in the middle of which the process was killed.
    """

    compiler: Name
    token: Count
    key: Name = ""
    job_digest: Name = ""
    at: float = 0.0
    host: Name = ""
    rank: Count = 0
    process: Name = ""
    site: Text = ""


class Ended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="ended"):
    """The compile that `Started` told of is over. Its record, if the variant is new, is a line of its own."""

    token: Count
    at: float = 0.0
    host: Name = ""
    rank: Count = 0
    process: Name = ""


class Published(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="published"
):
    """A variant became visible to this rank without its doing; `seconds` is what that took, if known."""

    compiler: Name
    key: Name
    at: float = 0.0
    seconds: Seconds = 0.0
    host: Name = ""
    rank: Count = 0
    process: Name = ""


# What msgspec raises for bad bytes: its own errors, broken UTF-8, nesting too deep, numbers out of range.
_BAD_BYTES = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)

# What a line of a log may be.
Line = Record | Started | Ended | Published

# One compile in one process of one rank.
Run = tuple[str, int, str, int]

# Every kind but the record; its line begins with it.
_KIND_PREFIX = b'{"kind":'


class _KindOnly(msgspec.Struct):
    kind: str


_decoder = msgspec.json.Decoder(Record)
_kinds: msgspec.json.Decoder[Started | Ended | Published] = msgspec.json.Decoder(Started | Ended | Published)
_KNOWN_KINDS = ("started", "ended", "published")


class UnknownKind(RecordError):
    """A whole line of a kind that this version does not know."""


def run_of(line: Started | Ended) -> Run:
    """By what a compile's start and end belong together."""
    return (line.host, line.rank, line.process, line.token)


def encode_line(line: Line) -> bytes:
    """One line, with its newline. Raises `RecordError` for what a reader would not accept."""
    name = getattr(line, "key", "")[:SHOWN]
    if not math.isfinite(line.at + getattr(line, "seconds", 0.0)):
        raise RecordError(f"record {name}: a time that is no number")
    try:
        data = msgspec.json.encode(line) + b"\n"
    except _BAD_BYTES as error:
        raise RecordError(f"record {name}: {error}") from error
    if len(data) > MAX_LINE_BYTES:
        raise RecordError(f"record {name}: {len(data)} bytes, more than {MAX_LINE_BYTES}")
    # Nothing has checked the fields' bounds so far, and reading takes microseconds.
    decode_line(data)
    return data


def decode_line(data: bytes) -> Line:
    """What one line says, of whichever kind. Raises `RecordError`, for a kind not known `UnknownKind`."""
    if not data.startswith(_KIND_PREFIX):
        return decode_record(data)
    try:
        _check_size(data)
        return _kinds.decode(data)
    except _BAD_BYTES as error:
        raise (UnknownKind if _is_foreign(data) else RecordError)(str(error)) from error


def encode_record(record: Record) -> bytes:
    """`encode_line` of a record."""
    return encode_line(record)


def decode_record(line: bytes) -> Record:
    """The record of one line. Raises `RecordError`; a newer version is read as far as it is known."""
    try:
        _check_size(line)
        return _decoder.decode(line)
    except _BAD_BYTES as error:
        raise RecordError(str(error)) from error


def _is_foreign(data: bytes) -> bool:
    try:
        return msgspec.json.decode(data, type=_KindOnly).kind not in _KNOWN_KINDS
    except _BAD_BYTES:
        return False


def _check_size(line: bytes) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise RecordError(f"line of {len(line)} bytes, more than {MAX_LINE_BYTES}")
