"""One cache root and what is done in it: compile in staging, verify, publish; or copy another root's entry.

One rule is subtle: a step that another thread has begun is waited for, also by a task that is cancelled.
Otherwise the staging directory would be removed while it is being renamed into the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from prefetchd.compilers.base import ArtifactInvalid, Compiler, CompilerUnavailable, EntryState, Job
from prefetchd.executors import Executor
from prefetchd.forked.executor import ServerFailed
from prefetchd.store import Staging, quarantine

# What nvcc makes: large, and never rewritten in place. All else in an entry is small, and some of it is.
LINKED_SUFFIX = ".cubin"

Parameters = ParamSpec("Parameters")
T = TypeVar("T")


class Ending(StrEnum):
    """How a job ended."""

    COMPILED = "compiled"
    # Another process published it first: nothing was lost, nothing was overwritten.
    FOUND = "found"
    FAILED = "failed"


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One job's end. `cpu_s` and `wall_s` are the compile's own, as the job runner accounted them.

    `retryable`: it failed by the machine's fault (time, memory, disk, a killed process), not the source's.
    """

    job: Job
    ending: Ending
    text: str = ""
    retryable: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0


class SourceGone(Exception):
    """The root that was to be copied from no longer holds the entry."""


class Workplace:
    """A compiler's work in one root. `quarantined` hears where a corrupt entry in the way was moved.

    Whoever calls holds the key's lock.
    """

    def __init__(
        self, compiler: Compiler, root: Path, staging: Staging, quarantined: Callable[[Path], None]
    ) -> None:
        self.root = root
        self._compiler = compiler
        self._staging = staging
        self._quarantined = quarantined

    async def compile(self, job: Job, executor: Executor) -> JobOutcome:
        """Raises nothing: every failure is an outcome."""
        try:
            if await in_thread(self._make_way, job):
                return JobOutcome(job=job, ending=Ending.FOUND)
            with self._staging.entry(job.key) as entry:
                result = await executor.run(job, entry)
                cpu_s, wall_s = result.cpu_s, result.wall_s
                if not result.ok:
                    cause = _no_space(self.root) if result.reason == "disk" else result.describe()
                    return JobOutcome(
                        job=job,
                        ending=Ending.FAILED,
                        text=f"{cause}\n{result.output}".strip(),
                        retryable=result.retryable,
                        cpu_s=cpu_s,
                        wall_s=wall_s,
                    )
                published = await in_thread(self._finish, job, entry)
                ending = Ending.COMPILED if published else Ending.FOUND
                return JobOutcome(job=job, ending=ending, cpu_s=cpu_s, wall_s=wall_s)
        except (ArtifactInvalid, CompilerUnavailable) as error:
            retryable = isinstance(error, ServerFailed)
            return JobOutcome(job=job, ending=Ending.FAILED, text=str(error), retryable=retryable)
        except OSError as error:
            return JobOutcome(job=job, ending=Ending.FAILED, text=_advice(error, self.root), retryable=True)

    async def adopt(self, job: Job, source: Path) -> JobOutcome:
        """Publishes here what the root `source` holds under the job's key. Raises `SourceGone`, no more."""
        try:
            return await in_thread(self._adopt, job, source)
        except (ArtifactInvalid, CompilerUnavailable) as error:
            return JobOutcome(job=job, ending=Ending.FAILED, text=str(error))
        except OSError as error:
            return JobOutcome(job=job, ending=Ending.FAILED, text=_advice(error, self.root), retryable=True)

    def _adopt(self, job: Job, source: Path) -> JobOutcome:
        if self._make_way(job):
            return JobOutcome(job=job, ending=Ending.FOUND)
        with self._staging.entry(job.key) as entry:
            staged = self._compiler.staged_entry(job.key, entry)
            staged.parent.mkdir(parents=True, exist_ok=True)
            try:
                if self._compiler.state(job.key, source) is not EntryState.PUBLISHED:
                    raise SourceGone
                shutil.copytree(
                    self._compiler.entry_path(job.key, source), staged, copy_function=_link_or_copy
                )
            except (FileNotFoundError, shutil.Error) as error:
                if self._compiler.state(job.key, source) is EntryState.PUBLISHED:
                    raise OSError(errno.EIO, str(error), str(self.root)) from error
                raise SourceGone from error
            published = self._finish(job, entry)
            return JobOutcome(job=job, ending=Ending.COMPILED if published else Ending.FOUND)

    def _finish(self, job: Job, entry: Path) -> bool:
        self._compiler.verify(job, entry)
        return self._compiler.publish(job, entry, self.root)

    def _make_way(self, job: Job) -> bool:
        """Whether the engine finds the key already; what it would fail on is moved out of its way.

        We hold the key, so nobody published since.
        """
        own = self.root == self._compiler.cache_root()
        state = self._compiler.look_up(job.key) if own else self._compiler.state(job.key, self.root)
        if state is EntryState.CORRUPT:
            with contextlib.suppress(FileNotFoundError):
                self._quarantined(quarantine(self.root, self._compiler.entry_path(job.key, self.root)))
        return state is EntryState.PUBLISHED


async def in_thread(
    function: Callable[Parameters, T], *arguments: Parameters.args, **options: Parameters.kwargs
) -> T:
    """The function's result, computed beside the event loop; a cancellation takes effect when it is done."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # Seen, so that the loop does not complain of an error that nobody fetched.
        work.exception()
        raise cancelled
    return work.result()


def _link_or_copy(source: str, target: str) -> object:
    """A second name for what is large; a copy where that cannot be had, and of what is rewritten later."""
    if source.endswith(LINKED_SUFFIX):
        with contextlib.suppress(OSError):
            os.link(source, target)
            return target
    return shutil.copy2(source, target)


def _advice(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(root)
    return f"{root}: {error}"


def _no_space(root: Path) -> str:
    return f"no space left for {root}: free some, or name another directory; what is published stays"
