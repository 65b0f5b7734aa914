"""What engines, tools and the daemon say to each other: one MessagePack map a frame, its `type` first.

The wire is met by strangers, older and newer versions and plain noise, so everything that arrives is bounded
before it is believed: the frame by its size, every text and list by its own limit. The subtle rule: `decode`
has exactly three endings. A known message that fits comes back typed, with fields it does not know left out;
an unknown type comes back as `UnknownMessage`, to be kept and counted; everything else is one exception,
`MalformedMessage`, that names what is wrong. What a message reports is only ever compared, never executed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec

from prefetchd.targets import Target

# Raised when a reader of the old version would misunderstand a message of the new one. New fields and new
# types do not need it: both are tolerated.
PROTOCOL_VERSION = 1

# A plan of 100,000 requests as sweeps takes some KB, single requests of a large replay about 1 MB.
MAX_MESSAGE_BYTES = 4 << 20
# DeepJIT's keys are about 60 characters, Triton's 52; a CuTe key may be a readable text.
MAX_NAME = 1024
# As Linux bounds a path; also enough for the end of a compiler's complaint.
MAX_TEXT = 4096

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
# A fingerprint holds whole version texts of tools.
LongText = Annotated[str, msgspec.Meta(max_length=16 * MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0)]
# Thirty years: no duration is longer, and a sum of such stays a number.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Blob = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
Paths = Annotated[tuple[Text, ...], msgspec.Meta(max_length=256)]
Fingerprint = Annotated[dict[Name, LongText], msgspec.Meta(max_length=256)]
Figures = Annotated[dict[Name, int | float], msgspec.Meta(max_length=1024)]

Problem = Literal["oversized", "malformed", "version"]


class MalformedMessage(ValueError):
    """A frame that is not a message of this protocol; `problem` says how, the text what and where."""

    def __init__(self, problem: Problem, text: str) -> None:
        super().__init__(text)
        self.problem: Problem = problem


class Priority(IntEnum):
    """How soon a request is needed; a lower number goes first."""

    URGENT = 0  # an engine waits for it
    BATCH = 1  # scheduled to run
    REPLAY = 2  # an earlier run needed it
    UNIVERSE = 3  # the model can need it


class State(IntEnum):
    """What the daemon knows of a key or a request in the asking engine's cache directory."""

    UNKNOWN = 0  # nobody ever asked for it
    QUEUED = 1
    COMPILING = 2
    PUBLISHED = 3
    FAILED = 4


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What all messages are."""


class UnknownMessage(Message, frozen=True, kw_only=True, tag=False):
    """A message of a type this version does not know, kept whole."""

    type: str
    frame: bytes


class KeyName(msgspec.Struct, frozen=True, array_like=True):
    """One variant: the library's own key under its compiler."""

    compiler: Name
    key: Name


Keys = Annotated[tuple[KeyName, ...], msgspec.Meta(max_length=4096)]
# By provider: what `encode_sweeps` makes of its requests, so that an op only the helper knows passes through.
Requests = Annotated[dict[Name, Blob], msgspec.Meta(max_length=64)]


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """An engine's first message, and again after each reconnect or whenever one of its fields changes.

    `target` is what the rank's real device reports. By compiler: `fingerprints` is what enters its keys,
    `cache_roots` the directories the engine's library really uses, in its order. All of it is compared with
    the daemon's own allow-list and never executed. `generation` tells a restarted engine from the same one.
    A tool that only asks sends a hello without a target.
    """

    engine: Name
    pid: Count
    generation: Name
    protocol: int = PROTOCOL_VERSION
    rank: Count = 0
    world: Annotated[int, msgspec.Meta(ge=1)] = 1
    target: Target | None = None
    fingerprints: Annotated[dict[Name, Fingerprint], msgspec.Meta(max_length=64)] = {}
    cache_roots: Annotated[dict[Name, Paths], msgspec.Meta(max_length=64)] = {}
    interpreter: Text = ""
    library_directories: Paths = ()
    cpus: Annotated[tuple[Count, ...], msgspec.Meta(max_length=8192)] = ()
    # Of the engine's pool of states, which some keys contain; 0 where it has none or does not know yet.
    state_slots: Count = 0


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The daemon's answer to a hello. `instance` is new whenever the daemon was started anew."""

    instance: Name
    pid: Count
    protocol: int = PROTOCOL_VERSION


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The daemon will not serve this peer (wrong version, malformed message, not allowed), and why."""

    text: Text


class HelloWanted(Message, frozen=True, kw_only=True, tag="hello_wanted"):
    """The daemon heard from a peer it does not know, as after its own restart: introduce yourself again."""

    instance: Name


class Mismatch(Message, frozen=True, kw_only=True, tag="mismatch"):
    """What the engine reports differs from the helper's: everything built under it would be useless.

    `fix` is the line to add or to change.
    """

    compiler: Name
    field: Name
    engine: LongText
    helper: LongText
    fix: Text = ""


class Universe(Message, frozen=True, kw_only=True, tag="universe"):
    """Compile all that this profile can cause, in the background. `profile` as `encode_profile` makes it."""

    profile: Blob
    providers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]


class Plan(Message, frozen=True, kw_only=True, tag="plan"):
    """These requests will run. Answered by `Settled` with its id, once no key of it is left to compile.

    `deadline_s` counts from the receipt: after it nobody needs an urgent answer any more. 0: no deadline.
    """

    id: Count
    requests: Requests
    priority: Priority = Priority.BATCH
    deadline_s: Seconds = 0.0


class Settled(Message, frozen=True, kw_only=True, tag="settled"):
    """Every key of these plans is published or failed; a plan whose requests failed to trace, too."""

    plans: Annotated[tuple[Count, ...], msgspec.Meta(max_length=65536)]


class Published(Message, frozen=True, kw_only=True, tag="published"):
    """The engine's library now finds this variant under `root`."""

    compiler: Name
    key: Name
    root: Text


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """This variant could not be made, and why; the engine will compile it itself."""

    compiler: Name
    key: Name
    root: Text = ""
    text: Text = ""


class Event(Message, frozen=True, kw_only=True, tag="event"):
    """What the engine itself did: a compile began or ended, a disk hit, a module load.

    `key` where the observer saw the library's key, `digest` (the job digest) where it only saw the compiler
    run. `request` is an encoded request where known, `site` the caller's place in the source for people.
    `seconds` is what it took, and of a begin how long ago that was: nvcc's is heard of afterwards.
    `daemon_down`: it happened while no daemon answered the engine, which tells of it afterwards.
    """

    what: Literal["started", "ended", "hit", "load"]
    compiler: Name
    key: Name = ""
    digest: Name = ""
    seconds: Seconds = 0.0
    ok: bool = True
    request: Annotated[bytes, msgspec.Meta(max_length=16 * MAX_TEXT)] = b""
    site: Text = ""
    daemon_down: bool = False


class Query(Message, frozen=True, kw_only=True, tag="query"):
    """What of these is published? With a priority, what is not is promoted to it."""

    id: Count
    keys: Keys = ()
    requests: Requests = {}
    priority: Priority | None = None
    deadline_s: Seconds = 0.0


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """The states of a query's keys in its order, and by provider those of its requests in theirs."""

    id: Count
    keys: Annotated[tuple[State, ...], msgspec.Meta(max_length=4096)] = ()
    requests: Annotated[dict[Name, tuple[State, ...]], msgspec.Meta(max_length=64)] = {}


class StatsQuery(Message, frozen=True, kw_only=True, tag="stats_query"):
    """The daemon's figures, please."""

    id: Count


class Stats(Message, frozen=True, kw_only=True, tag="stats"):
    """The answer: figures by metric name, and tables for people and tools (`ranks`, `helpers`, `queue`)."""

    id: Count
    instance: Name
    figures: Figures
    tables: dict[Name, Any] = {}


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """The client lives; `figures` are its own counters, so that drops are seen where metrics are."""

    sequence: Count
    figures: Figures = {}


class HeartbeatAnswer(Message, frozen=True, kw_only=True, tag="heartbeat_answer"):
    """The daemon lives, and is the same as before or another (`instance`)."""

    sequence: Count
    instance: Name
    figures: Figures = {}


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The sender, engine or daemon, ends on purpose."""

    text: Text = ""


KINDS: dict[str, type[Message]] = {
    str(kind.__struct_config__.tag): kind for kind in Message.__subclasses__() if kind is not UnknownMessage
}

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Hello
    | Welcome
    | Refused
    | HelloWanted
    | Mismatch
    | Universe
    | Plan
    | Settled
    | Published
    | Failed
    | Event
    | Query
    | Answer
    | StatsQuery
    | Stats
    | Heartbeat
    | HeartbeatAnswer
    | Goodbye
)
_encoder = msgspec.msgpack.Encoder()


class _Head(msgspec.Struct):
    """All that is read of a message which did not fit."""

    type: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    protocol: int | None = None


_head_decoder = msgspec.msgpack.Decoder(_Head)

# What msgspec raises for bad bytes: its own errors, broken UTF-8, nesting too deep, numbers out of range.
_BAD_BYTES = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


def encode(message: Message) -> bytes:
    """The message as one frame. Raises `MalformedMessage` where its reader would refuse the size."""
    frame = message.frame if isinstance(message, UnknownMessage) else _encoder.encode(message)
    _check_size(frame)
    return frame


def decode(frame: bytes) -> Message:
    """The message of a frame, an `UnknownMessage` for another type. Raises `MalformedMessage`, no more."""
    _check_size(frame)
    try:
        message = _decoder.decode(frame)
    except _BAD_BYTES as error:
        return _not_fitting(frame, str(error))
    if isinstance(message, Hello) and message.protocol != PROTOCOL_VERSION:
        raise _other_version(message.protocol)
    return message


def _check_size(frame: bytes) -> None:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(
            "oversized", f"a frame of {len(frame)} bytes; messages have at most {MAX_MESSAGE_BYTES}"
        )


def _not_fitting(frame: bytes, reason: str) -> UnknownMessage:
    try:
        head = _head_decoder.decode(frame)
    except _BAD_BYTES as error:
        raise MalformedMessage("malformed", f"not a message: {error}") from None
    if head.type not in KINDS:
        return UnknownMessage(type=head.type, frame=frame)
    # A hello of another version may well differ in its fields; the version is what its sender must hear.
    if head.type == "hello" and head.protocol not in (None, PROTOCOL_VERSION):
        raise _other_version(head.protocol)
    raise MalformedMessage("malformed", f"message {head.type!r}: {reason}")


def _other_version(version: int | None) -> MalformedMessage:
    return MalformedMessage(
        "version",
        f"hello: protocol = {version}: this prefetchd speaks {PROTOCOL_VERSION}; "
        "install the same prefetchd for engine and daemon",
    )
