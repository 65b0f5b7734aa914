"""Which records of a log become what: a request to trace, a job made from the record alone, or neither.

A record made under another fingerprint holds a source or a specialization that is of no use here; its
request, if it has one and a provider that knows it is installed, is as good as new. The subtle rule: a record
is a stranger's data, so whatever it brings about - a refusal, a defect of ours - costs that record and no
other, and is told by name with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from prefetchd.codec import MalformedRequest, request_from_fields
from prefetchd.compilers.base import Compiler, CompilerUnavailable, Job, NotRebuildable, fingerprint_id
from prefetchd.coverage import Problem
from prefetchd.kernel_packages import allowed_packages, home_problem
from prefetchd.request import Request, UnknownRequest
from prefetchd.shapelog import Record
from prefetchd.sweeps import Sweep, site_of, sweeps
from prefetchd.targets import Target

KeyId = tuple[str, str]
# Reasons told one by one; a log of noise has one for each of its lines, and all are counted.
MAX_PROBLEMS = 1000
# The dearest so many are replayed: twice what the largest model compiles.
MAX_RECORDS = 20_000
# Of what they hold together; a DeepGEMM record has 2 KB of it, one of Triton's 4 KB. In memory a forged one
# takes 25 times as much.
MAX_PAYLOAD = 128 << 20
# Of what a record says of itself, what a message repeats.
SHOWN = 120


# Seen by the observer for people alone: what other libraries build by nvcc in caches of their own.
OBSERVED_ONLY = frozenset({"nvcc"})


class Left(StrEnum):
    """Why a record is left alone, and that is no fault."""

    # The engine's own compile of it failed, and so would ours.
    ENGINE_FAILED = "engine_failed"
    # Found ready: nothing was compiled, so nothing rebuilds it. Its planner asks for it again.
    PLANNED = "planned"
    # No cache that we know.
    OTHERS = "others"


class Asked(NamedTuple):
    """A record with a request that an installed provider can trace."""

    provider: str
    request: Request
    record: Record


class Traceable(NamedTuple):
    """The requests of one site, and the records they came from, the dearest first."""

    provider: str
    sweep: Sweep
    records: tuple[Record, ...]


class Room:
    """How much of a log is replayed at a time. `left_out` counts what did not fit, the cheapest."""

    def __init__(self) -> None:
        self.left_out = 0
        self._records = self._bytes = 0

    def takes(self, record: Record) -> bool:
        """Whether there is room for the record, which takes it then."""
        if self._records >= MAX_RECORDS or self._bytes >= MAX_PAYLOAD:
            self.left_out += 1
            return False
        self._records += 1
        self._bytes += len(msgspec.json.encode([record.rebuild, record.request]))
        return True


class Refusals:
    """Records that cannot be replayed: all counted, the first of them with their reasons."""

    def __init__(self) -> None:
        self.count = 0
        self.problems: list[Problem] = []

    def add(self, record: Record, reason: str) -> None:
        """Counts one."""
        self.count += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(what=name_of(record), kind="refused", text=reason))


def name_of(record: Record) -> str:
    """For people: the variant as its library calls it, else what compiled it."""
    name = record.key or record.job_digest or "a variant without a name"
    return f"{record.compiler} {name}"[:SHOWN]


def left_alone(record: Record) -> Left | None:
    """The reason, if the record is not to be replayed at all."""
    if record.compiler in OBSERVED_ONLY:
        return Left.OTHERS
    if record.cause == "planned" and record.rebuild is None and record.request is None:
        return Left.PLANNED
    return None if record.ok else Left.ENGINE_FAILED


def split(
    records: Iterable[Record], providers: Container[str], environment: Mapping[str, str]
) -> tuple[list[Asked], list[Record]]:
    """The records that can and may be traced, and the others, both in the order they came."""
    packages = allowed_packages(environment)
    asked: list[Asked] = []
    rest: list[Record] = []
    for record in records:
        request = _request(record) if record.provider in providers else None
        if request is None or home_problem(_home(record), packages):
            rest.append(record)
        else:
            asked.append(Asked(record.provider, request, record))
    return asked, rest


def _home(record: Record) -> object:
    return (record.request or {}).get("home")


def traceable(asked: Iterable[Asked]) -> list[Traceable]:
    """Requests that differ in their sweep field alone, together; in the order of their first record."""
    groups: dict[object, list[Asked]] = {}
    for each in asked:
        site, _ = site_of(each.request)
        groups.setdefault((each.provider, site), []).append(each)
    found = []
    for group in groups.values():
        (sweep,) = sweeps(each.request for each in group)
        found.append(Traceable(group[0].provider, sweep, tuple(each.record for each in group)))
    return found


class Rebuilder:
    """Makes jobs of records, for one target. `load` gives a compiler and raises `CompilerUnavailable`."""

    def __init__(
        self, target: Target, load: Callable[[str], Compiler], environment: Mapping[str, str]
    ) -> None:
        self.jobs: dict[KeyId, Job] = {}
        self.refused = Refusals()
        # Made under another fingerprint or on another device: kept in the log, of no use here.
        self.foreign = 0
        self._target = target
        self._load = load
        self._packages = allowed_packages(environment)
        self._fingerprints: dict[str, str] = {}

    def add(self, record: Record) -> bool:
        """Whether a job was made of the record. Raises nothing."""
        try:
            if not self._is_foreign(record, self._load(record.compiler)):
                job = self._rebuilt(record)
                self.jobs.setdefault((job.compiler, job.key), with_cost(job, record.seconds))
                return True
            self.foreign += 1
        except (NotRebuildable, CompilerUnavailable) as error:
            home = home_problem(_home(record), self._packages)
            self.refused.add(record, f"{home}; {error}" if home else str(error))
        except Exception as error:
            # A defect of ours that a record has found.
            self.refused.add(record, f"not understood ({type(error).__name__}: {error})")
        return False

    def try_add(self, record: Record) -> bool:
        """The same, and nothing is counted where none was made: there is another way for this record."""
        foreign, refused = self.foreign, self.refused
        self.refused = Refusals()
        try:
            return self.add(record)
        finally:
            self.foreign, self.refused = foreign, refused

    def _rebuilt(self, record: Record) -> Job:
        job = self._load(record.compiler).rebuild(record)
        if job.key != record.key:
            raise NotRebuildable(f"key: the record says {record.key[:SHOWN]!r}, it is {job.key!r}")
        return job

    def is_native(self, record: Record) -> bool:
        """Whether the record was made under this fingerprint and on this device. Raises nothing."""
        try:
            return not self._is_foreign(record, self._load(record.compiler))
        except CompilerUnavailable:
            return False

    def _is_foreign(self, record: Record, compiler: Compiler) -> bool:
        target, name = self._target, record.compiler
        if record.capability not in (0, target.capability) or record.sm_count not in (0, target.sm_count):
            return True
        if name not in self._fingerprints:
            self._fingerprints[name] = fingerprint_id(compiler.fingerprint())
        return record.fingerprint != self._fingerprints[name]


def with_cost(job: Job, seconds: float) -> Job:
    """The job, ordered by what the engine measured rather than by a guess."""
    return msgspec.structs.replace(job, cost=seconds) if seconds > 0 else job


def _request(record: Record) -> Request | None:
    """The request of a record, if this version knows its op."""
    if record.request is None:
        return None
    try:
        request = request_from_fields(record.request)
    except (MalformedRequest, TypeError, ValueError, OverflowError, RecursionError):
        return None
    return None if isinstance(request, UnknownRequest) else request
