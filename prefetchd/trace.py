"""The messages between whoever wants requests traced and the helper that traces them.

An order names sweeps to run in one process and how; its report says which jobs they take together and which
requests failed, each failure with its kind. A report always comes: a crash, a hang or a lost helper becomes a
failure in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from prefetchd.compilers.base import Job
from prefetchd.protocol import PROTOCOL_VERSION, Sweep
from prefetchd.targets import Target
from prefetchd.winners import Given, Tuning

# Larger than any report of a sweep over 100,000 shapes with all its kernel sources (about 1 MB); a frame
# beyond it is not ours.
MAX_FRAME_BYTES = 64 << 20

Mode = Literal["capture", "forbid"]

# unavailable: the library has no such entry point. error: it raised. crash: it took the process with it.
# hang: it did not return in time. miss: compiling was forbidden and it wanted to.
FailureKind = Literal["unavailable", "error", "crash", "hang", "miss"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A request that did not run. `requests` counts those it stands for: itself and those behind it.

    What is about all of an order has the order's label, and then it stands for the last so many.
    """

    request: str
    kind: FailureKind
    text: str
    requests: int = 1


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A helper's first message: it is there, and which protocol it speaks."""

    pid: int
    protocol: int = PROTOCOL_VERSION


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The answer to `Hello`: what the helper is for. `parallel` bounds the traces it runs at a time.

    `given` is what it may know of the choices of the engine's tuners.
    """

    target: Target
    providers: tuple[str, ...]
    parallel: int = 1
    timeout_s: float = 300.0
    given: Given = Given()


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """Trace these sweeps: in capture mode compile nothing, in forbid mode use the engine's cache as it is.

    They are encoded (`encode_sweeps`), which keeps ops that the helper's version does not know.
    """

    id: int
    provider: str
    mode: Mode
    sweeps: bytes


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Answer at once, whatever is being traced."""


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    """The answer to `Ping`: the helper reads its messages."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The helper's answer to `Start`. `unavailable` holds each provider that cannot run here, and why."""

    pid: int
    unavailable: dict[str, str]
    fingerprints: dict[str, dict[str, str]]


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The answer to an order. `seconds` is the sweeps' own time, without the helper's start.

    `lost`: the helper ended before it could answer, so its one failure says nothing about the sweeps.
    """

    id: int
    seconds: float
    jobs: tuple[Job, ...] = ()
    tunings: tuple[Tuning, ...] = ()
    failures: tuple[Failure, ...] = ()
    lost: bool = False


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The helper cannot work at all (no null device, no provider); it exits after this."""

    text: str


def label_of(sweeps: Sequence[Sweep]) -> str:
    """For people: what an order is about."""
    if not sweeps:
        return "nothing"
    more = f" and {len(sweeps) - 1} more" if len(sweeps) > 1 else ""
    return sweeps[0].label() + more


def size_of(sweeps: Sequence[Sweep]) -> int:
    """How many requests an order is about."""
    return sum(map(len, sweeps))


ToHelper = Start | Order | Ping
FromHelper = Hello | Ready | Report | Refused | Pong

to_helper = msgspec.msgpack.Decoder(ToHelper)
from_helper = msgspec.msgpack.Decoder(FromHelper)
encode = msgspec.msgpack.Encoder().encode
