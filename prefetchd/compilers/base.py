"""What a compile system must be able to do, whoever asks for the kernel.

A compiler turns a *traced* request into jobs, says how a job is compiled, checks the result and makes it
visible in the engine's cache. It knows its cache layout; nobody else does. It never decides when something
is compiled and never starts a process itself: an executor (`executors.py`) runs its jobs.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import msgspec

from prefetchd.shapelog import Record
from prefetchd.targets import Target
from prefetchd.winners import Given, Tuning

# The fingerprint's fields that say where an engine's cache lies, which is no part of what is compiled.
ROOT_FIELDS = frozenset({"deep_jit.roots", "triton.root", "flashinfer_modules.root"})


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One variant to compile. `key` is the library's own cache key; `payload` only its compiler can read."""

    compiler: str
    key: str
    payload: bytes
    # Expected CPU seconds, only to order the queue: a bad guess costs balance, not correctness.
    cost: float = 1.0


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What the job runner executes: argument vector, complete environment, working directory."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    directory: Path


class EntryState(StrEnum):
    """What a cache holds under a key, judged on disk."""

    MISSING = "missing"
    PUBLISHED = "published"
    # Present but unusable: an engine that loads it fails. It is quarantined, never left.
    CORRUPT = "corrupt"


class CompilerUnavailable(Exception):
    """This machine cannot compile or trace for this compiler; the text says what is missing and the fix."""


class NotRebuildable(Exception):
    """A record of a shape log cannot become a job here; the text names its field, the reason and the fix."""


class ArtifactInvalid(Exception):
    """A finished job's output is not what an engine may load; the text names the file and what is wrong."""


class Capture(Protocol):
    """What a trace has collected so far."""

    def jobs(self) -> list[Job]:
        """Every variant the traced calls asked for, each once, in the order of first use."""
        ...


class Compiler(ABC):
    """One compile system for one target. Methods named below raise only what they say."""

    name: ClassVar[str]
    # The variable by which a user moves the cache, for messages that say what to set.
    cache_variable: ClassVar[str]

    @abstractmethod
    def fingerprint(self) -> Mapping[str, str]:
        """Everything beside the request that enters a key: tool texts, versions, paths, variables, target."""

    @abstractmethod
    def cache_root(self) -> Path:
        """The absolute directory the engine's library will look in first and write to."""

    def roots(self) -> tuple[Path, ...]:
        """Every directory the engine's library looks in, in its order; we publish into the first alone."""
        return (self.cache_root(),)

    def look_up(self, key: str) -> EntryState:
        """What the engine will meet under `key`: the first root that holds something decides.

        Something corrupt in a later root counts as missing, since what is published into the first hides it.
        """
        first, *others = self.roots()
        if (state := self.state(key, first)) is not EntryState.MISSING:
            return state
        if any(self.state(key, root) is EntryState.PUBLISHED for root in others):
            return EntryState.PUBLISHED
        return EntryState.MISSING

    def prepare(self, scratch: Path) -> None:  # noqa: B027
        """Called once in a process on the null device, before it imports a kernel library and ever forks.

        `scratch` stays as long as the process. Raises `CompilerUnavailable`.
        """

    def notes(self) -> tuple[str, ...]:
        """What a person should know that is left to the engine though every variant is published."""
        return ()

    def rebuild(self, record: Record) -> Job:
        """The job of a record, from the record alone and without its provider. Raises `NotRebuildable`.

        A record is a stranger's data: nothing in it is executed, and only its known form is accepted.
        """
        raise NotRebuildable(f"{record.compiler}: records of it are replayed through their requests only")

    @abstractmethod
    def capture(self, scratch: Path) -> AbstractContextManager[Capture]:
        """Within it, the library computes its keys and compiles nothing; `scratch` is empty.

        Entered in a process that has not used the library yet. A scratch directory in which an earlier
        process crashed may be used again: what that one captured still counts. Raises `CompilerUnavailable`.
        """

    @abstractmethod
    def forbid(self, scratch: Path) -> AbstractContextManager[Capture]:
        """Within it, the library uses the engine's cache as it is, and a compile fails its call.

        The capture's jobs are the misses. Nothing is written into the engine's cache.
        """

    @abstractmethod
    def verify(self, job: Job, staging: Path) -> None:
        """Raises `ArtifactInvalid` unless `staging` now holds a complete artifact for this target.

        Raises `OSError` when a full disk is the reason.
        """

    def staged_entry(self, key: str, staging: Path) -> Path:
        """Where `verify` and `publish` expect a finished entry inside `staging`."""
        return staging / "entry"

    @abstractmethod
    def entry_path(self, key: str, root: Path) -> Path:
        """Where `root` holds what is published under `key`: one directory, moved whole."""

    @abstractmethod
    def state(self, key: str, root: Path) -> EntryState:
        """What `root` holds under `key` (for this target), judged by the files, never by a record of ours."""

    @abstractmethod
    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        """Makes a verified artifact visible under `root` in one atomic step; False if the engine had it.

        Raises `OSError` (full disk, read-only); nothing partial is ever visible.
        """


@runtime_checkable
class TuningCapture(Protocol):
    """A capture of a library that measures before it chooses a variant."""

    def tunings(self) -> list[Tuning]:
        """Every tuning the traced calls met, each once, in the order of first use."""
        ...


@runtime_checkable
class TunedCompiler(Protocol):
    """A compiler whose library measures: its traces visit every candidate unless they are told better."""

    def use_winners(self, given: Given) -> None:
        """What is known of the engine's choices; called before `capture` and `forbid`."""
        ...


@runtime_checkable
class NamingCompiler(Protocol):
    """A compiler whose library may compile what has no name here: then a single request is not covered."""

    def leave_unnamed(self) -> None:
        """From here on the library compiles that itself, in `capture` and `forbid`, and `notes` tell of it.

        For a whole engine, which would else end with its first such kernel; called before both.
        """
        ...

    def notes(self) -> tuple[str, ...]:
        """See `Compiler`."""
        ...


@runtime_checkable
class CommandCompiler(Protocol):
    """A compiler whose jobs are programs to run."""

    def compile(self, job: Job, staging: Path) -> Command:
        """Writes the job's inputs into `staging` (empty, private) and says what to run there.

        Raises `CompilerUnavailable` for a job that only the library itself can compile.
        """
        ...


class ForkedCompiler(Compiler):
    """A compiler whose library compiles in Python, with a kernel's own module imported.

    Its jobs run in workers forked from a process that has imported these modules and never used them.
    """

    @abstractmethod
    def modules(self, jobs: Iterable[Job]) -> frozenset[str]:
        """The modules that the jobs' kernels live in, as they are imported."""

    @abstractmethod
    def compile_here(self, job: Job, staging: Path) -> None:
        """Compiles in this process, a fork of one that called `prepare`, into `staging` (empty, private).

        Raises `CompilerUnavailable` for a job that would not give what was recorded, with the reason;
        whatever the library raises passes through.
        """


def target_architecture(target: Target) -> str:
    """The architecture text of nvcc for a target, such as `sm_90`."""
    return f"sm_{target.capability}"


def fingerprint_id(fingerprint: Mapping[str, str]) -> str:
    """Names a fingerprint in 16 hexadecimal digits; caches that only lie elsewhere have the same name."""
    named = {name: value for name, value in fingerprint.items() if name not in ROOT_FIELDS}
    text = "\0".join(f"{name}\0{value}" for name, value in sorted(named.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
