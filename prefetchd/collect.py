"""`prefetchd winners collect`: the winners an engine measured, with what they are valid for.

An engine's result files name neither the kernel's source nor the GPU. So the model is traced, on the null
device, and only files that a traced tuner would look up are read; the GPU is the target, which whoever calls
this vouches for. A file that nobody asks for is counted: it belongs to another model, other flags, another
Triton or another environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from prefetchd.compilers import load_compiler
from prefetchd.compilers.triton_results import RESULT_SUFFIX, ResultDamaged, read_result, result_path
from prefetchd.config import Settings
from prefetchd.cores import usable_cores
from prefetchd.coverage import Ledger, Problem
from prefetchd.progress import Progress
from prefetchd.provider import Provider
from prefetchd.targets import Target
from prefetchd.tracer import Tracer
from prefetchd.warm import WarmPlan, sites_of, trace_all
from prefetchd.winners import Tuning, Winner, configuration, merge

COMPILER = "triton"


class Collected(msgspec.Struct, kw_only=True):
    """What was found. `unmeasured` counts tunings without a result file, `unasked` files without a tuning."""

    gpu: str
    sm_count: int
    cache: str
    tunings: int = 0
    unmeasured: int = 0
    damaged: int = 0
    unasked: int = 0
    winners: list[Winner] = []
    notes: list[str] = []
    # Requests that could not be traced: their tunings are unknown.
    problems: list[Problem] = []


async def collect(
    plan: WarmPlan,
    providers: Mapping[str, Provider],
    settings: Settings,
    environment: Mapping[str, str],
    progress: Progress,
) -> Collected:
    """Traces and reads; writes nothing. Raises as `warm` does."""
    tuned = {name: provider for name, provider in providers.items() if COMPILER in provider.compilers}
    compiler = load_compiler(COMPILER, plan.target, environment)
    compiler.fingerprint()
    ledger = Ledger(plan.target_name, plan.max_tokens, dry_run=True)
    sites = sites_of(plan, tuned, ledger)
    slots = settings.jobs or usable_cores()
    async with Tracer(
        plan.target, tuple(tuned), environment, parallel=slots, timeout_s=settings.trace_timeout_s
    ) as tracer:
        reports = await trace_all(tracer, sites, "capture", progress)
    met = {tuning.identity: tuning for report in reports for tuning in report.tunings}
    found = read_all(list(met.values()), compiler.cache_root(), plan.target)
    found.problems = [
        Problem(what=each.request, kind=each.kind, text=each.text, requests=each.requests)
        for report in reports
        for each in report.failures
    ]
    return found


def read_all(tunings: list[Tuning], root: Path, target: Target) -> Collected:
    """The results of these tunings in a cache that an engine on this target has filled."""
    found = Collected(gpu=target.name, sm_count=target.sm_count, cache=str(root), tunings=len(tunings))
    for tuning in tunings:
        try:
            winner = _winner(tuning, root, target)
        except ResultDamaged as error:
            found.damaged += 1
            found.notes.append(str(error))
            continue
        if winner is None:
            found.unmeasured += 1
        else:
            found.winners.append(winner)
    found.winners = merge(found.winners)
    asked = {result_path(root, tuning) for tuning in tunings if tuning.entry}
    found.unasked = len(set(root.glob(f"*/*{RESULT_SUFFIX}")) - asked)
    return found


def _winner(tuning: Tuning, root: Path, target: Target) -> Winner | None:
    result = read_result(root, tuning)
    if result is None:
        return None
    index, timing = result
    return Winner(
        gpu=target.name,
        sm_count=target.sm_count,
        triton=tuning.triton,
        module=tuning.module,
        kernel=tuning.kernel,
        source=tuning.source,
        key=tuning.key,
        config=configuration(tuning.candidates[index]),
        timing_ms=timing,
        origin=str(root / tuning.entry),
    )
