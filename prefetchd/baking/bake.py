"""`prefetchd bake`: an engine's kernels, named by itself, compiled in parallel and proved, with no GPU.

The engine is started twice on the null device. The first start names every variant that its warm-up and the
given batches launch, and compiles none; they are then compiled and published where the engine will look. The
second start must find all of them, since it may not compile. The subtle rule is the order of trust: the
manifest says what was published by looking at the disk, and what is proved by the second start, never by what
was intended.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from prefetchd.baking.engine import EngineFailed, run_engine
from prefetchd.baking.manifest import Artifact, Manifest, size_of, unanswered_calls
from prefetchd.baking.order import Answer, Order, Phase, answer_fields, write_order
from prefetchd.baking.places import engine_environment, served_environment
from prefetchd.compilers import load_compiler
from prefetchd.compilers.base import Compiler, CompilerUnavailable, EntryState, Job
from prefetchd.config import NULL_CALLS_VARIABLE, Settings
from prefetchd.cores import usable_cores
from prefetchd.coverage import Problem
from prefetchd.executors import open_executors
from prefetchd.pipeline import Ending, JobOutcome, compile_all
from prefetchd.progress import Progress
from prefetchd.targets import Target

# Those whose variants an engine names on the null device.
COMPILERS = ("deep_jit", "triton", "flashinfer_modules", "cute_dsl")
NOT_BAKED = "not baked: what torch.compile makes (it is off in a bake); the engine makes it when it is served"


class BakePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to bake."""

    target_name: str
    target: Target
    command: tuple[str, ...]
    batches: tuple[tuple[int, ...], ...]
    steps: int
    timeout_s: float
    # Where the private directories are kept for whoever wants to look; unset, they are removed.
    keep: Path | None = None


async def bake(
    plan: BakePlan, settings: Settings, environment: Mapping[str, str], progress: Progress
) -> Manifest:
    """The whole of it. Raises `EngineFailed`, `CompilerUnavailable`, `StoreUnwritable`, `NullDeviceBroken`.

    Cancelling it ends every process it started and keeps what is published.
    """
    place = Path(tempfile.mkdtemp(prefix="prefetchd-bake-")) if plan.keep is None else plan.keep.absolute()
    try:
        return await _Bake(plan, settings, environment, progress, place).run()
    finally:
        if plan.keep is None:
            shutil.rmtree(place, ignore_errors=True)


class _Bake:
    def __init__(
        self,
        plan: BakePlan,
        settings: Settings,
        environment: Mapping[str, str],
        progress: Progress,
        place: Path,
    ) -> None:
        self._plan, self._settings, self._progress, self._place = plan, settings, progress, place
        self._base = dict(environment)
        self._served = served_environment(environment)
        self._compilers: dict[str, Compiler] = {}
        self._calls: list[Path] = []
        self._manifest = Manifest(
            target=plan.target_name,
            gpu=plan.target.name,
            sm_count=plan.target.sm_count,
            command=list(plan.command),
            batches=[list(batch) for batch in plan.batches],
            steps=plan.steps,
            notes=[NOT_BAKED],
        )

    async def run(self) -> Manifest:
        manifest = self._manifest
        self._load_compilers()
        answers = await self._start(Phase.CAPTURE)
        self._read(answers)
        jobs: list[Job] = answer_fields(answers, "captured")
        await self._compile(jobs)
        self._list(jobs)
        try:
            missed: list[Job] = answer_fields(await self._start(Phase.PROVE), "missed")
        except EngineFailed as error:
            manifest.problems.append(Problem(what="second start", kind="uncovered", text=str(error)))
        else:
            manifest.proved = not missed
            manifest.problems += [
                Problem(
                    what=f"{job.compiler} {job.key}", kind="uncovered", text="not there when it was needed"
                )
                for job in missed
            ]
        manifest.unanswered = unanswered_calls(self._calls)
        return manifest

    def _load_compilers(self) -> None:
        reasons = []
        for name in COMPILERS:
            try:
                self._compilers[name] = load_compiler(name, self._plan.target, self._served)
            except CompilerUnavailable as error:
                reasons.append(f"{name}: {error}")
        if not self._compilers:
            raise CompilerUnavailable("; ".join(reasons))
        self._manifest.notes += reasons

    async def _start(self, phase: Phase) -> list[Answer]:
        """One start of the engine, in directories of its own."""
        plan, directory = self._plan, self._place / phase
        directory.mkdir(parents=True)
        write_order(
            directory,
            Order(
                phase=phase,
                target=plan.target,
                compilers=tuple(self._compilers),
                batches=plan.batches,
                steps=plan.steps,
                environment=self._served,
            ),
        )
        environment = engine_environment(plan.target, self._base, directory)
        self._calls.append(directory / "unanswered.txt")
        environment[NULL_CALLS_VARIABLE] = str(self._calls[-1])
        begun = time.perf_counter()
        with self._progress.phase(f"{phase} (the engine's log: {directory}/engine.log)", 1) as advance:
            answers = await run_engine(
                plan.command, environment, directory, directory / "engine.log", plan.timeout_s
            )
            advance(phase)
        self._manifest.seconds[phase] = round(time.perf_counter() - begun, 1)
        return answers

    def _read(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._manifest.fingerprints |= answer.fingerprints
            self._manifest.notes += [note for note in answer.notes if note not in self._manifest.notes]

    async def _compile(self, jobs: list[Job]) -> None:
        """Whatever the cache lacks; a failed compile is a problem, and the others go on."""
        missing = [
            job for job in jobs if self._compilers[job.compiler].look_up(job.key) is not EntryState.PUBLISHED
        ]
        self._manifest.hits = len(jobs) - len(missing)
        slots = self._settings.jobs or usable_cores()
        begun = time.perf_counter()
        executors = open_executors(
            self._compilers if missing else {}, self._plan.target, {}, self._served, self._settings, slots
        )
        with self._progress.phase("compile", len(missing)) as advance:

            def done(outcome: JobOutcome) -> None:
                self._ended(outcome)
                advance(outcome.job.key)

            async with executors as executor_of:
                await compile_all(
                    missing,
                    self._compilers,
                    executor_of,
                    slots=slots,
                    done=done,
                    quarantined=lambda path: self._manifest.notes.append(
                        f"quarantined a corrupt entry: {path}"
                    ),
                )
        self._manifest.seconds["compile"] = round(time.perf_counter() - begun, 1)

    def _ended(self, outcome: JobOutcome) -> None:
        if outcome.ending is Ending.FAILED:
            what = f"{outcome.job.compiler} {outcome.job.key}"
            self._manifest.problems.append(Problem(what=what, kind="compile", text=outcome.text))
        else:
            self._manifest.compiled += 1

    def _list(self, jobs: list[Job]) -> None:
        """What lies in the cache now, by looking."""
        manifest = self._manifest
        for job in jobs:
            compiler = self._compilers[job.compiler]
            manifest.directories[job.compiler] = str(compiler.cache_root())
            for root in compiler.roots():
                if compiler.state(job.key, root) is EntryState.PUBLISHED:
                    size = size_of(compiler.entry_path(job.key, root))
                    manifest.artifacts.append(Artifact(compiler=job.compiler, key=job.key, bytes=size))
                    break
