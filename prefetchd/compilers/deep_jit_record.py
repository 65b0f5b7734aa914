"""From a record of a shape log to what nvcc is given, or a refusal that names the field.

A record is data from whoever could write the log. What of it reaches a command or a file is checked here by
lists of what the library itself writes: the key's form, nvcc's arguments one by one, the fields of
`meta.json`, and the source by its grammar (`deep_jit_source.py`). The subtle rule: all of that could be
honest and yet belong to another key, so at the end the key is computed from it and must be the record's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from prefetchd.compilers.base import NotRebuildable
from prefetchd.compilers.deep_gemm_package import Line, Package
from prefetchd.compilers.deep_jit_digest import HEADERS, KEY, Digests
from prefetchd.compilers.deep_jit_payload import OUTPUT, SOURCE, Payload
from prefetchd.compilers.deep_jit_source import MAX_SOURCE, SourceRefused, parse_source
from prefetchd.shapelog import Record

# Both lines give nvcc some fifteen arguments.
MAX_ARGUMENTS = 48
# Of a text that is refused, what the reason shows.
SHOWN = 80

# nvcc's options that take their value as the next argument, by what that must be.
_OUTPUT_OPTIONS = ("-o", "--output-file")
_INCLUDE_OPTIONS = ("-I", "--include-path")
# The host compiler's, as both lines pass them on.
_HOST_FLAGS = frozenset({"-fPIC", "-fconcepts", "-O0", "-O1", "-O2", "-O3"}) | {
    "-Wno-deprecated-declarations",
    "-Wno-abi",
}
_HOST_OPTION = "--compiler-options="
_FLAG = re.compile(
    r"-cubin|--cubin|-O[0-3]|-std=c\+\+(17|20|23)|--expt-(relaxed-constexpr|extended-lambda)"
    r"|--gpu-architecture=sm_\d{2,3}[af]?|-gencode=arch=compute_\d{2,3}[af]?,code=sm_\d{2,3}[af]?"
    r"|--diag-suppress=\d{1,5}(,\d{1,5}){0,63}|--use_fast_math|--generate-line-info|-lineinfo"
    r"|--ptxas-options=(--register-usage-level=\d{1,2}|--verbose(,--warn-on-local-memory-usage)?"
    r"|--warn-on-spills|--warn-on-local-memory-usage)",
    re.ASCII,
)
_ARCHITECTURE = re.compile(r"(?:sm|compute)_(\d+)", re.ASCII)
# Such as `cutlass-481`; nothing else is known to stand there.
_SIGNATURE = re.compile(r"[\w.+-]{0,64}", re.ASCII)

Argument = Annotated[str, msgspec.Meta(max_length=4096)]


class _Config(msgspec.Struct, frozen=True):
    """What the newer line knows of its package."""

    python_library_root: Argument = ""
    extra_signature: str = ""
    include_dirs: Annotated[list[Argument], msgspec.Meta(max_length=4)] = []
    include_prefixes: Annotated[list[Argument], msgspec.Meta(max_length=4)] = []


class _Options(msgspec.Struct, frozen=True):
    """The newer line's own names for nvcc's arguments. Fields it may add are left out of what we write."""

    optimize_level: Annotated[str, msgspec.Meta(pattern="^[0-3]$")] | None = None
    use_fast_math: bool | None = None
    ptxas_verbose: bool | None = None
    ptxas_register_usage_level: int | None = None
    check_no_spills: bool | None = None
    check_no_local_memory: bool | None = None
    with_line_info: bool | None = None
    dump_ptx: bool | None = None
    dump_sass: bool | None = None
    arch: Annotated[str, msgspec.Meta(pattern="^[0-9]{2,3}[af]?$")] | None = None
    nvcc_flags: Annotated[list[Argument], msgspec.Meta(max_length=MAX_ARGUMENTS)] | None = None
    extra_nvcc_flags: Annotated[list[Argument], msgspec.Meta(max_length=MAX_ARGUMENTS)] | None = None
    post_hook: str | None = None


class _Meta(msgspec.Struct, frozen=True):
    """The newer line's `meta.json`, its two entries with paths left empty."""

    command: None
    config: _Config
    compiler_info: None
    compiler_options: _Options


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """`Record.rebuild` of this compiler."""

    source: Annotated[str, msgspec.Meta(max_length=MAX_SOURCE)]
    arguments: Annotated[list[Argument], msgspec.Meta(max_length=MAX_ARGUMENTS)]
    meta: dict[str, Any] | None = None


class Records:
    """Judges the records of one installed package, for one architecture."""

    def __init__(self, package: Package, capability: int, digests: Digests) -> None:
        self._package = package
        self._capability = capability
        self._digests = digests
        self._headers = str(package.directory / "include")

    def payload(self, record: Record) -> Payload:
        """What compiles the record's key, whose fingerprint was compared before. Raises `NotRebuildable`."""
        name, digest = self._name(record.key)
        told = _told(record)
        self._check_source(told.source)
        flags = self._checked_arguments(told.arguments)
        self._check_architecture(told.arguments)
        meta = self._meta(told.meta)
        signature = "" if meta is None else meta["config"]["extra_signature"]
        try:
            computed = self._digests.of(name, told.source, flags, signature)
        except OSError as error:
            raise NotRebuildable(f"rebuild.source: {error.filename}: {error.strerror}") from error
        if computed != digest:
            raise NotRebuildable(
                f"key {record.key}: its source and arguments have the digest {computed} here, so they belong "
                "to another kernel (or this library computes its keys otherwise); warm or compile it anew"
            )
        return Payload(source=told.source, arguments=tuple(told.arguments), meta=meta)

    def _name(self, key: str) -> tuple[str, str]:
        match = KEY.fullmatch(key)
        older = self._package.line is Line.OLDER
        if match is None or key.startswith("kernel.") is not older:
            form = "kernel.<name>.<digest>" if older else "<name>.<digest>"
            raise NotRebuildable(
                f"key {key[:SHOWN]!r}: not of the form {form} of the installed deep_gemm; such an entry "
                "would never be looked for"
            )
        return match["name"], match["digest"]

    def _check_source(self, source: str) -> None:
        try:
            header = parse_source(source, older=self._package.line is Line.OLDER).header
        except SourceRefused as error:
            raise NotRebuildable(f"rebuild.source: not as deep_gemm generates it: {error}") from error
        if not Path(self._headers, header).is_file():
            raise NotRebuildable(f"rebuild.source: the installed deep_gemm has no header {header}")

    def _checked_arguments(self, arguments: Sequence[str]) -> list[str]:
        """Those that enter a key, in their order, when all of them are as the library gives them."""
        flags = []
        seen: list[str] = []
        pairs = iter(arguments)
        for argument in pairs:
            if argument == SOURCE:
                seen.append(SOURCE)
            elif argument in _OUTPUT_OPTIONS:
                self._expect(argument, next(pairs, ""), OUTPUT)
                seen.append(OUTPUT)
            elif argument in _INCLUDE_OPTIONS:
                self._expect(argument, next(pairs, ""), self._headers)
            elif argument.startswith("-I"):
                self._expect("-I", argument[2:], self._headers)
                flags.append(argument)
            elif _is_flag(argument):
                if argument not in ("-cubin", "--cubin"):
                    flags.append(argument)
            else:
                raise NotRebuildable(
                    f"rebuild.arguments: {argument[:SHOWN]!r} is no argument that deep_gemm gives nvcc; a "
                    "record with others is not replayed"
                )
        if sorted(seen) != sorted((SOURCE, OUTPUT)):
            raise NotRebuildable(f"rebuild.arguments: they must name {SOURCE} and {OUTPUT} once each")
        return flags

    def _expect(self, option: str, value: str, wanted: str) -> None:
        if value != wanted:
            raise NotRebuildable(
                f"rebuild.arguments: {option} {value[:SHOWN]!r}: only {wanted} may stand there"
            )

    def _check_architecture(self, arguments: Sequence[str]) -> None:
        found = {int(number) for text in arguments for number in _ARCHITECTURE.findall(text)}
        if found != {self._capability}:
            named = ", ".join(f"sm_{number}" for number in sorted(found)) or "no architecture"
            raise NotRebuildable(
                f"rebuild.arguments: compiles for {named}, and the target is sm_{self._capability}"
            )

    def _meta(self, told: dict[str, Any] | None) -> dict[str, Any] | None:
        """What goes into the newer line's `meta.json`: known fields, with the package's own paths."""
        if self._package.line is Line.OLDER:
            return None
        try:
            meta = msgspec.convert(told, _Meta)
        except (msgspec.ValidationError, RecursionError) as error:
            raise NotRebuildable(f"rebuild.meta: {error}") from error
        config, options = meta.config, meta.compiler_options
        if options.post_hook is not None:
            raise NotRebuildable(
                f"rebuild.meta: post_hook {options.post_hook[:SHOWN]!r} names a program to run, and none is "
                "taken from a log; this kernel is left to the engine"
            )
        if not _SIGNATURE.fullmatch(config.extra_signature):
            raise NotRebuildable(f"rebuild.meta: extra_signature {config.extra_signature[:SHOWN]!r}")
        for flag in (*(options.nvcc_flags or ()), *(options.extra_nvcc_flags or ())):
            if not _is_flag(flag):
                raise NotRebuildable(f"rebuild.meta: nvcc flag {flag[:SHOWN]!r} is none of deep_gemm's")
        own = msgspec.structs.replace(
            config,
            python_library_root=str(self._package.directory),
            include_dirs=[self._headers],
            include_prefixes=[HEADERS],
        )
        built: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(meta, config=own))
        return built


def _told(record: Record) -> _Told:
    if record.rebuild is None:
        raise NotRebuildable(
            "rebuild: the record holds no source, only what was compiled; it takes its request and provider"
        )
    try:
        return msgspec.convert(record.rebuild, _Told)
    except (msgspec.ValidationError, RecursionError) as error:
        raise NotRebuildable(f"rebuild: {error}") from error


def _is_flag(argument: str) -> bool:
    if argument.startswith(_HOST_OPTION):
        return set(argument.removeprefix(_HOST_OPTION).split(",")) <= _HOST_FLAGS
    return _FLAG.fullmatch(argument) is not None
