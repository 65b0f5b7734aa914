"""The messages between an executor and the fork server that compiles for it, one a packet.

A compile is answered by `Begun` with the group of its processes, so that the executor can end them when the
server no longer can, and later by `Ended`, always: whatever ends a worker is found out by the server.
"""

from __future__ import annotations

import msgspec

from prefetchd.compilers.base import Job
from prefetchd.jobs import Report
from prefetchd.targets import Target

# Far above any message: a recorded specialization takes some KB. The socket's own buffer bounds what is sent.
MAX_PACKET_BYTES = 4 << 20


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to a server: what it compiles, how many at a time, and what each worker may take."""

    compiler: str
    target: Target
    providers: tuple[str, ...]
    slots: int
    timeout_s: float
    # 0: no limit.
    memory_bytes: int
    nice: int


class Compile(msgspec.Struct, frozen=True, kw_only=True, tag="compile"):
    """Compile this job into this directory."""

    id: int
    job: Job
    staging: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """End this compile; it is still answered by `Ended`."""

    id: int


class Up(msgspec.Struct, frozen=True, kw_only=True, tag="up"):
    """The server is warm."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The server cannot work at all and exits."""

    text: str


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The worker of a compile runs, in this process group."""

    id: int
    group: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """How a compile ended, one that never began included. `refused` is the compiler's reason not to try."""

    id: int
    report: Report
    refused: str = ""


to_server = msgspec.msgpack.Decoder(Start | Compile | Cancel)
from_server = msgspec.msgpack.Decoder(Up | Refused | Begun | Ended)
encode = msgspec.msgpack.Encoder().encode
