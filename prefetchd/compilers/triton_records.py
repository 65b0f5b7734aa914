"""What a shape log keeps of a Triton variant, and how much of it is believed when it comes back.

An engine's observer writes a variant as a dict of plain fields (`recorded`); a replay turns the dict into a
variant again (`variant_of`) and the variant into the library's function (`find_function`). In between lies a
file that anyone may have written. The subtle rule: a record chooses among the kernels of allowed packages and
among the values of their arguments, and nothing else. No name in it reaches another module, no path in it is
opened, no text in it becomes an argument of a program; what would not hold is refused with the field's name.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import msgspec

from prefetchd.compilers.base import CompilerUnavailable, NotRebuildable
from prefetchd.compilers.triton_cache import digest_of
from prefetchd.compilers.triton_capture import Variant, jit_function
from prefetchd.compilers.triton_keys import differences
from prefetchd.kernel_packages import allowed_packages, lies_in
from prefetchd.lean_import import lean_import
from prefetchd.shapelog import Record

# The options that a caller or a tuner chooses; the others follow from the device and the installation, and
# thirty fields more would be compared at each compile.
CHOSEN = (
    *("num_warps", "num_stages", "num_ctas", "maxnreg"),
    *("enable_fp_fusion", "launch_pdl", "launch_cooperative_grid"),
    *("debug", "sanitize_overflow", "instrumentation_mode"),
)

# An identifier that Python itself has no meaning for, and a dotted chain of them.
_NAME = r"(?!__)[A-Za-z_][A-Za-z0-9_]*"
_DOTTED = re.compile(rf"{_NAME}(\.{_NAME})*", re.ASCII)

# The longest known specialization is 3 KB.
MAX_SPECIALIZATION_BYTES = 1 << 16
# The library *evaluates* what stands behind the shape of a tensor descriptor, so types are matched whole.
_TYPE = re.compile(
    r"\*{0,2}k?[a-z][a-z0-9]{1,15}"
    r"|tensordesc(_im2col)?<[a-z][a-z0-9]{1,15}\[\d{1,9}(, ?\d{1,9}){0,7}\](,input_rank=\d)?>",
    re.ASCII,
)

# What an option of the library's may be: neither a path nor several arguments of a program.
Word = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[A-Za-z0-9_.+:-]*\Z")]
Scalar = bool | int | float | Word | None
# What is known of an argument's value, such as ["tt.divisibility", 16].
Attribute = tuple[Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[a-z_.]+\Z")], bool | int]
Place = Annotated[list[int], msgspec.Meta(max_length=16)]
Many = msgspec.Meta(max_length=1024)


class Specialization(msgspec.Struct, kw_only=True):
    """The library's own JSON as far as it is known; a field that is not known here is not passed on."""

    name: str
    signature: Annotated[dict[str, Any], Many]
    constant_keys: Annotated[list[Place], Many]
    constant_vals: Annotated[list[Any], Many]
    attrs_keys: Annotated[list[Place], Many]
    attrs_vals: Annotated[list[list[Attribute]], Many]
    options: Annotated[dict[str, Any], Many]
    # The name in the library's memory, which is in no digest.
    key: Annotated[str, msgspec.Meta(min_length=2)]
    # Missing before 3.8.
    target: dict[str, int | str] | None = None


def recorded(variant: Variant) -> dict[str, Any]:
    """A variant as a record's `rebuild` holds it."""
    fields: dict[str, Any] = msgspec.to_builtins(variant)
    return fields


def named_parts(variant: Variant, source: Any) -> dict[str, str]:
    """A key by named fields, for people who want to know what a variant has that another has not.

    `source` is the library's own object: each argument as its type, or as its value where that is compiled
    in; `n%16` says whether a pointer or an integer is known to be a multiple of 16.
    """
    chosen = {name: variant.parts.options[name] for name in CHOSEN if name in variant.parts.options}
    parts = {"kernel": f"{variant.module}.{variant.name}", **chosen}
    for name, path, type_ in _arguments(getattr(source, "signature", {})):
        constant = source.constants.get(path) if type_ == "constexpr" else None
        parts[name] = str(getattr(constant, "value", constant)) if type_ == "constexpr" else type_
        if type_.startswith(("*", "i", "u")):
            parts[f"{name}%16"] = "yes" if source.attrs.get(path) else "no"
    # The key's own digest of the source covers the arguments as well, which are told already.
    return {**parts, "code": str(getattr(source.fn, "cache_key", ""))[:16]}


def _arguments(signature: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Each argument's name, place and type; the members of a tuple one by one."""
    for index, (name, type_) in enumerate(signature.items()):
        if isinstance(type_, tuple):
            yield from ((f"{name}[{i}]", (index, i), str(each)) for i, each in enumerate(type_))
        else:
            yield str(name), (index,), str(type_)


def variant_of(
    record: Record, capability: int, fingerprint: Mapping[str, str], environment: Mapping[str, str]
) -> Variant:
    """The variant of a record, if it may and can be compiled here. Raises `NotRebuildable`.

    `fingerprint` is what every key made here has in common, `environment` the engine's. Imports nothing.
    """
    _check_outcome(record)
    variant = _decoded(record)
    _check_names(variant, environment)
    specialization = _specialization(variant)
    if variant.parts.architecture != capability:
        raise NotRebuildable(
            f"rebuild.parts.architecture: sm_{variant.parts.architecture}, and this target is "
            f"sm_{capability}; replay it on the target it was recorded on"
        )
    _check_specialization(specialization, variant, environment)
    # Last, and only of what is otherwise in order: a difference is for a person to decide on.
    if named := list(differences(variant.parts.fingerprint(), fingerprint)):
        raise NotRebuildable(
            f"rebuild.parts: made under another fingerprint, so its key would never be looked up: "
            f"{'; '.join(named)}; record it anew"
        )
    text = json.dumps(msgspec.to_builtins(_plain(specialization)))
    seconds = record.seconds or variant.seconds
    return msgspec.structs.replace(variant, specialization=text, seconds=seconds)


def _check_outcome(record: Record) -> None:
    try:
        digest_of(record.key)
    except ValueError as error:
        raise NotRebuildable(f"key: {error}; records of Triton's carry its directory's name") from error
    if not record.ok:
        raise NotRebuildable("ok: false: the engine's own compile of it failed, and so would ours")


def _decoded(record: Record) -> Variant:
    if record.rebuild is None:
        raise NotRebuildable(
            "rebuild: absent: it was compiled from a source of its own (torch.compile, triton.compile), not "
            "from a kernel of a module, or another hook stood in the place of ours; trace its request instead"
        )
    size = len(str(record.rebuild.get("specialization", "")))
    if size > MAX_SPECIALIZATION_BYTES:
        raise NotRebuildable(
            f"rebuild.specialization: {size} bytes, more than {MAX_SPECIALIZATION_BYTES}; not one of ours"
        )
    try:
        return msgspec.convert(record.rebuild, Variant)
    except msgspec.ValidationError as error:
        raise NotRebuildable(f"rebuild: {error}; not a record of ours") from error


def _check_names(variant: Variant, environment: Mapping[str, str]) -> None:
    if "<locals>" in variant.name:
        raise NotRebuildable(
            f"rebuild.name: {variant.name!r} is defined inside a function, where no import finds it; move "
            "the kernel to its module's top level"
        )
    for field, text in (("module", variant.module), ("name", variant.name)):
        check_dotted(f"rebuild.{field}", text)
    check_module("rebuild.module", variant.module, environment)


def check_dotted(field: str, text: str) -> None:
    """Raises `NotRebuildable` for what is no plain dotted name; dunder names are none."""
    if not _DOTTED.fullmatch(text):
        raise NotRebuildable(f"{field}: {text[:100]!r} is not a plain dotted name; not a record of ours")


def check_module(field: str, module: str, environment: Mapping[str, str]) -> None:
    """Raises `NotRebuildable` for a module outside the allowed packages, and for one that is not here."""
    allowed = allowed_packages(environment)
    if not lies_in(module, allowed):
        raise NotRebuildable(
            f"{field}: {module} lies in no allowed package ({', '.join(allowed)}); if you trust it, add its "
            "package to the setting replay_packages"
        )
    if find_module(module, _package_directories(environment)) is None:
        raise NotRebuildable(
            f"{field}: {module} is not installed here: no package directory of the interpreter and no entry "
            "of PYTHONPATH has it (the working directory does not count); install what the engine uses"
        )


def _package_directories(environment: Mapping[str, str]) -> list[str]:
    """Where helpers import from: the engine's PYTHONPATH, then this interpreter's own, never where we are."""
    named = [entry for entry in environment.get("PYTHONPATH", "").split(":") if entry]
    for entry in named:
        if not Path(entry).is_absolute():
            raise NotRebuildable(
                f"PYTHONPATH = {environment['PYTHONPATH']!r}: {entry!r} depends on the working directory, "
                "from which nothing is replayed; write it as an absolute path"
            )
    here = str(Path.cwd())
    return [*named, *(entry for entry in sys.path if Path(entry).is_absolute() and entry != here)]


def find_module(module: str, directories: Sequence[str]) -> ModuleSpec | None:
    """Where a module would be imported from; runs none of its parents' code, as `find_spec` would."""
    top, *rest = module.split(".")
    spec = PathFinder.find_spec(top, list(directories)) or _found_otherwise(top)
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _found_otherwise(top: str) -> ModuleSpec | None:
    """A package that a finder of its own leads to, as editable installs have it."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if finder is not PathFinder and find is not None:
            spec: ModuleSpec | None = find(top, None, None)
            if spec is not None:
                return spec
    return None


def _specialization(variant: Variant) -> Specialization:
    if not variant.specialization:
        raise NotRebuildable(
            f"rebuild.specialization: empty: {variant.name} has a function or another object compiled in, "
            f"which Triton {variant.parts.version} cannot write down: only the engine itself can compile it "
            "(3.8 and later write functions down)"
        )
    try:
        # Python's own reader, as the library uses it: a constant may be an infinity, which JSON has not.
        return msgspec.convert(json.loads(variant.specialization), Specialization)
    except (ValueError, RecursionError) as error:
        raise NotRebuildable(f"rebuild.specialization: {error}; not Triton's own text") from error


def _check_specialization(found: Specialization, variant: Variant, environment: Mapping[str, str]) -> None:
    if found.name != f"{variant.module}.{variant.name}":
        raise NotRebuildable(
            f"rebuild.specialization.name: {found.name[:100]!r}, and the record is of "
            f"{variant.module}.{variant.name}; not a record of ours"
        )
    device = ("cuda", variant.parts.architecture)
    if found.target is not None and (found.target.get("backend"), found.target.get("arch")) != device:
        raise NotRebuildable(
            f"rebuild.specialization.target: {found.target}, and the key's own parts say sm_{device[1]}; "
            "not a record of ours"
        )
    for field, keys, values in (
        ("constant", found.constant_keys, found.constant_vals),
        ("attrs", found.attrs_keys, found.attrs_vals),
    ):
        if len(keys) != len(values):
            raise NotRebuildable(
                f"rebuild.specialization.{field}_keys: {len(keys)} for {len(values)} values; not Triton's own"
            )
    for name, type_ in found.signature.items():
        _check_type(f"rebuild.specialization.signature.{name[:100]}", type_)
    for module, name in _functions(found):
        check_dotted("rebuild.specialization.constant_vals.jit_function", f"{module}.{name}")
        check_module("rebuild.specialization.constant_vals.jit_function", module, environment)
    _check_options(found.options, environment)


def _check_type(field: str, type_: Any) -> None:
    if isinstance(type_, list) and len(type_) <= 64 and not any(isinstance(each, list) for each in type_):
        for each in type_:
            _check_type(field, each)
    elif not isinstance(type_, str) or not _TYPE.fullmatch(type_):
        raise NotRebuildable(
            f"{field}: {str(type_)[:100]!r} is no plain type of an argument (a layout in it, Triton would "
            "evaluate); trace its request instead"
        )


def _functions(found: Specialization) -> Iterator[tuple[str, str]]:
    """Module and name of each function that is a constant, as versions from 3.8 write it."""
    for value in found.constant_vals:
        if isinstance(value, dict) and "jit_function" in value:
            module, _, name = str(value["jit_function"]).partition(":")
            yield module, name


def _check_options(options: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    for name, value in options.items():
        field = f"rebuild.specialization.options.{name}"
        if name == "extern_libs":
            _check_libraries(field, value)
        elif name == "ptx_options" and value and value != environment.get("PTXAS_OPTIONS"):
            raise NotRebuildable(
                f"{field}: {str(value)[:100]!r} would be given to ptxas; a record gives no program its "
                "arguments: set PTXAS_OPTIONS to it, here and in the engine"
            )
        elif name == "ir_override" and value:
            raise NotRebuildable(f"{field}: {str(value)[:100]!r} is a file to be read; records name none")
        else:
            try:
                msgspec.convert(value, Scalar | list[Scalar])
            except msgspec.ValidationError as error:
                raise NotRebuildable(f"{field}: {error}; not an option of Triton's") from error


def _check_libraries(field: str, value: Any) -> None:
    """The library's own device library is the only one; it is taken from the installation here."""
    try:
        names = [name for name, _ in msgspec.convert(value or [], list[tuple[str, str]])]
    except msgspec.ValidationError as error:
        raise NotRebuildable(f"{field}: {error}; not an option of Triton's") from error
    others = [name[:100] for name in names if name != "libdevice"]
    if others:
        raise NotRebuildable(
            f"{field}: names files ({', '.join(others)}) to be linked in; records name none, so trace its "
            "request instead"
        )


def _plain(found: Specialization) -> Specialization:
    """Without what is a place on the machine it was recorded on; the library puts its own there."""
    options = {name: value for name, value in found.options.items() if name != "extern_libs"}
    return msgspec.structs.replace(found, options=options)


def modules_of(variant: Variant) -> frozenset[str]:
    """What to import before it can be compiled: the kernel's module, and those of functions given to it."""
    try:
        found = msgspec.json.decode(variant.specialization, type=Specialization)
    except msgspec.DecodeError:
        return frozenset({variant.module})
    return frozenset({variant.module, *(module for module, _ in _functions(found))})


def find_function(variant: Variant) -> Any:
    """The library's function of a recorded kernel. Raises `CompilerUnavailable`.

    A name that leads through another module, or to a kernel defined elsewhere, is not followed.
    """
    where = f"the kernel {variant.module}.{variant.name}"
    try:
        function = jit_function(named_within(variant.module, variant.name))
    except (ImportError, AttributeError) as error:
        raise CompilerUnavailable(
            f"{where} cannot be found: {error}; it takes a module attribute that leads to it, in the package "
            "the engine uses"
        ) from error
    home = (function.fn.__module__, function.fn.__qualname__)
    if home != (variant.module, variant.name):
        raise CompilerUnavailable(
            f"{where} is {'.'.join(home)} here; the engine's package is another version: record it anew"
        )
    return function


def named_within(module: str, path: str) -> Any:
    """What a dotted name within a module leads to, with what stands around a kernel there.

    Raises `CompilerUnavailable` for a name that leads into another module, which it might even import, and
    `ImportError` or `AttributeError` where there is none.
    """
    found: Any = import_kernels(module)
    for name in path.split("."):
        found = getattr(found, name)
        if isinstance(found, ModuleType) or name.startswith("__"):
            raise CompilerUnavailable(
                f"the kernel {module}.{path}: {name!r} leads out of its module; not a record of ours"
            )
    return found


def import_kernels(module: str) -> ModuleType:
    """Imports as an engine does, or with bare parents where these want extensions that no kernel needs."""
    try:
        return import_module(module)
    except ImportError:
        package, _, leaf = module.rpartition(".")
        if not package:
            raise
        return lean_import(package, leaf).get(leaf) or import_module(module)
