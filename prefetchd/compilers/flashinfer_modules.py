"""FlashInfer's modules: whole libraries that it builds with ninja, made for its own directories.

At a module's first use the library writes a build file and has ninja look; where ninja finds nothing to do,
the library that lies there is loaded. So a published module is one in whose directory ninja has nothing to
do for the build file that the engine would write, and that is how `state` judges it, by asking ninja. The
subtle rule: the directory appears by one rename, behind the sources that it was built from. Where something
else lies under the name, the library's own lock says whether an engine is building there; if none is, it is
put aside.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.base import (
    ArtifactInvalid,
    Capture,
    CompilerUnavailable,
    EntryState,
    Job,
    NotRebuildable,
)
from prefetchd.compilers.cute_dsl import allow_cuda_after_fork
from prefetchd.compilers.cute_dsl_modes import Miss
from prefetchd.compilers.cute_dsl_own_cache import Met, OwnCache
from prefetchd.compilers.flashinfer_build import (
    build,
    build_environment,
    describe_again,
    manifest_in,
    move_sources,
    root_of,
    settle,
)
from prefetchd.compilers.flashinfer_calls import KeyText, Module, check, digest_of
from prefetchd.compilers.flashinfer_place import BASE_VARIABLE, BELOW_BASE, base_directory
from prefetchd.compilers.flashinfer_specs import intercepted, module_of
from prefetchd.compilers.flashinfer_standin import stand_in_for
from prefetchd.compilers.ninja_logs import up_to_date
from prefetchd.compilers.nvcc import find_nvcc
from prefetchd.config import FLASHINFER_CACHE_VARIABLE, REAL_NVCC_VARIABLE
from prefetchd.cute.calls import Undescribable
from prefetchd.elf import NotAnElf, check_library
from prefetchd.null_device.forks import survive_forks
from prefetchd.shapelog import Record
from prefetchd.store import publish_directory, quarantine
from prefetchd.targets import Target

DISTRIBUTIONS = ("flashinfer-python", "torch", "apache-tvm-ffi")
# Any nvcc: the library takes what it finds.
ANY_RELEASE = (0, 0)


class FlashInferModules(OwnCache[Module]):
    """The compiler behind FlashInfer's directory of modules. `environment` is the engine's.

    A machine without FlashInfer is no failure: then nothing is found. Constructing one imports nothing.
    """

    name = "flashinfer_modules"
    kind = Module
    usual_seconds = 90.0
    cache_variable = FLASHINFER_CACHE_VARIABLE

    def __init__(self, target: Target, environment: Mapping[str, str]) -> None:
        super().__init__(target, environment)
        self._base = base_directory(environment)
        self._root = self._base.joinpath(*BELOW_BASE)
        self._environment = dict(environment)

    def fingerprint(self) -> Mapping[str, str]:
        """See `Compiler`. What else enters a module's build file is in its key."""
        found = {}
        for name in DISTRIBUTIONS:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
        if DISTRIBUTIONS[0] not in found:
            return {}
        # The library does not know ours.
        library = {name: value for name, value in self._environment.items() if name != REAL_NVCC_VARIABLE}
        with contextlib.suppress(CompilerUnavailable):
            nvcc = find_nvcc(library, minimum=ANY_RELEASE, compiler_variables=())
            found["nvcc"] = nvcc.version_text
        found |= {"architecture": self.architecture, "root": str(self._root)}
        return {f"{self.name}.{name}": value for name, value in found.items()}

    def prepare(self, scratch: Path) -> None:
        """See `Compiler`."""
        if self.fingerprint():
            if os.environ.get(FLASHINFER_CACHE_VARIABLE):
                # The library reads its own when it is imported.
                os.environ[BASE_VARIABLE] = str(self._base)
            survive_forks()

    @contextlib.contextmanager
    def capture(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`."""
        modules = Met(scratch / "flashinfer.modules", Module, self.job)

        def meet(spec: Any) -> Any:
            modules.add(module_of(spec))
            return stand_in_for(spec)

        with _watched(meet):
            yield modules

    @contextlib.contextmanager
    def forbid(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`. What the engine would find in its directory is loaded from there."""
        missed = Met(scratch / "flashinfer.missed", Module, self.job)

        def meet(spec: Any) -> Any:
            module = module_of(spec)
            if self.state(module.key, self._root) is not EntryState.PUBLISHED:
                missed.add(module)
                raise Miss(f"FlashInfer would build {spec.name}: {self.entry_path(module.key, self._root)}")
            return spec.load(_library(module.key, self._root))

        with _watched(meet):
            yield missed

    def modules(self, jobs: Iterable[Job]) -> frozenset[str]:
        """See `ForkedCompiler`."""
        calls = (self.kernel(job).call for job in jobs)
        return frozenset(call.module for call in calls if call is not None)

    def compile_here(self, job: Job, staging: Path) -> None:
        """See `ForkedCompiler`."""
        allow_cuda_after_fork()
        # Links are resolved in what the library writes.
        made = describe_again(self.kernel(job), staging.resolve())
        try:
            build(self._ninja(), made)
        except OSError as error:
            raise CompilerUnavailable(f"{job.key}: ninja cannot be started: {error}") from error
        made.rename(self.staged_entry(job.key, staging))

    def verify(self, job: Job, staging: Path) -> None:
        """See `Compiler`."""
        entry = self.staged_entry(job.key, staging)
        try:
            old = root_of(entry)
            if digest_of(manifest_in(entry), (old, self._root.resolve())) != _digest(job.key):
                raise ArtifactInvalid(f"{job.key}: its build file is not the one the engine would write")
            check_library(entry / _library(job.key, old).name)
        except (FileNotFoundError, ValueError) as error:
            raise ArtifactInvalid(f"{job.key}: {error}") from error
        if str(self.target.capability) not in _architectures(job.key):
            raise ArtifactInvalid(f"{job.key}: it is not for sm_{self.target.capability}")

    def entry_path(self, key: str, root: Path) -> Path:
        """See `Compiler`. Raises `ValueError` for what is no key, above all for a path."""
        return root / msgspec.convert(key, KeyText).rpartition("@")[0]

    def state(self, key: str, root: Path) -> EntryState:
        """See `Compiler`."""
        try:
            return self._judge(key, root)
        except OSError:
            return EntryState.MISSING

    def _judge(self, key: str, root: Path) -> EntryState:
        """As `state`. Raises `OSError` where it cannot be told: without ninja, or room for its copies."""
        directory = self.entry_path(key, root)
        try:
            if digest_of(manifest_in(directory), (root.resolve(),)) != _digest(key):
                return EntryState.MISSING
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return EntryState.MISSING
        if not up_to_date(self._ninja(), directory, build_environment(self._environment)):
            # Half of a build as well: the library goes on with that, or is about to.
            return EntryState.MISSING
        try:
            check_library(_library(key, root))
        except NotAnElf:
            return EntryState.CORRUPT
        return EntryState.PUBLISHED

    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        """See `Compiler`."""
        entry, final = self.staged_entry(job.key, staging), self.entry_path(job.key, root)
        # The library writes paths without links.
        old, new = root_of(entry), root.resolve()
        try:
            if not move_sources(entry, old, new):
                return False
            settle(self._ninja(), entry, old, new, self._environment)
        except ValueError as error:
            raise ArtifactInvalid(f"{job.key}: {error}; FlashInfer would build it again") from error
        if not _holds_something(final) or self._judge(job.key, root) is EntryState.PUBLISHED:
            return publish_directory(entry, final)
        # An engine that comes now waits for this lock, so it is held no longer than it takes to move both.
        with _library_is_idle(final) as idle:
            if idle and self._judge(job.key, root) is not EntryState.PUBLISHED:
                with contextlib.suppress(FileNotFoundError):
                    quarantine(root, final)
            return publish_directory(entry, final)

    def rebuild(self, record: Record) -> Job:
        """See `Compiler`. Only the library's own generators are accepted, with plain arguments."""
        module = self.recorded(record, "the generator was not kept; the engine builds this module")
        if module.key != record.key:
            raise NotRebuildable(f"rebuild.key: {module.key!r} is not the record's")
        if module.call is None:
            raise NotRebuildable(f"rebuild.call: absent: {module.refused or 'the generator was not kept'}")
        try:
            check(module.call)
        except Undescribable as error:
            raise NotRebuildable(f"rebuild.call: {error}") from error
        return self.job(module)

    def _ninja(self) -> str:
        """The one that the library would start."""
        found = shutil.which("ninja", path=self._environment.get("PATH"))
        if found is None:
            raise FileNotFoundError("ninja is not on PATH, where FlashInfer looks for it; install it")
        return found


@contextlib.contextmanager
def _watched(meet: Callable[[Any], Any]) -> Iterator[None]:
    allow_cuda_after_fork()
    with intercepted(meet):
        yield


@contextlib.contextmanager
def _library_is_idle(directory: Path) -> Iterator[bool]:
    """Holds the library's lock of a module, if no process is building it. Raises `OSError`."""
    lock = directory.parent / "tmp" / f"{directory.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(file)


def _holds_something(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def _library(key: str, root: Path) -> Path:
    directory = root / key.rpartition("@")[0]
    return directory / f"{directory.name}.so"


def _digest(key: str) -> str:
    return key.rpartition("@")[2]


def _architectures(key: str) -> list[str]:
    """The numbers of those a module is for, from its directory: `90a`, `100a_103a`."""
    return re.findall(r"(\d+)[a-z]?", key.split("/")[1])
