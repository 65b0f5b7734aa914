"""`prefetchd warm`: everything a model can launch, traced, compiled, published and proved, with no GPU.

The order is the design: trace *all* shapes first (the library names its variants, nothing is compiled), look
at the cache, compile what is missing, publish each as it gets ready, and at the end run every request again
with compiling forbidden. Only what that last run serves from the cache counts as covered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from prefetchd.compilers import load_compiler
from prefetchd.compilers.base import Compiler, EntryState, Job, TunedCompiler
from prefetchd.compilers.triton_results import Answers, given_for
from prefetchd.config import Settings
from prefetchd.cores import usable_cores
from prefetchd.coverage import Coverage, Ledger, Problem
from prefetchd.executors import Executor, open_executors
from prefetchd.pipeline import JobOutcome, compile_all
from prefetchd.profiles import Profile, ProfileError, m_ranges
from prefetchd.progress import Progress
from prefetchd.protocol import REQUEST_TYPES, Sweep
from prefetchd.provider import Limits, Provider
from prefetchd.targets import Target
from prefetchd.trace import Mode, Report
from prefetchd.tracer import Tracer
from prefetchd.tuned import TuningBooks
from prefetchd.winners import Winner


class WarmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to warm: a model's profile on a target, through these providers."""

    target_name: str
    target: Target
    profile: Profile
    max_tokens: int
    dry_run: bool = False
    # Measured winners to use instead of all candidates; None when there are none to use.
    winners: tuple[Winner, ...] | None = None
    # The configuration directory of an engine that runs fla with FLA_CACHE_MODE=strict, to be filled too.
    fla_config_dir: Path | None = None


class Site(msgspec.Struct, frozen=True):
    """One sweep and who asked for it."""

    provider: str
    sweep: Sweep


async def warm(
    plan: WarmPlan,
    providers: Mapping[str, Provider],
    settings: Settings,
    environment: Mapping[str, str],
    progress: Progress,
) -> Coverage:
    """The whole warm-up. Raises `HelperFailed`, `CompilerUnavailable`, `StoreUnwritable`, `ProfileError`.

    Cancelling it ends every process it started and keeps what is published.
    """
    slots = settings.jobs or usable_cores()
    ledger = Ledger(plan.target_name, plan.max_tokens, dry_run=plan.dry_run)
    sites = sites_of(plan, providers, ledger)
    if not sites and not ledger.coverage.problems:
        raise ProfileError(
            f"{plan.profile.model}: the profile holds nothing for {', '.join(providers)}; name another "
            "--provider, or list sites under [[gemms]] or [[kernels]]"
        )
    # A family that this model does not use need not be installed.
    used = {site.provider for site in sites}
    providers = {name: provider for name, provider in providers.items() if name in used}
    names = {name for provider in providers.values() for name in provider.compilers}
    compilers = {name: load_compiler(name, plan.target, environment) for name in sorted(names)}
    for compiler in compilers.values():
        # A missing tool is found here, before any site is traced in vain.
        compiler.fingerprint()
        ledger.coverage.notes += compiler.notes()
    given = given_for(environment, plan.winners, plan.fla_config_dir)
    tuned = {
        name: TuningBooks(Answers(given, plan.target, compiler.cache_root()), compiler.cache_root(), ledger)
        for name, compiler in compilers.items()
        if isinstance(compiler, TunedCompiler)
    }
    tracer = Tracer(
        plan.target,
        tuple(providers),
        environment,
        parallel=slots,
        timeout_s=settings.trace_timeout_s,
        given=given,
    )
    # A dry run compiles nothing, so it needs nobody who could.
    executors = open_executors(
        {} if plan.dry_run else compilers, plan.target, providers, environment, settings, slots
    )
    async with executors as executor_of, tracer:
        begun = time.perf_counter()
        traced = await trace_all(tracer, sites, "capture", progress)
        for site, report in zip(sites, traced, strict=True):
            ledger.traced(site.provider, site.sweep.label(), len(site.sweep), report)
            for name in providers[site.provider].compilers:
                if name in tuned:
                    tuned[name].met(site.provider, report.tunings)
        ledger.coverage.trace_s = round(time.perf_counter() - begun, 3)
        missing = _look_up(ledger, compilers)
        progress.found(ledger.coverage, len(missing))
        if plan.dry_run:
            _close(tuned)
            return ledger.coverage
        begun = time.perf_counter()
        await _compile_all(missing, compilers, executor_of, ledger, slots, progress)
        ledger.coverage.compile_wall_s = round(time.perf_counter() - begun, 3)
        for books in tuned.values():
            # Before the proof, which then chooses as the engine will, from the same files.
            books.seed()
        _close(tuned)
        begun = time.perf_counter()
        proved = await trace_all(tracer, sites, "forbid", progress)
        for site, proof, report in zip(sites, proved, traced, strict=True):
            ledger.proved(site.provider, len(site.sweep), proof, report)
        ledger.coverage.prove_s = round(time.perf_counter() - begun, 3)
    return ledger.coverage


def _close(tuned: Mapping[str, TuningBooks]) -> None:
    for books in tuned.values():
        books.close()


def sites_of(plan: WarmPlan, providers: Mapping[str, Provider], ledger: Ledger) -> list[Site]:
    """Every sweep that the providers have for the profile. Raises `ProfileError`."""
    limits = Limits(max_tokens=plan.max_tokens, target=plan.target)
    sites = []
    for name, provider in providers.items():
        ledger.add_provider(name)
        try:
            sites += [Site(name, sweep) for sweep in provider.universe_sweeps(plan.profile, limits)]
        except ValueError as error:
            raise ProfileError(f"{plan.profile.model}: {error}") from error
    for site in plan.profile.gemms:
        if site.op not in REQUEST_TYPES:
            requests = sum(map(len, m_ranges(site, plan.profile, plan.max_tokens)))
            ledger.unknown(site.name, site.op, requests)
    return sites


async def trace_all(tracer: Tracer, sites: Sequence[Site], mode: Mode, progress: Progress) -> list[Report]:
    """A report for each site, in their order."""
    with progress.phase("trace" if mode == "capture" else "prove", len(sites)) as advance:

        async def one(site: Site) -> Report:
            report = await tracer.trace(site.provider, site.sweep, mode)
            advance(site.sweep.label())
            return report

        return list(await asyncio.gather(*(one(site) for site in sites)))


def _look_up(ledger: Ledger, compilers: Mapping[str, Compiler]) -> list[Job]:
    """The jobs whose artifact the engine would not find; a corrupt one counts as not found."""
    missing = []
    for job in ledger.jobs():
        if compilers[job.compiler].look_up(job.key) is EntryState.PUBLISHED:
            ledger.hit(job)
        else:
            missing.append(job)
    return missing


async def _compile_all(
    missing: Sequence[Job],
    compilers: Mapping[str, Compiler],
    executors: Mapping[str, Executor],
    ledger: Ledger,
    slots: int,
    progress: Progress,
) -> None:
    with progress.phase("compile", len(missing)) as advance:

        def done(outcome: JobOutcome) -> None:
            ledger.ended(outcome)
            advance(outcome.job.key)

        await compile_all(
            missing,
            compilers,
            executors,
            slots=slots,
            done=done,
            quarantined=lambda path: ledger.coverage.quarantined.append(str(path)),
        )


def uncovered_lines(coverage: Coverage) -> Iterable[str]:
    """What is left to say when not everything is covered: one line a reason, the worst first."""
    yield from _problem_lines(coverage.problems)
    for name, provider in coverage.providers.items():
        for line in _problem_lines(provider.problems):
            yield f"{name}: {line}"


def _problem_lines(problems: Iterable[Problem]) -> list[str]:
    reasons: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        reasons.setdefault((problem.kind, problem.text), []).append(problem)
    counted = [(sum(p.requests for p in same), same) for same in reasons.values()]
    lines = []
    for requests, same in sorted(counted, key=lambda item: -item[0]):
        others = f" and {len(same) - 1} more" if len(same) > 1 else ""
        count = f" ({requests} requests)" if requests > 1 else ""
        lines.append(f"{same[0].what}{others}{count}: {same[0].kind}: {same[0].text}")
    return lines
