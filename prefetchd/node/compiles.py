"""Carries out what the broker hands out: looks at the disk, compiles, copies from root to root.

Whatever happens, each piece of work gets one `End`. Nothing here decides what is done or in which order.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from prefetchd.broker.types import Check, Compile, End, Publish
from prefetchd.compilers.base import Compiler, CompilerUnavailable, EntryState
from prefetchd.node.roots import Roots
from prefetchd.node.workshop import Workshop
from prefetchd.null_device.guard import NullDeviceBroken
from prefetchd.store import StoreUnwritable
from prefetchd.tracer import HelperFailed
from prefetchd.workplace import Ending, JobOutcome, SourceGone, Workplace

log = logging.getLogger("prefetchd.daemon")

# What keeps a machine from working at all; it may be put right while the daemon runs.
MACHINE = (StoreUnwritable, HelperFailed, NullDeviceBroken, OSError)


class Compiles:
    """`quarantined` is the number of corrupt entries that were moved out of an engine's way."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self.quarantined = 0
        self.cpu_seconds = 0.0

    async def compile(self, work: Compile, workshop: Workshop) -> End:
        """Compiles the job and publishes it in its root."""

        async def steps(workplace: Workplace) -> JobOutcome:
            executor = workshop.executor(work.job.compiler, background=work.background)
            return await workplace.compile(work.job, executor)

        end = await self._work(work.job.compiler, work.job.key, work.root, workshop, steps)
        self.cpu_seconds += end.cpu_s
        return end

    async def publish(self, work: Publish, workshop: Workshop) -> End:
        """Publishes in one root what another holds."""

        async def steps(workplace: Workplace) -> JobOutcome:
            return await workplace.adopt(work.job, Path(work.source))

        return await self._work(work.job.compiler, work.job.key, work.root, workshop, steps)

    async def _work(
        self,
        compiler_name: str,
        key: str,
        path: str,
        workshop: Workshop,
        steps: Callable[[Workplace], Awaitable[JobOutcome]],
    ) -> End:
        try:
            compiler = workshop.compiler(compiler_name)
            root = self._roots.get(path, compiler.cache_variable)
            async with root.key(key):
                outcome = await steps(Workplace(compiler, root.path, root.staging, self._moved_away))
        except SourceGone:
            return End(ok=False, text=f"{key} has gone", source_gone=True)
        except CompilerUnavailable as error:
            return End(ok=False, text=str(error))
        except MACHINE as error:
            return End(ok=False, text=str(error), retryable=True)
        except Exception as error:
            # A defect of ours or of a compiler's: this job is lost, the daemon is not.
            log.exception("compiling %s", key)
            return End(ok=False, text=f"{type(error).__name__}: {error}")
        return _end(outcome)

    def _moved_away(self, path: Path) -> None:
        self.quarantined += 1
        log.warning("a corrupt entry was moved to %s", path)


def look(check: Check, compiler: Compiler, others: tuple[Path, ...]) -> bool:
    """Whether an engine that looks in the root, and then in the others, finds the key. Raises nothing."""
    if not all(part.strip(".") for part in check.key.split("/")):
        # Some compilers' keys are paths below the root; this one would lead out of it.
        return False
    try:
        return any(
            compiler.state(check.key, root) is EntryState.PUBLISHED for root in (Path(check.root), *others)
        )
    except (OSError, ValueError):
        return False


def _end(outcome: JobOutcome) -> End:
    return End(
        ok=outcome.ending is not Ending.FAILED,
        text=outcome.text,
        retryable=outcome.retryable,
        found=outcome.ending is Ending.FOUND,
        cpu_s=outcome.cpu_s,
        wall_s=outcome.wall_s,
    )
