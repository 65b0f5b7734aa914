"""Triton: a kernel's variant is recorded where it is asked for and compiled by the library itself elsewhere.

A look-up that is listened to (`triton_capture.py`) gives the library's own key and what rebuilds the variant.
To compile one, a worker forked from a process that has imported the kernel's module replays that record by
`JITFunction.preload`, with the cache in a staging directory; whole groups are then published by one rename.

The subtle rule: the key is not ours to compute, only to compare. A worker whose library arrives at another
key than the recorded one would fill a directory that no engine looks into; it stops before it compiles and
says which ingredient differs.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.base import (
    ArtifactInvalid,
    Capture,
    CompilerUnavailable,
    EntryState,
    ForkedCompiler,
    Job,
    NotRebuildable,
    target_architecture,
)
from prefetchd.compilers.triton_cache import (
    Incomplete,
    Unusable,
    check_entry,
    digest_of,
    entry_state,
    metadata_of,
    publish_entry,
    reader,
    relocate,
    writer,
)
from prefetchd.compilers.triton_capture import Miss, Variant, intercept
from prefetchd.compilers.triton_helpers import LEFT_TO_THE_ENGINE, build_helpers, publish_helpers
from prefetchd.compilers.triton_keys import process_fingerprint
from prefetchd.compilers.triton_records import find_function, modules_of, variant_of
from prefetchd.compilers.triton_results import Answers
from prefetchd.compilers.triton_winners import Tunings
from prefetchd.config import LIBCUDA_DIR_VARIABLE
from prefetchd.null_device.forks import survive_forks
from prefetchd.shapelog import Record
from prefetchd.targets import Target
from prefetchd.winners import Given, Tuning

CACHE_VARIABLE = "TRITON_CACHE_DIR"
HOME_VARIABLE = "TRITON_HOME"
# With one of these an engine does not look into the cache directory, or not only there.
DEFEATING = {
    "TRITON_ALWAYS_COMPILE": "compiles every kernel again, whatever the cache holds",
    "TRITON_KERNEL_OVERRIDE": "replaces compiled kernels by files of the user's",
    "TRITON_INTERPRET": "interprets kernels and compiles none",
}
CACHE_MANAGER_VARIABLE = "TRITON_CACHE_MANAGER"


class Triton(ForkedCompiler):
    """The compiler behind the installed Triton, for one target.

    `environment` is the engine's: which cache it uses is read from it; the variables that enter a key are
    read by the library from the environment of the process that traces or compiles, which must be the same.
    An autotuner's candidates are all compiled unless `use_winners` knows better. Constructing one raises
    `CompilerUnavailable` and does not import Triton.
    """

    name = "triton"
    cache_variable = CACHE_VARIABLE

    def __init__(self, target: Target, environment: Mapping[str, str]) -> None:
        self.target = target
        self._given = Given()
        self._environment = dict(environment)
        _refuse_defeated_cache(environment)
        self._root = find_root(environment)
        self._libcuda_dirs = tuple(filter(None, environment.get(LIBCUDA_DIR_VARIABLE, "").split(":")))

    def fingerprint(self) -> Mapping[str, str]:
        """See `Compiler`. Imports Triton; raises `CompilerUnavailable` without it."""
        try:
            process = self._process
        except ImportError as error:
            raise CompilerUnavailable(f"Triton's kernels need triton: {error}; install it") from error
        return {
            **process,
            "triton.root": str(self._root),
            "triton.architecture": target_architecture(self.target),
        }

    def prepare(self, scratch: Path) -> None:
        """See `Compiler`. Starts the library's driver, so that forked children find it started."""
        # What the library builds for itself here (a module with the null device's libcuda) is of no use to
        # an engine.
        os.environ[CACHE_VARIABLE] = str(scratch / "triton")
        try:
            # In this order, as every kernel library does; Triton's driver needs torch.
            import torch  # noqa: F401
            import triton
        except ImportError as error:
            raise CompilerUnavailable(
                f"Triton kernels need torch and triton: {error}; install them"
            ) from error
        found = triton.runtime.driver.active.get_current_target()
        if found.backend != "cuda" or found.arch != self.target.capability:
            raise CompilerUnavailable(
                f"Triton finds the device {found.backend}:{found.arch} while {self.target.name} is "
                f"cuda:{self.target.capability}; its kernels would be made for the wrong one"
            )
        self.fingerprint()
        survive_forks()

    def cache_root(self) -> Path:
        """See `Compiler`."""
        return self._root

    @contextlib.contextmanager
    def capture(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`."""
        captured = _Captured(self, scratch / "triton.variants", self._tunings(scratch))
        with _library_at_work(scratch), intercept(captured.add, captured.met):
            yield captured

    @contextlib.contextmanager
    def forbid(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`. The library itself loads what it finds; nothing is launched."""
        missed = _Captured(self, scratch / "triton.misses", self._tunings(scratch))

        def meet(key: str, variant: Variant, source: Any) -> object:
            if self.look_up(key) is EntryState.PUBLISHED:
                return reader(self.entry_path(key, self._root))
            missed.add(key, variant, source)
            raise Miss(f"{variant.module}.{variant.name} is not in {self._root} under {key}")

        with _library_at_work(scratch), intercept(meet, missed.met):
            yield missed

    def use_winners(self, given: Given) -> None:
        """See `TunedCompiler`."""
        self._given = given

    def _tunings(self, scratch: Path) -> Tunings:
        return Tunings(scratch / "triton.tunings", Answers(self._given, self.target, self._root))

    def modules(self, jobs: Iterable[Job]) -> frozenset[str]:
        """See `ForkedCompiler`."""
        return frozenset(module for job in jobs for module in modules_of(payload_of(job)))

    def rebuild(self, record: Record) -> Job:
        """See `Compiler`. Imports Triton, and no kernel."""
        try:
            here = self._process
        except ImportError as error:
            raise NotRebuildable(f"Triton's kernels need triton: {error}; install it") from error
        return self.job(record.key, variant_of(record, self.target.capability, here, self._environment))

    @cached_property
    def _process(self) -> dict[str, str]:
        return process_fingerprint(self.target.capability)

    def compile_here(self, job: Job, staging: Path) -> None:
        """See `ForkedCompiler`."""
        recorded = payload_of(job)
        self._check_architecture(job.key, recorded)
        cache = staging / "cache"
        sources: list[Any] = []

        def meet(key: str, here: Variant, source: Any) -> object:
            if key != job.key:
                reasons = "; ".join(recorded.parts.differences(here.parts)) or "by nothing that is recorded"
                raise CompilerUnavailable(
                    f"{recorded.name}: the engine looks for it under {job.key}, here it would be compiled "
                    f"as {key}; what differs: {reasons}"
                )
            sources.append(source)
            return writer(cache / key)

        function = find_function(recorded)
        with _library_at_work(staging), intercept(meet):
            function.preload(recorded.specialization)
            metadata = metadata_of(cache / job.key)
            build_helpers(sources[0], metadata, cache, self._root, self._libcuda_dirs)

    def verify(self, job: Job, staging: Path) -> None:
        """See `Compiler`."""
        try:
            check_entry(staging / "cache" / job.key, self.target.capability)
        except (Incomplete, Unusable) as error:
            raise ArtifactInvalid(f"{job.key}: {error}") from error

    def staged_entry(self, key: str, staging: Path) -> Path:
        """See `Compiler`. The library itself names it."""
        return staging / "cache" / key

    def entry_path(self, key: str, root: Path) -> Path:
        """See `Compiler`. Raises `ValueError` for what is no key, above all for a path."""
        digest_of(key)
        return root / key

    def state(self, key: str, root: Path) -> EntryState:
        """See `Compiler`."""
        return entry_state(self.entry_path(key, root), self.target.capability)

    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        """See `Compiler`."""
        final, entry = self.entry_path(job.key, root), staging / "cache" / job.key
        relocate(entry, final)
        published = publish_entry(entry, final)
        publish_helpers(staging / "cache", job.key, root)
        return published

    def notes(self) -> tuple[str, ...]:
        """See `Compiler`."""
        return () if self._libcuda_dirs else (LEFT_TO_THE_ENGINE,)

    def job(self, key: str, variant: Variant) -> Job:
        """The job that compiles a variant. Raises `CompilerUnavailable` for one of another architecture."""
        self._check_architecture(key, variant)
        return Job(compiler=self.name, key=key, payload=msgspec.msgpack.encode(variant), cost=variant.seconds)

    def _check_architecture(self, key: str, variant: Variant) -> None:
        """Triton 3.6 would replay it on any device, into a variant of neither architecture."""
        if variant.parts.architecture != self.target.capability:
            raise CompilerUnavailable(
                f"{key}: {variant.name} was recorded for sm_{variant.parts.architecture} and "
                f"{self.target.name} is {target_architecture(self.target)}; record it on that target"
            )


class _Record(msgspec.Struct, frozen=True):
    key: str
    variant: Variant


class _Captured:
    """Variants met so far, each once, kept in a file as well: a successor of a crashed trace goes on."""

    def __init__(self, compiler: Triton, path: Path, met: Tunings) -> None:
        self.met = met
        self._compiler = compiler
        self._variants: dict[str, Variant] = {}
        self._path = path
        # The last line may be half a record: a crash came while it was written.
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
            record = msgspec.json.decode(line, type=_Record)
            self._variants[record.key] = record.variant

    def add(self, key: str, variant: Variant, _source: Any) -> None:
        if key not in self._variants:
            self._variants[key] = variant
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(_Record(key, variant)) + b"\n")

    def jobs(self) -> list[Job]:
        return [self._compiler.job(key, variant) for key, variant in self._variants.items()]

    def tunings(self) -> list[Tuning]:
        return self.met.all()


def payload_of(job: Job) -> Variant:
    """The payload of one of this compiler's jobs."""
    return msgspec.msgpack.decode(job.payload, type=Variant)


def find_root(environment: Mapping[str, str]) -> Path:
    """Where an engine with this environment looks, absolute. Raises `CompilerUnavailable`."""
    value = environment.get(CACHE_VARIABLE)
    if value is None:
        home = environment.get(HOME_VARIABLE, environment.get("HOME"))
        if home is None:
            home = _home_of_user()
        if not Path(home).is_absolute():
            raise CompilerUnavailable(
                f"{HOME_VARIABLE} or HOME is {home!r} and {CACHE_VARIABLE} is unset, so Triton's cache would "
                f"depend on the working directory. Set {CACHE_VARIABLE}, here and in the engine"
            )
        return Path(home) / ".triton" / "cache"
    if not Path(value).is_absolute():
        raise CompilerUnavailable(
            f"{CACHE_VARIABLE}={value!r} is not an absolute path: the engine would look elsewhere than we "
            "write. Set it to an absolute directory, here and in the engine"
        )
    return Path(value)


def _home_of_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def _refuse_defeated_cache(environment: Mapping[str, str]) -> None:
    for name, effect in DEFEATING.items():
        if environment.get(name, "").lower() in ("1", "true", "on", "yes", "y"):
            raise CompilerUnavailable(
                f"{name}={environment[name]} {effect}, so nothing can be made ahead. Unset {name}, here and "
                "in the engine"
            )
    if manager := environment.get(CACHE_MANAGER_VARIABLE):
        raise CompilerUnavailable(
            f"{CACHE_MANAGER_VARIABLE}={manager} keeps kernels elsewhere than in {CACHE_VARIABLE}, and only "
            f"that is known here. Unset {CACHE_MANAGER_VARIABLE}, here and in the engine"
        )


@contextlib.contextmanager
def _library_at_work(scratch: Path) -> Iterator[None]:
    """What the library writes beside kernels goes to `scratch`."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(scratch / "triton")
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE_VARIABLE]
        else:
            os.environ[CACHE_VARIABLE] = before
