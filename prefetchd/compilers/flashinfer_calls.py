"""A module of FlashInfer's as data: its key, and the call of the library's own generator that describes it.

The library has no name for a module's content: its directory is named by the module alone, and ninja decides
by the build file's commands whether what lies there is still right. So the key is that directory with a
digest of the build file, in which the cache directory has no name: the same module has one key wherever it
lies. The subtle rule: a module is described again by calling the generator, and by nothing else. Some of the
library's functions take sources, flags or C++ text, and whoever writes a record must not reach the compiler
with his own: so their common helper is no generator, and a text argument is a name, in which no code fits.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec

from prefetchd.cute.calls import MAX_ARGUMENTS, Name, Undescribable, function_of
from prefetchd.cute.canonical import MAX_DEPTH, MAX_NODES, MAX_TEXT, Node, Unkeyable, decode, encode

GENERATORS = "flashinfer.jit"
CORE = "flashinfer.jit.core"
# The library's own and those it keeps to itself: some modules are described by the latter alone.
PREFIXES = ("gen_", "_gen_")
# Of one argument: numbers, dtypes, names, and tuples of them.
PLAIN = frozenset("nbifsdT")
TEXT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|")
# Stands for the cache directory in what is digested.
ROOT = "$prefetchd_root"
# A generator is a few calls away from where its description is made.
MAX_FRAMES = 64

# Path below the cache directory: version/architectures/cached_ops/module@digest of its build file. The
# library's locks lie in `tmp`, which is no module's directory and is never put aside.
KeyText = Annotated[
    str,
    msgspec.Meta(
        max_length=512,
        pattern=r"^[0-9A-Za-z][0-9A-Za-z.+_-]*/[0-9a-z_]+/cached_ops/"
        r"(?!tmp@)[0-9A-Za-z_][0-9A-Za-z_.+-]*@[0-9a-f]{16}\Z",
    ),
]
GeneratorModule = Annotated[
    str, msgspec.Meta(max_length=256, pattern=r"^flashinfer\.jit(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
]
GeneratorName = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^_?gen_[A-Za-z0-9_]+\Z")]


class Generator(msgspec.Struct, frozen=True, kw_only=True):
    """A call of one of the library's functions that describe a module."""

    module: GeneratorModule
    function: GeneratorName
    arguments: Annotated[dict[Name, Node], msgspec.Meta(max_length=MAX_ARGUMENTS)] = {}


class Module(msgspec.Struct, frozen=True, kw_only=True):
    """One module. `refused`: why it is left to the engine, where it cannot be described again."""

    key: KeyText
    call: Generator | None = None
    refused: Annotated[str, msgspec.Meta(max_length=1024)] = ""


def running_generator(frame: FrameType | None) -> Generator:
    """The outermost generator that is running, as data. Raises `Undescribable`."""
    found: FrameType | None = None
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if _is_generator(frame):
            found = frame
        frame = frame.f_back
    if found is None:
        raise Undescribable(f"it was not described by a function gen_* of {GENERATORS}")
    code, values = found.f_code, found.f_locals
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        raise Undescribable(f"{code.co_name} takes any arguments")
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        arguments = {name: encode(_plain(values[name])) for name in names}
        call = msgspec.convert(
            {"module": found.f_globals["__name__"], "function": code.co_name, "arguments": arguments},
            Generator,
        )
    except (Unkeyable, KeyError, msgspec.ValidationError) as error:
        raise Undescribable(f"the arguments of {code.co_name}: {error}") from error
    check(call)
    return call


def check(call: Generator) -> None:
    """Raises `Undescribable` for a call that may not be made from data."""
    if call.module == CORE:
        raise Undescribable(f"{call.module}.{call.function} takes sources and flags")
    for name, node in call.arguments.items():
        _check(name, node)


def _check(name: str, node: object, depth: int = 0) -> None:
    tag, *rest = node if isinstance(node, list) and node else [""]
    if depth > MAX_DEPTH or len(rest) > MAX_NODES:
        raise Undescribable(f"argument {name} is nested too deep, or has too many parts")
    if tag == "T":
        for each in rest:
            _check(name, each, depth + 1)
    elif not (isinstance(tag, str) and tag in PLAIN and _is_short(rest)) or (
        tag == "s" and not _is_name(*rest)
    ):
        # What is shown is a text of the innermost list: the whole may be too deep to be printed.
        shown = next((each for each in (*rest, tag) if isinstance(each, str)), "a list")
        raise Undescribable(f"argument {name}: {shown[:80]!r} is neither a number nor a name")


def _is_short(values: list[object]) -> bool:
    return len(values) <= 1 and all(
        isinstance(each, (str, bool)) and len(str(each)) <= MAX_TEXT for each in values
    )


def _is_name(value: object = None) -> bool:
    return isinstance(value, str) and TEXT.fullmatch(value) is not None


def generate(call: Generator) -> None:
    """Calls the generator. Raises what it raises, `Undescribable` and `ImportError`."""
    check(call)
    function: Callable[..., Any] = function_of(call.module, call.function)
    try:
        arguments: Mapping[str, Any] = {name: decode(node) for name, node in call.arguments.items()}
    except Unkeyable as error:
        raise Undescribable(f"the arguments of {call.function}: {error}") from error
    function(**arguments)


def key_of(manifest: str, name: str, workspace: Path, roots: tuple[Path, ...]) -> str:
    """A module's key by its build file. `workspace` is version/architectures, below the first of `roots`."""
    return f"{workspace}/cached_ops/{name}@{digest_of(manifest, roots)}"


def digest_of(manifest: str, roots: tuple[Path, ...]) -> str:
    """The digest of a build file in which these cache directories, an inner one first, have no name."""
    for root in roots:
        manifest = manifest.replace(f"{root}/", f"{ROOT}/")
    return hashlib.sha256(manifest.encode()).hexdigest()[:16]


def _is_generator(frame: FrameType) -> bool:
    name, code = str(frame.f_globals.get("__name__")), frame.f_code
    if name == CORE or not f"{name}.".startswith(f"{GENERATORS}.") or not code.co_name.startswith(PREFIXES):
        return False
    function = frame.f_globals.get(code.co_name)
    return callable(function) and getattr(inspect.unwrap(function), "__code__", None) is code


def _plain(value: Any) -> Any:
    """A list is given as a tuple: generators only walk through them."""
    return tuple(value) if type(value) is list else value


def described_in(frame: FrameType | None = None) -> Generator | str:
    """The generator that runs, or why there is none to be named."""
    try:
        return running_generator(frame or sys._getframe(1))
    except Undescribable as error:
        return str(error)[:1000]
