"""FlashInfer's CuTe kernels that the library keeps on disk itself: made for its own directory and names.

FlashInfer gives each such kernel a module directory with a `meta.json`, and empties that directory when the
meta differs from what it expects. The subtle rule follows: helper and engine must have the same wheels, and
the expected meta is part of our key, so that a kernel of another version is never taken for one the engine
finds. An object appears by one link, a module by one rename, both under the library's own lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec

from prefetchd.compilers.base import (
    ArtifactInvalid,
    Capture,
    CompilerUnavailable,
    EntryState,
    Job,
    NotRebuildable,
)
from prefetchd.compilers.cute_dsl import allow_cuda_after_fork, pin_architecture
from prefetchd.compilers.cute_dsl_modes import Miss, Reached, StandIn
from prefetchd.compilers.cute_dsl_objects import check_architecture
from prefetchd.compilers.cute_dsl_own_cache import Met, OwnCache, library_lock, link
from prefetchd.compilers.flashinfer_place import BASE_VARIABLE, BELOW_BASE, base_directory
from prefetchd.config import FLASHINFER_CACHE_VARIABLE
from prefetchd.cute.artifacts import Unloadable
from prefetchd.cute.calls import Call, Undescribable, describe_current, perform
from prefetchd.cute.fingerprint import versions
from prefetchd.null_device.forks import survive_forks
from prefetchd.shapelog import Record
from prefetchd.store import publish_directory, quarantine
from prefetchd.targets import Target

SPEC_MODULE = "flashinfer.jit.cute_dsl_core"
META = "meta.json"

# Functions of the library that a record may name: those an engine calls.
ENTRY_MODULES = (
    "flashinfer.kda",
    "flashinfer.kda_decode",
    "flashinfer.gdn_prefill",
    "flashinfer.gdn_decode",
)
# Path below the cache directory: version/architectures/cached_ops/module/kernel@digest of the meta.
KeyText = Annotated[
    str,
    msgspec.Meta(
        max_length=512,
        pattern=r"^[0-9A-Za-z.+_-]+/[0-9a-z_]+/cached_ops/[0-9A-Za-z_]+/[0-9A-Za-z_]+@[0-9a-f]{16}\Z",
    ),
]


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel: its key, and the call that asks the library for it."""

    key: KeyText
    call: Call


class FlashInferCute(OwnCache[Kernel]):
    """The compiler behind FlashInfer's own cache of CuTe kernels. `environment` is the engine's.

    A machine without FlashInfer is no failure: then nothing is found. Constructing one imports nothing.
    """

    name = "flashinfer_cute"
    kind = Kernel
    usual_seconds = 10.0
    # Ours, since the library's own names the directory two levels above; the daemon sets it for a helper.
    cache_variable = FLASHINFER_CACHE_VARIABLE

    def __init__(self, target: Target, environment: Mapping[str, str]) -> None:
        super().__init__(target, environment)
        self._base = base_directory(environment)
        self._root = self._base.joinpath(*BELOW_BASE)

    def fingerprint(self) -> Mapping[str, str]:
        """See `Compiler`."""
        try:
            version = metadata.version("flashinfer-python")
        except metadata.PackageNotFoundError:
            return {}
        found = {"flashinfer": version, "root": str(self._root), "architecture": self.architecture}
        found |= versions()
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["torch"] = metadata.version("torch")
        return {f"flashinfer_cute.{name}": value for name, value in found.items()}

    def prepare(self, scratch: Path) -> None:
        """See `Compiler`."""
        if self.fingerprint():
            # The library reads it when it is imported.
            os.environ[BASE_VARIABLE] = str(self._base)
            pin_architecture(self.architecture)
            survive_forks()

    @contextlib.contextmanager
    def capture(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`."""
        kernels = Met(scratch / "flashinfer.kernels", Kernel, self.job)

        def meet(spec: Any) -> Any:
            kernels.add(_kernel_of(spec, self._root))
            return StandIn(spec.compile_fn)

        with _intercepted(meet):
            yield kernels

    @contextlib.contextmanager
    def forbid(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`. The library itself judges and loads what it finds."""
        missed = Met(scratch / "flashinfer.misses", Kernel, self.job)

        def meet(spec: Any) -> Any:
            found = spec.try_load()
            if found is None:
                missed.add(_kernel_of(spec, self._root))
                raise Miss(f"FlashInfer's {spec.name} is not in {spec.module_dir}")
            return found

        with _intercepted(meet):
            yield missed

    def modules(self, jobs: Iterable[Job]) -> frozenset[str]:
        """See `ForkedCompiler`."""
        return frozenset(self.kernel(job).call.module for job in jobs)

    def compile_here(self, job: Job, staging: Path) -> None:
        """See `ForkedCompiler`."""
        kernel, entry = self.kernel(job), self.staged_entry(job.key, staging)
        entry.mkdir()
        met: list[str] = []

        def meet(spec: Any) -> Any:
            met.append(key_of(spec, self._root))
            if met[-1] != job.key:
                return StandIn(spec.compile_fn)
            spec._compiled_kernel = spec.compile_fn()
            spec._export_object(entry / f"{spec.kernel_name}.o")
            (entry / META).write_text(json.dumps(spec.expected_meta, indent=2))
            raise Reached

        with _intercepted(meet), contextlib.suppress(Reached):
            try:
                perform(kernel.call)
            except (Undescribable, ImportError, TypeError) as error:
                raise CompilerUnavailable(f"{job.key}: it cannot be called again: {error}") from error
            raise CompilerUnavailable(
                f"the engine looks for {job.key}; the same call asks here for {', '.join(met) or 'nothing'}: "
                "other wheels or another torch than the engine's"
            )

    def verify(self, job: Job, staging: Path) -> None:
        """See `Compiler`."""
        entry = self.staged_entry(job.key, staging)
        try:
            content = (entry / f"{_kernel_name(job.key)}.o").read_bytes()
            check_architecture(content, self.target.capability)
            if _digest((entry / META).read_bytes()) != job.key.rpartition("@")[2]:
                raise Unloadable("its meta.json is not the one the engine expects")
        except (FileNotFoundError, ValueError, Unloadable) as error:
            raise ArtifactInvalid(f"{job.key}: {error}") from error

    def entry_path(self, key: str, root: Path) -> Path:
        """See `Compiler`: the module's directory, which the library too makes and throws away as a whole.

        Raises `ValueError` for what is no key, above all for a path.
        """
        return _object(key, root).parent

    def state(self, key: str, root: Path) -> EntryState:
        """See `Compiler`."""
        path = _object(key, root)
        try:
            content = path.read_bytes()
            meta = (path.parent / META).read_bytes()
            if _digest(meta) != key.rpartition("@")[2]:
                return EntryState.MISSING
            check_architecture(content, self.target.capability)
        except FileNotFoundError:
            return EntryState.MISSING
        except (OSError, ValueError, Unloadable):
            return EntryState.CORRUPT
        return EntryState.PUBLISHED

    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        """See `Compiler`. Raises `OSError` also where the library's lock is not to be had."""
        final = _object(job.key, root)
        entry, module = self.staged_entry(job.key, staging), final.parent
        with library_lock(module.parent / "tmp" / f"{module.name}.lock"):
            meta = module / META
            if meta.exists() and _digest(meta.read_bytes()) == job.key.rpartition("@")[2]:
                return link(entry / final.name, final)
            if module.exists():
                # What the library itself would do, but it deletes.
                quarantine(root, module)
            return publish_directory(entry, module)

    def rebuild(self, record: Record) -> Job:
        """See `Compiler`. Only calls of the functions that engines call are accepted."""
        kernel = self.recorded(record, "the call was not kept; trace its request instead")
        if kernel.key != record.key or kernel.call.module not in ENTRY_MODULES:
            raise NotRebuildable(
                f"rebuild.call.module: {kernel.call.module!r} is none of {', '.join(ENTRY_MODULES)}"
            )
        return self.job(kernel)


def key_of(spec: Any, root: Path) -> str:
    """Our key of a kernel as the library describes it. Raises `CompilerUnavailable` for another directory."""
    try:
        path = Path(spec.object_path).relative_to(root).with_suffix("")
    except ValueError as error:
        raise CompilerUnavailable(f"FlashInfer keeps {spec.name} outside of {root}: {error}") from error
    return f"{path}@{_digest(json.dumps(spec.expected_meta).encode())}"


def _kernel_of(spec: Any, root: Path) -> Kernel | None:
    key, call = key_of(spec, root), describe_current()
    return Kernel(key=key, call=call) if call is not None else None


def _object(key: str, root: Path) -> Path:
    """The object file of a kernel. Raises `ValueError` for what is no key."""
    path, _, _ = msgspec.convert(key, KeyText).rpartition("@")
    if {"..", "."} & set(path.split("/")):
        raise ValueError(f"{key!r} is no key of a kernel of FlashInfer's")
    return root / f"{path}.o"


def _digest(meta: bytes) -> str:
    text = json.dumps(json.loads(meta), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kernel_name(key: str) -> str:
    return key.rpartition("@")[0].rpartition("/")[2]


@contextlib.contextmanager
def _intercepted(meet: Callable[[Any], Any]) -> Iterator[None]:
    """Within it, the library asks `meet` for each kernel. Nothing happens without FlashInfer."""
    allow_cuda_after_fork()
    try:
        owner: Any = import_module(SPEC_MODULE).JitSpecCuteDsl
    except (ImportError, AttributeError):
        yield
        return
    before = owner.build_and_load
    owner.build_and_load = meet
    try:
        yield
    finally:
        owner.build_and_load = before
