"""CuTe DSL: a kernel is compiled in a process without a GPU and kept as an object file that an engine loads.

`cute.compile` looks into no cache, so the store is ours, and its keys are those of the dicts and functions in
which libraries keep compiled kernels (`prefetchd/cute/`). The subtle rule is the architecture: a process that
asks no device compiles for sm_100a, and the DSL reads its variable once, when it is imported. So it is set
before the import and again in the DSL, and an object is published only when the cubin in it says it is right.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
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
)
from prefetchd.compilers.cute_dsl_modes import CompileOne, Left, Reached, Recorder, Refuser, Variant
from prefetchd.compilers.cute_dsl_objects import check_architecture
from prefetchd.compilers.cute_dsl_records import site_of, variant_of
from prefetchd.config import (
    CUTE_DICTS_VARIABLE,
    CUTE_FUNCTIONS_VARIABLE,
    CUTE_STORE_MB_VARIABLE,
    CUTE_STORE_VARIABLE,
    DEFAULT_CUTE_STORE_MB,
)
from prefetchd.cute import artifacts
from prefetchd.cute.callers import compiles_kernels
from prefetchd.cute.calls import Undescribable, function_of, perform
from prefetchd.cute.canonical import Unkeyable, decode
from prefetchd.cute.engine import settings_here
from prefetchd.cute.fillers import may_fill
from prefetchd.cute.fingerprint import (
    ARCHITECTURE_VARIABLE,
    architecture_of,
    digest,
    dsl_settings,
    environment_fingerprint,
    source_fingerprint,
    versions,
)
from prefetchd.cute.homes import Site, SiteError, sites
from prefetchd.cute.hooks import Hooks, Mode, Place
from prefetchd.cute.loading import export, kind_of, load
from prefetchd.cute.signatures import Uncallable, noted, signature_of
from prefetchd.kernel_packages import allowed_packages
from prefetchd.null_device.forks import survive_forks
from prefetchd.shapelog import Record
from prefetchd.store import publish_directory
from prefetchd.targets import Target

DISTRIBUTION = "nvidia-cutlass-dsl"
# Below, objects cannot be exported; what comes after 4.8 was not seen yet and is tried.
FIRST_VERSION = (4, 4)
# Seconds of one core for a kernel nobody has measured: between a decode's 2 and a prefill's 20.
USUAL_SECONDS = 8.0


class CuteDsl(ForkedCompiler):
    """The compiler behind the installed DSL, for one target. Constructing one does not import the DSL.

    `environment` is the engine's. Raises `CompilerUnavailable` for settings that cannot be meant.
    """

    name = "cute_dsl"
    cache_variable = CUTE_STORE_VARIABLE

    def __init__(self, target: Target, environment: Mapping[str, str]) -> None:
        self.target = target
        self._environment = dict(environment)
        try:
            self.architecture = architecture_of(target, environment)
            self._root = artifacts.find_root(environment, environment.get(CUTE_STORE_VARIABLE))
            self._sites = sites(
                _listed(environment, CUTE_DICTS_VARIABLE), _listed(environment, CUTE_FUNCTIONS_VARIABLE)
            )
            megabytes = int(environment.get(CUTE_STORE_MB_VARIABLE, DEFAULT_CUTE_STORE_MB))
        except (ValueError, SiteError) as error:
            raise CompilerUnavailable(str(error)) from error
        self._known = {site.namespace: site for site in self._sites}
        self._packages = allowed_packages(environment)
        self._left: Left | None = None
        self._limit_bytes = megabytes << 20
        self._prints: dict[tuple[str, ...], tuple[str, str]] = {}

    def fingerprint(self) -> Mapping[str, str]:
        """See `Compiler`. Without importing the DSL, so that an engine that has it says the same."""
        version = versions().get(DISTRIBUTION)
        if version is None:
            raise CompilerUnavailable(f"CuTe kernels need {DISTRIBUTION}, which is not installed; install it")
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < FIRST_VERSION:
            raise CompilerUnavailable(
                f"{DISTRIBUTION} {version} exports no object files; install 4.4 or later"
            )
        settings = dsl_settings(None, self._environment)
        parts = environment_fingerprint(self.target, self.architecture, settings)
        return {f"cute.{name}": value for name, value in parts.items()} | {"cute.root": str(self._root)}

    def cache_root(self) -> Path:
        """See `Compiler`."""
        return self._root

    def prepare(self, scratch: Path) -> None:
        """See `Compiler`. Imports the DSL for the target's architecture and no other."""
        self.fingerprint()
        pin_architecture(self.architecture)
        survive_forks()

    def leave_unnamed(self) -> None:
        """See `NamingCompiler`."""
        self._left = Left()

    def notes(self) -> tuple[str, ...]:
        """See `Compiler`."""
        subjects = sorted(self._left.subjects) if self._left is not None else ()
        return tuple(f"not baked, since nothing names it elsewhere: CuTe kernel {each}" for each in subjects)

    @contextlib.contextmanager
    def capture(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`."""
        recorder = Recorder(scratch / "cute.variants", self.architecture, self.name_of, self._left)
        with self._installed(recorder):
            yield _Jobs(self, recorder)

    @contextlib.contextmanager
    def forbid(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`. Objects are loaded for real; launching them does nothing here."""
        recorder = Recorder(scratch / "cute.misses", self.architecture, self.name_of)
        with self._installed(Refuser(self._root, recorder, self._left)):
            yield _Jobs(self, recorder)

    def modules(self, jobs: Iterable[Job]) -> frozenset[str]:
        """See `ForkedCompiler`."""
        return frozenset(payload_of(job).namespace.partition(":")[0] for job in jobs)

    def compile_here(self, job: Job, staging: Path) -> None:
        """See `ForkedCompiler`."""
        variant = payload_of(job)
        self._check(variant)
        entry = self.staged_entry(job.key, staging)
        entry.mkdir()

        def publishable(compiled: Any) -> None:
            kind, symbol = kind_of(compiled), variant.name.replace("-", "_")
            try:
                signature = signature_of(compiled, told) if kind == "tvm_ffi" else None
            except Uncallable as error:
                raise CompilerUnavailable(f"{variant.name} would not be callable: {error}") from error
            export(compiled, kind, symbol, staging / "kernel.o")
            artifact = artifacts.Artifact(
                name=variant.name,
                namespace=variant.namespace,
                key=Place(self.site(variant), variant.node, variant.number).key,
                kind=kind,
                symbol=symbol,
                architecture=variant.architecture,
                object_sha256="",
                object_bytes=0,
                signature=signature,
            )
            artifacts.write(entry, artifact, (staging / "kernel.o").read_bytes())
            # In the process that knows the DSL: does what was written load at all?
            load(entry / artifacts.OBJECT, artifact)

        mode = CompileOne(variant, self.name_of, publishable)
        with noted() as told, self._installed(mode), contextlib.suppress(Reached):
            self._replay(variant)
            raise CompilerUnavailable(self._not_reached(variant, mode.names))

    def verify(self, job: Job, staging: Path) -> None:
        """See `Compiler`."""
        entry = self.staged_entry(job.key, staging)
        try:
            content = (entry / artifacts.OBJECT).read_bytes()
            found = msgspec.json.decode((entry / artifacts.RECORD).read_bytes(), type=artifacts.Artifact)
            check_architecture(content, self.target.capability)
        except (FileNotFoundError, msgspec.DecodeError, artifacts.Unloadable) as error:
            raise ArtifactInvalid(f"{job.key}: {error}") from error
        if found.object_bytes != len(content):
            raise ArtifactInvalid(f"{job.key}: {len(content)} of {found.object_bytes} bytes of the object")

    def entry_path(self, key: str, root: Path) -> Path:
        """See `Compiler`. Raises `ValueError` for what is no key, above all for a path."""
        if not artifacts.is_name(key):
            raise ValueError(f"{key!r} is no name of a stored kernel")
        return root / key

    def state(self, key: str, root: Path) -> EntryState:
        """See `Compiler`."""
        entry = self.entry_path(key, root)
        try:
            found = artifacts.find(root, key)
            if found is None:
                return EntryState.MISSING
            check_architecture(found.path.read_bytes(), self.target.capability)
        except (artifacts.Unloadable, artifacts.StoreRefused, OSError):
            return EntryState.CORRUPT if os.path.lexists(entry) else EntryState.MISSING
        return EntryState.PUBLISHED

    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        """See `Compiler`. Then the store is kept below its bound."""
        tighten(root)
        published = publish_directory(self.staged_entry(job.key, staging), self.entry_path(job.key, root))
        artifacts.evict(root, self._limit_bytes, keep=frozenset({job.key}))
        return published

    def rebuild(self, record: Record) -> Job:
        """See `Compiler`."""
        return self.job(variant_of(record, self.architecture, self._known, self._packages))

    def job(self, variant: Variant, cost: float = USUAL_SECONDS) -> Job:
        """The job that compiles a variant."""
        return Job(compiler=self.name, key=variant.name, payload=msgspec.msgpack.encode(variant), cost=cost)

    def name_of(self, place: Place) -> str:
        """The entry of a compile met in this process. Raises `LookupError` where its source is not found."""
        sources = place.site.sources
        if sources not in self._prints:
            parts = environment_fingerprint(self.target, self.architecture, settings_here(self._environment))
            self._prints[sources] = digest(parts), source_fingerprint(sources)
        return artifacts.entry_name(place.site.namespace, place.key, *self._prints[sources])

    def site(self, variant: Variant) -> Site:
        """Where a variant's kernel is kept. Raises `CompilerUnavailable`."""
        site = site_of(variant, self._known, self._packages)
        if site is None:
            raise CompilerUnavailable(
                f"{variant.namespace} is no known place of compiled kernels; name it in cute_dicts or "
                "cute_functions, or its package in replay_packages"
            )
        return site

    @contextlib.contextmanager
    def _installed(self, mode: Mode) -> Iterator[None]:
        allow_cuda_after_fork()
        hooks = Hooks(mode, self._sites, self._packages)
        hooks.install()
        try:
            yield
        finally:
            hooks.remove()

    def _replay(self, variant: Variant) -> None:
        """Does again what led to the compile. Raises `CompilerUnavailable` and what the library raises."""
        site = self.site(variant)
        try:
            if site.kind == "function":
                # Through the module: what is installed there by now opens the scope.
                function = getattr(import_module(site.module), site.attribute)
                bound = inspect.BoundArguments(inspect.signature(function), dict(decode(variant.node)))
                function(*bound.args, **bound.kwargs)
            elif variant.call is not None and site.kind == "call":
                function = function_of(variant.call.module, variant.call.function)
                if not compiles_kernels(function, variant.call.module):
                    raise Undescribable("it has nothing compiled by the DSL")
                perform(variant.call, self._packages)
            elif variant.call is not None:
                function_of(variant.call.module, variant.call.function)
                if not may_fill(site, variant.call.module):
                    raise Undescribable(f"{variant.call.module} has nothing compiled by the DSL")
                perform(variant.call)
            else:
                raise CompilerUnavailable(
                    f"{variant.namespace}: nobody kept the call that this key of a dict came from; replay it "
                    "through its request"
                )
        except (Unkeyable, Undescribable, ImportError, AttributeError, TypeError) as error:
            raise CompilerUnavailable(f"{variant.namespace}: it cannot be called again: {error}") from error

    def _not_reached(self, variant: Variant, names: list[str]) -> str:
        if names:
            return (
                f"{variant.namespace}: the engine looks for it as {variant.name}, here it is {names[0]}: "
                "another version of the DSL, other settings, or another source of the kernel"
            )
        return f"{variant.namespace}: the call was made again and did not compile {variant.node}"

    def _check(self, variant: Variant) -> None:
        if variant.architecture != self.architecture:
            raise CompilerUnavailable(
                f"{variant.name}: recorded for {variant.architecture}, this target is {self.architecture}"
            )


class _Jobs:
    """What was recorded, as the capture of a trace."""

    def __init__(self, compiler: CuteDsl, recorder: Recorder) -> None:
        self._compiler, self._recorder = compiler, recorder

    def jobs(self) -> list[Job]:
        return [self._compiler.job(variant) for variant in self._recorder.variants.values()]


def payload_of(job: Job) -> Variant:
    """The payload of one of this compiler's jobs."""
    return msgspec.msgpack.decode(job.payload, type=Variant)


def pin_architecture(architecture: str) -> None:
    """Imports torch and the DSL so that everything is compiled for this architecture.

    Raises `CompilerUnavailable` without them, and where the DSL would not do as it is told.
    """
    os.environ[ARCHITECTURE_VARIABLE] = architecture
    try:
        # In this order, as every kernel library does.
        import_module("torch")
        import_module("cutlass.cute")
        dsl: Any = sys.modules["cutlass.cutlass_dsl"].CuTeDSL._get_dsl()
    except (ImportError, OSError, RuntimeError) as error:
        raise CompilerUnavailable(f"CuTe kernels need torch and {DISTRIBUTION}: {error}") from error
    # A DSL that was imported before has read the variable already.
    dsl.envar.arch = architecture
    if dsl.envar.arch != architecture:
        raise CompilerUnavailable(f"the DSL compiles for {dsl.envar.arch} and not for {architecture}")
    _answer_for_the_device()
    provider: Any = getattr(dsl, "compiler_provider", None)
    if hasattr(provider, "_cuda_dependencies_checked"):
        # 4.4 asks for a driver before its first compile, though it needs none.
        provider._cuda_dependencies_checked = True


def _answer_for_the_device() -> None:
    """How many clusters fit on the device at once, which the DSL asks a kernel on the device.

    One block a cluster: as many as there are multiprocessors, exactly. Larger ones: what divides evenly; a
    device with groups of multiprocessors of unequal size may have fewer, and its engine then finds nothing.
    """
    hardware: Any = import_module("cutlass.utils").HardwareInfo

    def get_max_active_clusters(_self: Any, cluster_size: int, *_args: Any, **_known: Any) -> int:
        torch: Any = sys.modules["torch"]
        return int(torch.cuda.get_device_properties(0).multi_processor_count) // cluster_size

    hardware.get_max_active_clusters = get_max_active_clusters


def allow_cuda_after_fork() -> None:
    """torch refuses CUDA in a forked child of a process that has used it; the null device survives a fork."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda._is_in_bad_fork = lambda: False


def tighten(root: Path) -> None:
    """Takes from others the right to write to our store. Raises `PermissionError` for somebody else's."""
    status = root.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(
            f"{root} belongs to uid {status.st_uid}: whoever owns it could run code in the engine; set "
            f"{CUTE_STORE_VARIABLE} to a directory of uid {os.getuid()}"
        )
    if status.st_mode & 0o022:
        root.chmod(status.st_mode & 0o755)


def _listed(environment: Mapping[str, str], name: str) -> list[str]:
    return [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
