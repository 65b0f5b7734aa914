"""What goes into the broker and what comes out of it: work to do, how it ended, answers and figures.

All of it is plain data. Ranks and groups are any hashable name; a root is a cache directory as text. Times
are seconds of one monotonic clock, the caller's.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from typing import Literal, TypeAlias

import msgspec

from prefetchd.compilers.base import Job
from prefetchd.sweeps import Sweep

Rank: TypeAlias = Hashable
# Ranks of equal target and fingerprint form a group: what is traced for one holds for all.
Group: TypeAlias = Hashable
Root: TypeAlias = str
# Compiler and the library's own key.
KeyId: TypeAlias = tuple[str, str]


class Priority(IntEnum):
    """Who is served first; a smaller number is better."""

    # An engine waits for it.
    URGENT = 0
    # Scheduled to run.
    BATCH = 1
    REPLAY = 2
    UNIVERSE = 3


class TraceOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Sweeps to trace together in a helper of `group`; answer by `traced` or `trace_lost` with its id.

    They are one sweep, or several single requests.
    """

    id: int
    group: Group
    provider: str
    sweeps: tuple[Sweep, ...]
    priority: Priority


class Check(msgspec.Struct, frozen=True):
    """A question to the disk: does `root` hold the key? Answer by `checked`."""

    compiler: str
    key: str
    root: Root


class Compile(msgspec.Struct, frozen=True, kw_only=True):
    """A job to compile and publish into `root`; answer by `compiled`."""

    job: Job
    group: Group
    root: Root
    priority: Priority

    @property
    def background(self) -> bool:
        """Whether it runs below normal priority: niceness cannot be raised later, so it is fixed now."""
        return self.priority is not Priority.URGENT


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """What `source` holds is to be published in `root` too; answer by `published`."""

    job: Job
    group: Group
    source: Root
    root: Root
    priority: Priority


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a compile or a publish ended.

    `retryable`: the machine's fault (time, memory, disk, signal, a lost process). `source_gone`: a publish
    found nothing to publish. `found`: an engine or a stranger had published it first.
    """

    ok: bool
    text: str = ""
    retryable: bool = False
    source_gone: bool = False
    found: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Slots(msgspec.Struct, frozen=True):
    """Compile slots of the node: how many are free now, of how many."""

    free: int
    total: int


class Accepted(msgspec.Struct, frozen=True):
    """The answer to a plan, in asks: `new` to the group, `known` already, `refused` because a table is full.

    One ask is one request, or one sweep that stands for many.
    """

    new: int = 0
    known: int = 0
    refused: int = 0


# unknown: nobody planned it. missing: planned, to be compiled. The others as they say.
KeyState: TypeAlias = Literal["unknown", "missing", "compiling", "published", "failed"]
# queued, tracing: its keys are not known yet. open: some key is not published in the rank's roots yet.
# failed: a key failed. uncovered: it could not be traced, or a compiler of it has no root here.
RequestState: TypeAlias = Literal["unknown", "queued", "tracing", "open", "published", "failed", "uncovered"]


class KeyStatus(msgspec.Struct, frozen=True):
    """A key as the asking rank's engine would meet it; `text` is the reason of a failure."""

    compiler: str
    key: str
    state: KeyState
    text: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The one answer to a query. `timed_out`: the wait ended before every key was published or failed."""

    rank: Rank
    token: Hashable
    keys: tuple[KeyStatus, ...]
    timed_out: bool = False


# Why an engine had to compile.
Reason: TypeAlias = Literal["unplanned", "late", "failed", "mismatch", "daemon_down"]


class Counts(msgspec.Struct, kw_only=True):
    """The figures of one rank and compiler, in variants unless they say otherwise.

    `hits`: on disk when planned or when the engine first used it. `late`: planned, but the engine reached it
    before it was published. `wasted`: compiled here and not used by this rank so far (it falls as they are
    used). `undecided`: engine events whose request may still be among those to trace.
    """

    planned: int = 0
    hits: int = 0
    late: int = 0
    unplanned: int = 0
    mismatch: int = 0
    wasted: int = 0
    undecided: int = 0
    engine_compiles: dict[str, int] = {}
    engine_seconds: dict[str, float] = {}
    waits: int = 0
    wait_seconds: float = 0.0


class Stats(msgspec.Struct, kw_only=True):
    """All figures at one moment. `ranks` by name (as text), then compiler. Depths by priority's name."""

    ranks: dict[str, dict[str, Counts]]
    trace_depth: dict[str, int]
    job_depth: dict[str, int]
    publish_depth: dict[str, int]
    tracing: int
    compiling: int
    publishing: int
    checking: int
    engines_compiling: int
    waiting: int
    attached: int
    groups: int
    known_keys: int
    failed_keys: int
    # Requests and sweeps that are known to the groups.
    requests: int
    # Totals since the start.
    asked: int
    refused: int
    traced: int
    # Requests that failed to be traced.
    uncovered: int
    compiled: int
    # Compiles that found the key published when they ended.
    found: int
    # Of compiles and publishes, retried ones included.
    failures: int
    published: int
    demoted: int
    # Fingerprint mismatches by "compiler field".
    mismatches: dict[str, int]
    drained: bool
    # The latest reasons for which something is not covered.
    problems: list[str]
