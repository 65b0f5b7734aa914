"""The whole of a replay: logs merged, requests traced, the rest rebuilt, all of it compiled and proved.

The order is `warm`'s, and so are its parts. The subtle rule is which of two ways is taken for a record that
has both: its request, traced by the library that is installed here, is right for any version; the means to
rebuild it without a provider are good under one fingerprint only, and are used where the trace did not reach
the record's key. So replay works with all of the provider packages absent, and with a newer library too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec

from prefetchd.compilers import COMPILERS, load_compiler
from prefetchd.compilers.base import Compiler, CompilerUnavailable, EntryState, Job
from prefetchd.compilers.triton_results import given_for
from prefetchd.config import Settings
from prefetchd.cores import usable_cores
from prefetchd.coverage import Problem
from prefetchd.executors import open_executors
from prefetchd.pipeline import Ending, JobOutcome, compile_all
from prefetchd.progress import Progress
from prefetchd.provider import Provider
from prefetchd.replaying.interruptible import interruptible
from prefetchd.replaying.report import Replayed
from prefetchd.replaying.selection import (
    KeyId,
    Rebuilder,
    Room,
    Traceable,
    left_alone,
    split,
    traceable,
    with_cost,
)
from prefetchd.replaying.winners import COMPILER as TUNED
from prefetchd.replaying.winners import seed, tunings_of, winners_beside, without_rivals
from prefetchd.shapelog import Merged, Record, log_files
from prefetchd.targets import Target
from prefetchd.trace import Failure, Mode, Report
from prefetchd.tracer import Tracer
from prefetchd.warm import Site, trace_all
from prefetchd.winners import Tuning, Winner

# Logs that are read within the two seconds after which a person is told what happens.
SHOWN_BYTES = 8 << 20


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay, for which target."""

    target_name: str
    target: Target
    # Files, and directories of logs.
    logs: tuple[Path, ...]


async def replay(
    plan: ReplayPlan,
    providers: Mapping[str, Provider],
    settings: Settings,
    environment: Mapping[str, str],
    progress: Progress,
) -> Replayed:
    """Replays what can be. Raises `LogUnusable`, `HelperFailed`, `StoreUnwritable`.

    Cancelling it ends every process it started and keeps what is published.
    """
    return await _Replay(plan, providers, settings, environment, progress).run()


class _Replay:
    """One run, and what it has found so far."""

    def __init__(
        self,
        plan: ReplayPlan,
        providers: Mapping[str, Provider],
        settings: Settings,
        environment: Mapping[str, str],
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._providers = providers
        self._settings = settings
        self._environment = environment
        self._progress = progress
        self._slots = settings.jobs or usable_cores()
        self._compilers: dict[str, Compiler] = {}
        self._unavailable: dict[str, str] = {}
        self._rebuilder = Rebuilder(plan.target, self._compiler, environment)
        # By key what an engine's own compile of it took.
        self._seconds: dict[KeyId, float] = {}
        self._jobs: dict[KeyId, Job] = {}
        self._traced: set[KeyId] = set()
        self.replayed = Replayed(target=plan.target_name)

    async def run(self) -> Replayed:
        """See `replay`."""
        replayed = self.replayed
        winners = winners_beside(self._plan.logs, replayed.notes)
        asked, rest = split(await self._records(), self._providers, self._environment)
        sites = traceable(asked)
        replayed.requests = sum(len(site.sweep) for site in sites)
        if sites:
            async with self._tracer(sites, winners) as tracer:
                traced = await self._trace(tracer, sites, "capture")
                self._take(traced)
                await self._rebuild([*self._unreached(sites, traced), *rest])
                self._count_failed(sites, traced)
                tunings = await self._tunings(winners, traced)
                await self._compile()
                # Before the proof, which then chooses as the engine will, from the same files.
                self._seed(winners, tunings)
                self._count_missed(traced, await self._trace(tracer, sites, "forbid"))
        else:
            await self._rebuild(rest)
            tunings = await self._tunings(winners, [])
            await self._compile()
            self._seed(winners, tunings)
        refused = self._rebuilder.refused
        replayed.foreign, replayed.refused = self._rebuilder.foreign, refused.count
        replayed.problems += refused.problems
        replayed.rebuilt = len(self._rebuilder.jobs)
        return replayed

    # The records.

    async def _records(self) -> list[Record]:
        """All that are worth a look, the dearest first."""
        replayed = self.replayed
        files = log_files(self._plan.logs)
        replayed.logs = [str(path) for path in files]
        size = sum(path.stat().st_size for path in files)
        with self._progress.phase("read", size >> 20) if size > SHOWN_BYTES else nullcontext() as advance:
            merged, records = await interruptible(lambda check: self._read(files, check, advance))
        replayed.unreadable = merged.problems.count
        replayed.problems += [
            Problem(what="a line", kind="unreadable", text=text) for text in merged.problems.first
        ]
        replayed.left_out += merged.left_out
        return records

    def _read(
        self, files: list[Path], check: Callable[[], None], advance: Callable[[str], None] | None
    ) -> tuple[Merged, list[Record]]:
        done = 0

        def read(size: int) -> None:
            nonlocal done
            check()
            before, done = done, done + size
            for _ in range((done >> 20) - (before >> 20)):
                if advance is not None:
                    advance("MiB of logs")

        merged, room = Merged(files, read), Room()
        records = []
        for record in merged:
            check()
            self.replayed.records += 1
            left = left_alone(record)
            if left is not None:
                setattr(self.replayed, left, getattr(self.replayed, left) + 1)
            elif room.takes(record):
                records.append(record)
                self.replayed.engine_s += record.seconds
                if record.key:
                    identity = (record.compiler, record.key)
                    self._seconds[identity] = max(self._seconds.get(identity, 0.0), record.seconds)
        self.replayed.left_out += room.left_out
        return merged, records

    async def _rebuild(self, records: Iterable[Record]) -> None:
        def rebuild(check: Callable[[], None]) -> None:
            for record in records:
                check()
                self._rebuilder.add(record)

        await interruptible(rebuild)
        for identity, job in self._rebuilder.jobs.items():
            self._jobs.setdefault(identity, job)

    def _compiler(self, name: str) -> Compiler:
        """Raises `CompilerUnavailable`, each time with the same reason."""
        if name in self._unavailable:
            raise CompilerUnavailable(self._unavailable[name])
        if name not in self._compilers:
            try:
                if name not in COMPILERS:
                    raise CompilerUnavailable(f"this prefetchd has no compiler {name[:64]!r}; upgrade it")
                compiler = load_compiler(name, self._plan.target, self._environment)
                # A missing tool is found here, once, and not at every record.
                compiler.fingerprint()
            except CompilerUnavailable as error:
                self._unavailable[name] = str(error)
                raise
            self._compilers[name] = compiler
            self.replayed.notes += compiler.notes()
        return self._compilers[name]

    # Traces.

    def _tracer(self, sites: Iterable[Traceable], winners: tuple[Winner, ...]) -> Tracer:
        return Tracer(
            self._plan.target,
            tuple(dict.fromkeys(site.provider for site in sites)),
            self._environment,
            parallel=self._slots,
            timeout_s=self._settings.trace_timeout_s,
            given=given_for(self._environment, winners or None),
        )

    async def _trace(self, tracer: Tracer, sites: Sequence[Traceable], mode: Mode) -> list[Report]:
        begun = time.perf_counter()
        places = [Site(site.provider, site.sweep) for site in sites]
        reports = await trace_all(tracer, places, mode, self._progress)
        seconds = round(time.perf_counter() - begun, 3)
        if mode == "capture":
            self.replayed.trace_s = seconds
        else:
            self.replayed.prove_s = seconds
        return reports

    def _take(self, traced: Iterable[Report]) -> None:
        for report in traced:
            for job in report.jobs:
                identity = (job.compiler, job.key)
                self._traced.add(identity)
                self._jobs[identity] = with_cost(job, self._seconds.get(identity, 0.0))

    def _unreached(self, sites: Iterable[Traceable], traced: Iterable[Report]) -> Iterator[Record]:
        """Records whose own variant the trace did not come to; where it went well, only those made here."""
        for site, report in zip(sites, traced, strict=True):
            for record in site.records:
                if (record.compiler, record.key) not in self._jobs and (
                    report.failures or self._rebuilder.is_native(record)
                ):
                    yield record

    def _count_failed(self, sites: Iterable[Traceable], traced: Iterable[Report]) -> None:
        """A trace that failed is no problem if all that it was for is known from the records."""
        for site, report in zip(sites, traced, strict=True):
            if any((record.compiler, record.key) not in self._jobs for record in site.records):
                self._uncovered(report.failures)

    def _count_missed(self, traced: Iterable[Report], proved: Iterable[Report]) -> None:
        for before, after in zip(traced, proved, strict=True):
            known = {failure.request for failure in before.failures}
            self._uncovered(each for each in after.failures if each.request not in known)

    def _uncovered(self, failures: Iterable[Failure]) -> None:
        for each in failures:
            self.replayed.uncovered += each.requests
            self.replayed.problems.append(
                Problem(what=each.request, kind=each.kind, text=each.text, requests=each.requests)
            )

    # The caches.

    async def _compile(self) -> None:
        replayed = self.replayed
        missing = []
        for job in self._jobs.values():
            if self._compiler(job.compiler).look_up(job.key) is EntryState.PUBLISHED:
                replayed.present += 1
            else:
                missing.append(job)
        replayed.variants = len(self._jobs)
        if not missing:
            return
        needed = {job.compiler for job in missing}
        compilers = {name: found for name, found in self._compilers.items() if name in needed}
        begun = time.perf_counter()
        with self._progress.phase("compile", len(missing)) as advance:

            def done(outcome: JobOutcome) -> None:
                self._count(outcome)
                advance(outcome.job.key)

            async with open_executors(
                compilers,
                self._plan.target,
                self._providers,
                self._environment,
                self._settings,
                self._slots,
            ) as executors:
                await compile_all(
                    missing,
                    compilers,
                    executors,
                    slots=self._slots,
                    done=done,
                    quarantined=lambda path: replayed.quarantined.append(str(path)),
                )
        replayed.compile_wall_s = round(time.perf_counter() - begun, 3)

    def _count(self, outcome: JobOutcome) -> None:
        replayed = self.replayed
        replayed.compile_cpu_s += outcome.cpu_s
        if outcome.ending is Ending.COMPILED:
            replayed.compiled += 1
        elif outcome.ending is Ending.FOUND:
            replayed.present += 1
        else:
            replayed.failed += 1
            replayed.problems.append(Problem(what=outcome.job.key, kind="compile", text=outcome.text))

    # Winners.

    async def _tunings(self, winners: tuple[Winner, ...], traced: Iterable[Report]) -> list[Tuning]:
        """The tunings whose winners may be known; what lost in them is compiled by nobody from now on."""
        met = [tuning for report in traced for tuning in report.tunings]
        if not winners and not met:
            return []
        try:
            root = self._compiler(TUNED).cache_root()
        except CompilerUnavailable as error:
            self.replayed.notes.append(f"winners are not seeded: {error}")
            return []
        answer = await tunings_of(winners, met, self._plan.target, self._environment)
        self.replayed.notes += answer.notes
        # What a trace has asked for was chosen by the same winners already.
        rebuilt = {identity: job for identity, job in self._jobs.items() if identity in self._rebuilder.jobs}
        kept = without_rivals(rebuilt, answer.tunings, winners, self._plan.target, self._environment, [root])
        for identity in rebuilt.keys() - kept.keys() - self._traced:
            del self._jobs[identity]
            self.replayed.rivals += 1
        return answer.tunings

    def _seed(self, winners: tuple[Winner, ...], tunings: Sequence[Tuning]) -> None:
        if not tunings:
            return
        root = self._compiler(TUNED).cache_root()
        seeded = seed(winners, tunings, self._plan.target, self._environment, [root])
        self.replayed.notes += seeded.notes
        if seeded.figures is not None:
            self.replayed.winners = seeded.figures
