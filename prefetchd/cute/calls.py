"""A call of a library's function as data: what a dict's kernel is compiled from again, elsewhere.

A dict's key does not say how its kernel was compiled, only the call that missed it does. So the call is
kept: the function by name, its plain arguments, and of every tensor what can matter to a compile (shape,
stride, dtype, place, and the numbers in small integer ones, from which libraries count chunks). The subtle
rule: this is data of a stranger once it was in a file. Only a function defined in the site's own module is
called, and only values of this list are made; objects of a library only from packages that are allowed.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import msgspec

from prefetchd.cute.canonical import Node, Unkeyable, decode, encode
from prefetchd.kernel_packages import lies_in

MAX_ARGUMENTS = 128
# Offsets, slots and masks; the contents of larger tensors do not steer a compile.
MAX_VALUES = 8192
# What a device of today holds is less; it keeps a stranger's numbers out of an allocator.
MAX_ELEMENTS = 1 << 40

Dimension = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*\Z")]


class Tensor(msgspec.Struct, frozen=True, kw_only=True, tag="tensor", omit_defaults=True):
    """A tensor argument without its contents, but for `values`."""

    shape: Annotated[tuple[Dimension, ...], msgspec.Meta(max_length=16)]
    stride: Annotated[tuple[Dimension, ...], msgspec.Meta(max_length=16)]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    device: Annotated[str, msgspec.Meta(max_length=16)] = "cuda"
    # Elements from a pointer that is a multiple of 256 bytes.
    offset: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    values: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_VALUES)] | None = None


class Plain(msgspec.Struct, frozen=True, tag="plain"):
    """A value with a canonical form."""

    node: Node


class Fields(msgspec.Struct, frozen=True, kw_only=True, tag="fields"):
    """A dataclass or named tuple of a library, made of plain values."""

    module: Name
    kind: Name
    values: Annotated[dict[Name, Plain], msgspec.Meta(max_length=MAX_ARGUMENTS)]


class Global(msgspec.Struct, frozen=True, kw_only=True, tag="global"):
    """An object that the module of its class holds under a name: the only one of its kind, or one of few."""

    module: Name
    name: Name


Argument = Tensor | Plain | Fields | Global


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A function of a module and its arguments by name."""

    module: Name
    function: Name
    arguments: Annotated[dict[Name, Argument], msgspec.Meta(max_length=MAX_ARGUMENTS)]


class Undescribable(ValueError):
    """An argument has no form as data; the text names it."""


_now: list[tuple[str, str, Mapping[str, Any]]] = []


@contextmanager
def noted(module: str, function: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Within it, `describe_current` tells of this call."""
    _now.append((module, function, arguments))
    try:
        yield
    finally:
        _now.pop()


def describe_current() -> Call | None:
    """The innermost call noted. Raises `Undescribable`."""
    return describe(*_now[-1]) if _now else None


def describe(
    module: str, function: str, arguments: Mapping[str, Any], packages: tuple[str, ...] = ()
) -> Call:
    """A call as data; objects are described if they are of these packages. Raises `Undescribable`."""
    return Call(
        module=module,
        function=function,
        arguments={name: _describe(name, value, packages) for name, value in arguments.items()},
    )


def _describe(name: str, value: Any, packages: tuple[str, ...]) -> Argument:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    try:
        if lies_in(type(value).__module__, packages):
            return _describe_object(value)
        return Plain(encode(value))
    except Unkeyable as error:
        raise Undescribable(f"argument {name}: {error}") from error


def _describe_object(value: Any) -> Fields | Global:
    kind = type(value)
    module, names = kind.__module__, _field_names(kind)
    if names is not None:
        values = {name: Plain(encode(getattr(value, name))) for name in names}
        return Fields(module=module, kind=kind.__qualname__, values=values)
    for name, held in tuple(vars(sys.modules[module]).items()):
        if held is value:
            return Global(module=module, name=name)
    raise Unkeyable(f"{module} holds this {kind.__qualname__} under no name")


def _field_names(kind: Any) -> tuple[str, ...] | None:
    """Of a class whose objects are made of their fields, each given by name; None for any other."""
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        return tuple(field.name for field in fields) if all(field.init for field in fields) else None
    return tuple(kind._fields) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _describe_tensor(value: Any) -> Tensor:
    integers = not value.dtype.is_floating_point and not value.dtype.is_complex
    readable = value.device.type == "cpu" or _reads_are_free()
    small = integers and readable and 0 < value.numel() <= MAX_VALUES
    return Tensor(
        shape=tuple(value.shape),
        stride=tuple(value.stride()),
        dtype=str(value.dtype).removeprefix("torch."),
        device=value.device.type,
        offset=value.data_ptr() % 256 // value.element_size(),
        values=tuple(value.flatten().tolist()) if small else None,
    )


def _reads_are_free() -> bool:
    """On the null device; on a real one a read waits for the stream, and fails while a graph is captured."""
    return "prefetchd_null_guard" in sys.modules


def perform(call: Call, packages: tuple[str, ...] = ()) -> None:
    """Makes the call, with tensors of zeros and objects of these packages alone.

    Raises what the function raises, and `Undescribable`.
    """
    function = function_of(call.module, call.function)
    arguments = {name: _make(name, value, packages) for name, value in call.arguments.items()}
    torch = sys.modules.get("torch")
    if torch is None:
        function(**arguments)
        return
    with torch.inference_mode():
        function(**arguments)


def function_of(module: str, name: str) -> Callable[..., Any]:
    """A function that the module itself defines. Raises `Undescribable`, `ImportError`."""
    found: Any = import_module(module)
    # A dotted name is that of a class's static method.
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found) or getattr(found, "__module__", None) != module:
        raise Undescribable(f"{module} defines no function {name}")
    function: Callable[..., Any] = found
    return function


def _make(name: str, value: Argument, packages: tuple[str, ...]) -> Any:
    try:
        if isinstance(value, Plain):
            return decode(value.node)
        if isinstance(value, Tensor):
            return _make_tensor(value)
        if not lies_in(value.module, packages):
            raise ValueError(f"{value.module} lies in no allowed package; see the setting replay_packages")
        return _make_fields(value) if isinstance(value, Fields) else _find_global(value)
    except (Unkeyable, ValueError, RuntimeError, AttributeError, KeyError, ImportError, TypeError) as error:
        raise Undescribable(f"argument {name}: {error}") from error


def _make_fields(spec: Fields) -> Any:
    kind: Any = import_module(spec.module)
    for part in spec.kind.split("."):
        kind = getattr(kind, part)
    if not isinstance(kind, type) or kind.__module__ != spec.module or _field_names(kind) is None:
        raise ValueError(f"{spec.module}:{spec.kind} is no class that is made of its fields")
    return kind(**{name: decode(value.node) for name, value in spec.values.items()})


def _find_global(spec: Global) -> Any:
    found = vars(import_module(spec.module))[spec.name]
    if type(found).__module__ != spec.module:
        raise ValueError(f"{spec.module}:{spec.name} is no object of a class of that module")
    return found


def _make_tensor(spec: Tensor) -> Any:
    torch = sys.modules["torch"]
    if spec.device not in ("cuda", "cpu") or len(spec.shape) != len(spec.stride):
        raise ValueError(f"a tensor on {spec.device}, {len(spec.shape)} sizes, {len(spec.stride)} strides")
    dtype = getattr(torch, spec.dtype)
    extent = 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True) if size)
    if math.prod(spec.shape) > MAX_ELEMENTS or extent > MAX_ELEMENTS:
        raise ValueError(f"{extent} elements")
    memory = torch.empty(max(extent, 1) + spec.offset, dtype=dtype, device=spec.device)
    made = memory.as_strided(spec.shape, spec.stride, spec.offset)
    if spec.values is not None:
        made.copy_(torch.tensor(spec.values, dtype=dtype).reshape(spec.shape))
    return made
