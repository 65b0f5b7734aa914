"""quack's CuTe kernels, which the library keeps on disk itself: made for its own directory and names.

A kernel of quack's is one call of a function under its `jit_cache`, with plain arguments; the file's name is
the digest of those, its directory's name that of the versions and of quack's own source. The subtle rule: the
architecture is in neither, so an object for another one lies under the very name that the engine looks for.
It is put into quarantine like a damaged one; GPUs of two kinds need two directories.
"""

from __future__ import annotations

import contextlib
import os
import pwd
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
from prefetchd.compilers.cute_dsl_modes import Miss, Recorder
from prefetchd.compilers.cute_dsl_objects import check_architecture
from prefetchd.compilers.cute_dsl_own_cache import Met, OwnCache, library_lock, link
from prefetchd.cute.artifacts import Unloadable
from prefetchd.cute.canonical import Node, Unkeyable, decode, encode
from prefetchd.cute.fingerprint import versions
from prefetchd.cute.hooks import Hooks
from prefetchd.null_device.forks import survive_forks
from prefetchd.shapelog import Record
from prefetchd.targets import Target

# The library's own.
QUACK_CACHE_VARIABLE = "QUACK_CACHE_DIR"
JIT_MODULE, STATE_MODULE, POOL_MODULE = "quack.cache.jit", "quack.cache", "quack.cache.async_compile"

# Directory and file below the cache directory, both digests.
KeyText = Annotated[str, msgspec.Meta(max_length=129, pattern=r"^[0-9a-f]{64}/[0-9a-f]{64}\Z")]
# Only the library's own functions are called for a record.
Module = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^quack(\.[A-Za-z_][A-Za-z0-9_]*)+\Z")]
Name = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel: its key, and the call that compiles it."""

    key: KeyText
    module: Module
    function: Name
    positional: Node
    # Pairs of name and value, sorted, as the library's own key has them.
    named: Node


class QuackCute(OwnCache[Kernel]):
    """The compiler behind quack's own cache. `environment` is the engine's.

    A machine without quack is no failure: then nothing is found. Constructing one imports nothing.
    """

    name = "quack_cute"
    kind = Kernel
    # A normalization takes half a second, a matrix product ten.
    usual_seconds = 3.0
    cache_variable = QUACK_CACHE_VARIABLE

    def __init__(self, target: Target, environment: Mapping[str, str]) -> None:
        super().__init__(target, environment)
        self._root = find_root(environment)

    def fingerprint(self) -> Mapping[str, str]:
        """See `Compiler`."""
        try:
            version = metadata.version("quack-kernels")
        except metadata.PackageNotFoundError:
            return {}
        found = {"quack": version, "root": str(self._root), "architecture": self.architecture, **versions()}
        return {f"quack_cute.{name}": value for name, value in found.items()}

    def prepare(self, scratch: Path) -> None:
        """See `Compiler`."""
        if self.fingerprint():
            pin_architecture(self.architecture)
            survive_forks()

    @contextlib.contextmanager
    def capture(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`. Nothing is compiled: what the library gets does nothing when it is launched."""
        kernels = Met(scratch / "quack.kernels", Kernel, self.job)

        def meet(*call: Any) -> None:
            kernels.add(kernel_of(import_module(JIT_MODULE), *call))

        stand_ins = Hooks(Recorder(scratch / "quack.unused", self.architecture, lambda place: place.key), ())
        stand_ins.install()
        try:
            with _intercepted(scratch / "quack", meet):
                yield kernels
        finally:
            stand_ins.remove()

    @contextlib.contextmanager
    def forbid(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`. The library itself judges and loads what it finds, with lock files of its own."""
        missed = Met(scratch / "quack.misses", Kernel, self.job)

        def meet(function: Any, *arguments: Any) -> None:
            jit: Any = import_module(JIT_MODULE)
            missed.add(kernel_of(jit, function, *arguments))
            raise Miss(f"quack's {key_of(jit, function, *arguments)} is not in {self._root}")

        with _intercepted(self._root, meet):
            yield missed

    def modules(self, jobs: Iterable[Job]) -> frozenset[str]:
        """See `ForkedCompiler`."""
        return frozenset(self.kernel(job).module for job in jobs)

    def compile_here(self, job: Job, staging: Path) -> None:
        """See `ForkedCompiler`."""
        kernel, entry = self.kernel(job), self.staged_entry(job.key, staging)
        entry.mkdir()
        allow_cuda_after_fork()
        try:
            jit: Any = import_module(JIT_MODULE)
            function: Any = getattr(import_module(kernel.module), kernel.function)
            args, named = decode(kernel.positional), dict(decode(kernel.named))
            # What is under the library's decorator, and nothing else of the module.
            plain = function.__wrapped__ if hasattr(function, "cache_info") else None
        except (ImportError, AttributeError, Unkeyable, TypeError, ValueError) as error:
            raise CompilerUnavailable(f"{job.key}: it cannot be called again: {error}") from error
        if plain is None:
            raise CompilerUnavailable(
                f"{kernel.module}.{kernel.function} is no function of quack's jit_cache"
            )
        here = key_of(jit, function, args, named)
        if here != job.key:
            raise CompilerUnavailable(
                f"the engine looks for {job.key}; the same call is {here} here: another version of quack, "
                "the DSL or tvm_ffi, or arguments that pickle differently"
            )
        plain(*args, **named).export_to_c(
            object_file_path=str(entry / _object_name(job.key)), function_name=jit.EXPORT_FUNC_NAME
        )

    def verify(self, job: Job, staging: Path) -> None:
        """See `Compiler`."""
        try:
            content = (self.staged_entry(job.key, staging) / _object_name(job.key)).read_bytes()
            check_architecture(content, self.target.capability)
        except (FileNotFoundError, Unloadable) as error:
            raise ArtifactInvalid(f"{job.key}: {error}") from error

    def entry_path(self, key: str, root: Path) -> Path:
        """See `Compiler`. Raises `ValueError` for what is no key, above all for a path."""
        return root / f"{msgspec.convert(key, KeyText)}.o"

    def state(self, key: str, root: Path) -> EntryState:
        """See `Compiler`."""
        try:
            check_architecture(self.entry_path(key, root).read_bytes(), self.target.capability)
        except FileNotFoundError:
            return EntryState.MISSING
        except (OSError, Unloadable):
            return EntryState.CORRUPT
        return EntryState.PUBLISHED

    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        """See `Compiler`. Raises `OSError` also where the library's lock is not to be had."""
        final = self.entry_path(job.key, root)
        with library_lock(final.with_suffix(".lock")):
            return link(self.staged_entry(job.key, staging) / final.name, final)

    def rebuild(self, record: Record) -> Job:
        """See `Compiler`. Only functions of quack's own are accepted."""
        kernel = self.recorded(record, "the arguments have no form as data")
        if kernel.key != record.key:
            raise NotRebuildable(f"rebuild.key: {kernel.key!r} is not the record's key")
        return self.job(kernel)


def find_root(environment: Mapping[str, str]) -> Path:
    """Where quack keeps kernels in an engine with this environment. Raises `CompilerUnavailable`."""
    named = environment.get(QUACK_CACHE_VARIABLE)
    # As Python's `getpass` and `tempfile` would in the engine.
    users = (environment.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME"))
    try:
        user = next(filter(None, users), None) or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = ""
    if not (named or user):
        raise CompilerUnavailable(
            f"uid {os.getuid()} has no name, by which quack chooses its directory; set {QUACK_CACHE_VARIABLE}"
        )
    root = Path(named or Path(environment.get("TMPDIR") or "/tmp", user, "quack_cache"))
    if not root.is_absolute():
        raise CompilerUnavailable(
            f"{QUACK_CACHE_VARIABLE} = {str(root)!r} is not an absolute path; name an absolute directory"
        )
    return root


def key_of(jit: Any, function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> str:
    """Our key of a kernel: the library's directory and file."""
    sha = jit._key_to_hash((function.__qualname__, *args, *sorted(named.items())))
    return f"{jit._compute_source_fingerprint()}/{sha}"


def kernel_of(jit: Any, function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Kernel | None:
    """A call of one of quack's compile functions as data; None where an argument has no form as data."""
    try:
        return msgspec.convert(
            {
                "key": key_of(jit, function, args, named),
                "module": function.__module__,
                "function": function.__qualname__,
                "positional": encode(args),
                "named": encode(tuple(sorted(named.items()))),
            },
            Kernel,
        )
    except (Unkeyable, msgspec.ValidationError):
        return None


def _object_name(key: str) -> str:
    return f"{key.rpartition('/')[2]}.o"


class _Pool:
    """In place of quack's pool of compile processes, which is told of each kernel that is not on disk."""

    def __init__(self, meet: Callable[..., None]) -> None:
        self._meet = meet

    def poll(self, sha: str) -> tuple[str, None]:
        return "new", None

    def submit(self, sha: str, function: Any, args: Any, named: Any, path: Any) -> bool:
        self._meet(function, args, named)
        # The library goes on as without a pool.
        return False


@contextlib.contextmanager
def _intercepted(place: Path, meet: Callable[..., None]) -> Iterator[None]:
    """Within it, the library looks into `place` and tells `meet` what it lacks. Nothing without quack."""
    allow_cuda_after_fork()
    try:
        state: Any = import_module(STATE_MODULE)
        pools: Any = import_module(POOL_MODULE)
    except ImportError:
        yield
        return
    before = state.CACHE_ENABLED, state.CACHE_DIR, pools.get_active_pool
    pool = _Pool(meet)
    state.CACHE_ENABLED, state.CACHE_DIR, pools.get_active_pool = True, str(place), lambda: pool
    try:
        yield
    finally:
        state.CACHE_ENABLED, state.CACHE_DIR, pools.get_active_pool = before
