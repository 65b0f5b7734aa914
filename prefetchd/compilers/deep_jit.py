"""DeepGEMM's own JIT: an nvcc command for each variant, a directory for each result.

The library writes a kernel's source, starts nvcc on it in a private directory and renames that directory to
the variant's key. So a stand-in for nvcc that leaves a record *beside its output* gets an exact join of key
and command for free: the library itself renames both together. That is the whole of capture, and it holds for
both lines of the library, DeepJIT and the older one, whose cache layouts are the two classes below.

The subtle rule: the library believes its cache. The newer line's hit test is one marker file and the older
one dies on a directory that lacks a file, so an entry that is there but unusable is worse than none: it is
called corrupt here, whatever wrote it, and the caller moves it away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import msgspec

from prefetchd.compilers.base import (
    ArtifactInvalid,
    Capture,
    Command,
    Compiler,
    CompilerUnavailable,
    EntryState,
    Job,
    NotRebuildable,
    fingerprint_id,
    target_architecture,
)
from prefetchd.compilers.deep_gemm_package import (
    Line,
    Package,
    find_package,
    include_digest,
    vendors_default,
)
from prefetchd.compilers.deep_jit_cost import predicted_seconds
from prefetchd.compilers.deep_jit_digest import Digests
from prefetchd.compilers.deep_jit_payload import Payload, captured_payloads, missed_payloads, payload_of
from prefetchd.compilers.deep_jit_record import Records
from prefetchd.compilers.nvcc import STAND_IN, Nvcc, find_nvcc
from prefetchd.config import REAL_NVCC_VARIABLE, STAND_IN_MISSES_VARIABLE, STAND_IN_MODE_VARIABLE
from prefetchd.elf import NotACubin, cubin_architecture
from prefetchd.jobs import compile_environment, disk_is_full
from prefetchd.shapelog import Record
from prefetchd.store import publish_directory
from prefetchd.targets import Target

CACHE_VARIABLE = "DG_JIT_CACHE_DIR"
# Extra outputs that the library would make after a compile. They do not enter a key, and their tools would be
# run on the placeholder.
DUMP_VARIABLES = ("DG_JIT_DUMP_ASM", "DG_JIT_DUMP_PTX", "DG_JIT_DUMP_SASS")
# What may change a kernel. Where cache and nvcc are counts by what is found there; the rest prints or dumps.
_CODE_VARIABLE = re.compile(
    r"(DG|DJ)_(?!JIT_CACHE_DIR|JIT_NVCC_COMPILER|\w*PRINT|\w*DUMP)\w+|NVCC_(PRE|AP)PEND_FLAGS"
)
# The library passes its command to a shell unquoted.
_SHELL_SAFE = re.compile(r"[\w./+,@%=-]+")


class Layout(ABC):
    """One line's cache layout: which files make an entry, and what the library reads to find its root."""

    files: ClassVar[tuple[str, ...]]
    minimum_nvcc: ClassVar[tuple[int, int]]
    # The library reads the first of these that is set.
    cache_variables: ClassVar[tuple[str, ...]]
    compiler_variables: ClassVar[tuple[str, ...]]
    default_directory: ClassVar[str]
    many_roots: ClassVar[bool]

    @abstractmethod
    def finish(self, payload: Payload, entry: Path, final: Path, nvcc: Nvcc) -> None:
        """Adds to a compiled entry what the library itself adds after nvcc, as if compiled in `final`."""

    def quiet(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables that keep the library from running other tools on a placeholder; no key changes."""
        return {name: "0" for name in DUMP_VARIABLES}

    @abstractmethod
    def overlay(self, scratch_root: Path, roots: tuple[Path, ...]) -> str:
        """The cache variable by which the library reads `roots` but can write only into `scratch_root`."""


class NewLayout(Layout):
    """DeepJIT: `<root>/cache/<name>.<digest>/`, found by `.committed`; further roots are read only."""

    files = ("kernel.cu", "kernel.cubin", "meta.json", ".committed")
    minimum_nvcc = (12, 9)
    cache_variables = (CACHE_VARIABLE, "DJ_JIT_CACHE_DIR")
    compiler_variables = ("DG_JIT_NVCC_COMPILER", "DJ_JIT_NVCC_COMPILER")
    default_directory = ".dj"
    many_roots = True

    def finish(self, payload: Payload, entry: Path, final: Path, nvcc: Nvcc) -> None:
        """`meta.json`, and the marker."""
        meta = dict(payload.meta or {})
        meta["command"] = " ".join(payload.command(final, nvcc))
        meta["compiler_info"] = {"path": str(nvcc.path), "version": nvcc.version_text}
        (entry / "meta.json").write_bytes(msgspec.json.encode(meta))
        (entry / ".committed").touch()

    def quiet(self, environment: Mapping[str, str]) -> dict[str, str]:
        """As above; the debug switch is these two flags, which are in the key, and dumps, which are not."""
        variables = super().quiet(environment)
        if _is_true(environment.get("DG_JIT_DEBUG", environment.get("DJ_JIT_DEBUG", ""))):
            variables |= {"DG_JIT_DEBUG": "0", "DG_JIT_WITH_LINEINFO": "1", "DG_JIT_PTXAS_VERBOSE": "1"}
        return variables

    def overlay(self, scratch_root: Path, roots: tuple[Path, ...]) -> str:
        """The library's own list: the first is written, the others are read."""
        return ":".join(map(str, (scratch_root, *roots)))


class OldLayout(Layout):
    """Before DeepJIT: `<root>/cache/kernel.<name>.<digest>/`, one root, both files or a dead engine."""

    files = ("kernel.cu", "kernel.cubin")
    minimum_nvcc = (12, 3)
    cache_variables = (CACHE_VARIABLE,)
    compiler_variables = ("DG_JIT_NVCC_COMPILER",)
    default_directory = ".deep_gemm"
    many_roots = False

    def finish(self, payload: Payload, entry: Path, final: Path, nvcc: Nvcc) -> None:
        """nvcc's output is all there is."""

    def overlay(self, scratch_root: Path, roots: tuple[Path, ...]) -> str:
        """A root whose cache is a link: entries are read through it; what fails is never renamed."""
        cache, link = roots[0] / "cache", scratch_root / "cache"
        if cache.is_dir() and not link.exists():
            scratch_root.mkdir(exist_ok=True)
            link.symlink_to(cache)
        return str(scratch_root)


LAYOUTS: Mapping[Line, type[Layout]] = {Line.DEEP_JIT: NewLayout, Line.OLDER: OldLayout}


class DeepJit(Compiler):
    """The compiler behind the installed deep_gemm, for one target.

    `environment` is the engine's: which cache, which nvcc and which flags it uses is read from it.
    Constructing one raises `CompilerUnavailable`.
    """

    name = "deep_jit"
    cache_variable = CACHE_VARIABLE

    def __init__(
        self, target: Target, environment: Mapping[str, str], *, package_directory: Path | None = None
    ) -> None:
        self.target = target
        self.package: Package = find_package(package_directory)
        self.layout: Layout = LAYOUTS[self.package.line]()
        self._environment = dict(environment)
        if _is_true(environment.get("DG_JIT_USE_NVRTC", "")):
            raise CompilerUnavailable(
                f"DG_JIT_USE_NVRTC={environment['DG_JIT_USE_NVRTC']} makes deep_gemm compile in itself, "
                "where there is no stand-in for nvcc, so its kernels can be neither traced nor made ahead. "
                "Unset DG_JIT_USE_NVRTC, here and in the engine"
            )
        self._roots = self._find_roots()

    @cached_property
    def nvcc(self) -> Nvcc:
        """The nvcc that compiles. Raises `CompilerUnavailable`."""
        return find_nvcc(
            self._environment,
            minimum=self.layout.minimum_nvcc,
            compiler_variables=self.layout.compiler_variables,
        )

    @cached_property
    def _include_digest(self) -> str:
        return include_digest(self.package)

    @cached_property
    def _fingerprint_id(self) -> str:
        return fingerprint_id(self.fingerprint())

    @cached_property
    def _records(self) -> Records:
        return Records(self.package, self.target.capability, Digests(self.package, self.nvcc))

    def fingerprint(self) -> Mapping[str, str]:
        """See `Compiler`. Raises `CompilerUnavailable` without nvcc."""
        variables = {
            name: value for name, value in sorted(self._environment.items()) if _CODE_VARIABLE.fullmatch(name)
        }
        return {
            "deep_jit.line": self.package.line,
            "deep_jit.package": str(self.package.directory),
            "deep_jit.version": self.package.version,
            "deep_jit.include": self._include_digest,
            "deep_jit.nvcc": self.nvcc.version_text,
            "deep_jit.roots": ":".join(map(str, self._roots)),
            "deep_jit.architecture": target_architecture(self.target),
            **{f"deep_jit.env.{name}": value for name, value in variables.items()},
        }

    def cache_root(self) -> Path:
        """See `Compiler`."""
        return self._roots[0]

    def roots(self) -> tuple[Path, ...]:
        """See `Compiler`."""
        return self._roots

    def rebuild(self, record: Record) -> Job:
        """See `Compiler`. Raises `CompilerUnavailable` too, without nvcc."""
        own = self._fingerprint_id
        if record.fingerprint != own:
            raise NotRebuildable(
                f"fingerprint {record.fingerprint!r}: its source was generated by another library or for "
                f"another nvcc or device, and here it is {own!r}; only its request can be replayed"
            )
        return self._job(record.key, self._records.payload(record))

    @contextlib.contextmanager
    def capture(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`."""
        root = scratch / "root"
        with self._stand_in(scratch, "capture", str(root)):
            yield _Captured(self, root)

    @contextlib.contextmanager
    def forbid(self, scratch: Path) -> Iterator[Capture]:
        """See `Compiler`. The newer line refreshes the time stamps of the markers it reads, as an engine."""
        misses = scratch / "misses"
        misses.mkdir(exist_ok=True)
        with self._stand_in(scratch, "forbid", self.layout.overlay(scratch / "root", self._roots)):
            yield _Missed(self, misses)

    def compile(self, job: Job, staging: Path) -> Command:
        """See `Compiler`. Raises `CompilerUnavailable` without nvcc, and for a kernel with a hook."""
        payload = payload_of(job)
        if payload.hook is not None:
            raise CompilerUnavailable(
                f"{job.key}: deep_gemm would run its hook {payload.hook!r} on the kernel, which only "
                "the library can do; this kernel is left to the engine"
            )
        entry, temporary = staging / "entry", staging / "tmp"
        entry.mkdir()
        temporary.mkdir()
        (entry / "kernel.cu").write_text(payload.source, "utf-8")
        return Command(
            argv=payload.command(entry, self.nvcc),
            environment=compile_environment(self._environment, temporary),
            directory=entry,
        )

    def verify(self, job: Job, staging: Path) -> None:
        """See `Compiler`."""
        if problem := self._cubin_problem(staging / "entry/kernel.cubin"):
            # On a full disk nvcc 13.0 leaves an empty cubin and calls that a success.
            if disk_is_full(staging):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staging))
            raise ArtifactInvalid(f"{job.key}: {problem}")

    def entry_path(self, key: str, root: Path) -> Path:
        """See `Compiler`."""
        return root / "cache" / key

    def state(self, key: str, root: Path) -> EntryState:
        """See `Compiler`."""
        entry = self.entry_path(key, root)
        try:
            present = {path.name for path in entry.iterdir()}
        except FileNotFoundError:
            # A link that leads nowhere stands in the way of publishing, and of the library's own rename.
            return EntryState.CORRUPT if entry.is_symlink() else EntryState.MISSING
        except NotADirectoryError:
            return EntryState.CORRUPT
        except OSError as error:
            if error.errno == errno.ELOOP:
                return EntryState.CORRUPT
            raise
        if not present:
            return EntryState.MISSING
        if not present.issuperset(self.layout.files) or self._cubin_problem(entry / "kernel.cubin"):
            return EntryState.CORRUPT
        return EntryState.PUBLISHED

    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        """See `Compiler`."""
        final = self.entry_path(job.key, root)
        self.layout.finish(payload_of(job), staging / "entry", final, self.nvcc)
        return publish_directory(staging / "entry", final)

    def digest(self, job: Job) -> str:
        """The same for a captured job and for the miss of the same variant, whose keys differ."""
        return payload_of(job).digest(self.nvcc)

    def _find_roots(self) -> tuple[Path, ...]:
        variable = next((name for name in self.layout.cache_variables if name in self._environment), None)
        if variable is None:
            home = self._environment.get("HOME", "")
            if not Path(home).is_absolute():
                raise CompilerUnavailable(
                    f"HOME is {home!r} and {CACHE_VARIABLE} is unset, so deep_gemm has no cache directory. "
                    f"Set {CACHE_VARIABLE} to an absolute directory, here and in the engine"
                )
            own = vendors_default(self.package, self._environment, Path(home))
            return (own or Path(home) / self.layout.default_directory,)
        value = self._environment[variable]
        names = value.split(":")
        if len(names) > 1 and not self.layout.many_roots:
            raise CompilerUnavailable(
                f"{variable}={value} lists several directories, but the installed deep_gemm (older line, "
                f"{self.package.version}) takes exactly one. Set it to one absolute directory"
            )
        for name in names:
            if not Path(name).is_absolute():
                raise CompilerUnavailable(
                    f"{variable}={value!r} holds {name!r}, which is not an absolute path: deep_gemm changes "
                    "directory before it compiles, so it would look elsewhere. Set it to an absolute one"
                )
        return tuple(Path(name) for name in names)

    @contextlib.contextmanager
    def _stand_in(self, scratch: Path, mode: str, cache: str) -> Iterator[None]:
        if not _SHELL_SAFE.fullmatch(str(scratch)):
            raise CompilerUnavailable(
                f"{scratch}: deep_gemm passes paths to a shell unquoted, so the directory to trace in must "
                "have no blanks or special characters. Set TMPDIR to one that has none"
            )
        # The stand-in is called by a link in scratch, since the place we are installed in may have blanks.
        stand_in = scratch / "nvcc"
        with contextlib.suppress(FileExistsError):
            stand_in.symlink_to(STAND_IN)
        with _environment(
            {
                **self.layout.quiet(self._environment),
                self.layout.compiler_variables[0]: str(stand_in),
                CACHE_VARIABLE: cache,
                REAL_NVCC_VARIABLE: str(self.nvcc.path),
                STAND_IN_MODE_VARIABLE: mode,
                STAND_IN_MISSES_VARIABLE: str(scratch / "misses"),
            }
        ):
            yield

    def _cubin_problem(self, path: Path) -> str | None:
        """What is wrong with a cubin for this target, None if nothing."""
        try:
            architecture = cubin_architecture(path)
        except NotACubin as error:
            return f"{path} is no complete cubin: {error}"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if architecture != self.target.capability:
            return f"{path} is compiled for sm_{architecture}, not for {target_architecture(self.target)}"
        return None

    def _job(self, key: str, payload: Payload) -> Job:
        if payload.architecture != self.target.capability:
            raise CompilerUnavailable(
                f"{key}: the library compiles for sm_{payload.architecture} while {self.target.name} is "
                f"{target_architecture(self.target)}: it was traced on another device"
            )
        return Job(
            compiler=self.name,
            key=key,
            payload=msgspec.msgpack.encode(payload),
            cost=predicted_seconds(payload.source),
        )


class _Captured:
    """The entries that the library published into a scratch root, as jobs."""

    def __init__(self, compiler: DeepJit, root: Path) -> None:
        self._compiler = compiler
        self._cache = root / "cache"

    def jobs(self) -> list[Job]:
        return [self._compiler._job(key, payload) for key, payload in captured_payloads(self._cache)]


class _Missed:
    """The compiles that were refused, as jobs.

    A failed compile never reaches the directory that bears its key, so a miss is named by its digest.
    """

    def __init__(self, compiler: DeepJit, misses: Path) -> None:
        self._compiler = compiler
        self._misses = misses

    def jobs(self) -> list[Job]:
        found = {f"miss.{p.digest(self._compiler.nvcc)}": p for p in missed_payloads(self._misses)}
        return [self._compiler._job(key, payload) for key, payload in found.items()]


def _is_true(text: str) -> bool:
    return text.lower() not in ("", "0", "false", "no")


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process, which the library reads at its first use, and restores them."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
