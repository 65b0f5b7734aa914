"""What the DSL is asked to compile, as a digest: the kernel with what it holds, its arguments, its options.

A library that keeps kernels where nobody can ask it, in a cache of an object of its own, gives us no key. But
what it hands to the DSL says which kernel this is: the source is fingerprinted, and whatever else steers the
trace stands in these objects. The subtle rules: two symbolic sizes that are one object are one size, so
objects are numbered as they are met; a stream is a stream, whichever; and an object without a form as data
makes the whole unkeyable, since it could hold the one thing in which two kernels differ.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from prefetchd.cute.canonical import MAX_DEPTH, Node, Unkeyable, encode, text_of
from prefetchd.kernel_packages import lies_in

# Those of a large kernel with its layouts.
MAX_PARTS = 1 << 14
# An object in an object in an argument.
DEEPEST = 2 * MAX_DEPTH
# Packages whose objects are taken apart: what a kernel is described with.
DSL_PACKAGE = "cutlass"
# Classes of which every instance is as good as another.
ALIKE = ("CUstream",)


def digest_of(subject: Iterable[Any], packages: tuple[str, ...]) -> str:
    """The digest of a compile's function and arguments; objects of the DSL and `packages` are taken apart.

    Raises `Unkeyable`, also for a function of another package.
    """
    described = _Describing((DSL_PACKAGE, *packages)).sequence(tuple(subject), 0)
    return hashlib.sha256(text_of(described).encode()).hexdigest()


class _Describing:
    """One description: how much of it there may still be, and the objects in it so far."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages
        self._left = MAX_PARTS
        # By identity, each with its number; held, so that no identity is given again meanwhile.
        self._met: dict[int, tuple[int, Any]] = {}

    def sequence(self, values: Iterable[Any], depth: int) -> Node:
        return ["T", *(self.value(each, depth + 1) for each in values)]

    def mapping(self, values: Mapping[Any, Any], depth: int) -> Node:
        pairs = [(text_of(self.value(name, depth + 1)), value) for name, value in values.items()]
        return ["M", *([name, self.value(value, depth + 1)] for name, value in sorted(pairs, key=_first))]

    def value(self, value: Any, depth: int) -> Node:
        self._left -= 1
        if depth > DEEPEST or self._left < 0:
            raise Unkeyable("what is compiled is described by too many parts")
        kind = type(value)
        if kind in (tuple, list):
            return self.sequence(value, depth)
        if kind is dict:
            return self.mapping(value, depth)
        if kind in (set, frozenset):
            # Plain values alone: objects would be numbered in the order of their hashes.
            return ["S", *sorted(text_of(encode(each)) for each in value)]
        try:
            return encode(value)
        except Unkeyable:
            return self._object(value, kind, depth)

    def _object(self, value: Any, kind: type, depth: int) -> Node:
        if kind.__name__ in ALIKE:
            return ["o", kind.__name__]
        # Enumerations, those of a library in C++ too.
        if isinstance(getattr(value, "name", None), str) and hasattr(kind, "__members__"):
            return ["e", _named(kind), value.name]
        if id(value) in self._met:
            return ["r", self._met[id(value)][0]]
        self._met[id(value)] = len(self._met), value
        if isinstance(value, FunctionType):
            return self._function(value, depth)
        if isinstance(value, MethodType):
            return ["b", self.value(value.__func__, depth + 1), self.value(value.__self__, depth + 1)]
        if isinstance(value, functools.partial):
            held = self.sequence((value.func, value.args, value.keywords), depth)
            return ["a", held]
        if not lies_in(kind.__module__, self._packages):
            raise Unkeyable(f"a {_named(kind)} among what is compiled has no form that processes agree on")
        return ["o", _named(kind), self.mapping(_state(value, kind), depth)]

    def _function(self, function: FunctionType, depth: int) -> Node:
        inner: Any = inspect.unwrap(function)
        if not lies_in(inner.__module__, self._packages):
            raise Unkeyable(
                f"{inner.__module__}.{inner.__qualname__} is compiled, whose source nobody looks at"
            )
        cells = [_content(cell) for cell in getattr(inner, "__closure__", None) or ()]
        held = (cells, getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None))
        return ["c", f"{inner.__module__}:{inner.__qualname__}", self.sequence(held, depth)]


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _named(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Not bound yet.
        return None


def _state(value: Any, kind: type) -> dict[str, Any]:
    """What the object holds. Raises `Unkeyable` for one whose state lies out of Python's reach."""
    slots = [
        name
        for base in kind.__mro__
        for name in _listed(base.__dict__.get("__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    ]
    if not hasattr(value, "__dict__") and not slots:
        raise Unkeyable(f"a {_named(kind)} among what is compiled keeps what it holds to itself")
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )


def _listed(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
