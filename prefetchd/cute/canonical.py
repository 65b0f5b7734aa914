"""A library's own cache key as text that is the same in every process, and the value again from that text.

Keys hold numbers, dtypes, classes and tuples of them. The subtle rule is that nothing outside this list has a
form: `repr` of an unknown object may hold an address, `hash` differs from process to process, and pickle runs
code. Such a key is `Unkeyable`, its kernel is compiled by the engine as ever, and somebody is told. A device
has no number here, because one artifact serves every device of its kind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

# What a canonical value is made of: JSON, each value in a list behind the letter of its type.
Node = list[Any]

# Keys have a few dozen fields in two or three levels; far more is not a key.
MAX_DEPTH = 8
MAX_NODES = 1024
MAX_TEXT = 1024

# Packages whose classes stand for element types in keys. Decoding looks nowhere else.
TYPE_PACKAGES = ("cutlass",)


class Unkeyable(ValueError):
    """A value that has no canonical form; the text says where it stands and what it is."""


def encode(value: object, *, devices_at: Collection[int] = ()) -> Node:
    """The value's canonical form. `devices_at`: places of a tuple at which an integer is a device's number.

    Raises `Unkeyable`.
    """
    budget = [MAX_NODES]
    if devices_at and type(value) is tuple:
        items = [["D"] if i in devices_at else _encode(each, 1, budget) for i, each in enumerate(value)]
        return ["T", *items]
    return _encode(value, 0, budget)


def text_of(node: Node) -> str:
    """The form as one line, to be compared and hashed."""
    return json.dumps(node, separators=(",", ":"), ensure_ascii=True)


def _encode(value: object, depth: int, budget: list[int]) -> Node:
    budget[0] -= 1
    if depth > MAX_DEPTH or budget[0] < 0:
        raise Unkeyable(f"it is nested deeper than {MAX_DEPTH} levels or has more than {MAX_NODES} parts")
    # By the exact type: an enumeration is an integer too, and numpy's scalars compare equal to one.
    kind = type(value)
    if value is None:
        return ["n"]
    if kind is bool:
        return ["b", value]
    if kind is int:
        return ["i", str(value)]
    if kind is float:
        return ["f", value.hex()]  # type: ignore[attr-defined]
    if kind is str:
        if len(value) > MAX_TEXT:  # type: ignore[arg-type]
            raise Unkeyable(f"a text of {len(value)} characters")  # type: ignore[arg-type]
        return ["s", value]
    if kind is tuple:
        return ["T", *(_encode(each, depth + 1, budget) for each in value)]  # type: ignore[attr-defined]
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return ["d", str(value).removeprefix("torch.")]
    if kind.__module__ == "torch" and kind.__name__ == "device":
        # Without its number.
        return ["p", value.type]  # type: ignore[attr-defined]
    if isinstance(value, type):
        return ["t", f"{value.__module__}:{value.__qualname__}"]
    raise Unkeyable(f"a {kind.__module__}.{kind.__qualname__} has no form that every process agrees on")


def decode(node: Node) -> Any:
    """The value of a canonical form, a device as the current one's. Raises `Unkeyable` for what is no form.

    Only dtypes of torch, which must be imported already where one occurs, and classes of `TYPE_PACKAGES` are
    looked up by name.
    """
    return _decode(node, 0)


def _decode(node: object, depth: int) -> Any:
    if depth > MAX_DEPTH or not isinstance(node, list) or not node or not isinstance(node[0], str):
        raise Unkeyable(f"{str(node)[:80]!r} is no canonical value")
    tag, rest = node[0], node[1:]
    if tag == "T":
        return tuple(_decode(each, depth + 1) for each in rest)
    if tag in ("n", "D") and not rest:
        return None if tag == "n" else _current_device()
    if len(rest) == 1 and tag in _SCALARS and isinstance(rest[0], _SCALARS[tag]):
        return _scalar(tag, rest[0])
    raise Unkeyable(f"{str(node)[:80]!r} is no canonical value")


_SCALARS: Mapping[str, type] = {"b": bool, "i": str, "f": str, "s": str, "d": str, "p": str, "t": str}


def _scalar(tag: str, value: Any) -> Any:
    try:
        if tag == "i":
            return int(value[:MAX_TEXT])
        if tag == "f":
            return float.fromhex(value)
        if tag == "d":
            return _dtype(value)
        if tag == "p":
            return _device(value)
        if tag == "t":
            return _class(value)
    except (ValueError, OverflowError, RuntimeError, AttributeError, ImportError, KeyError) as error:
        raise Unkeyable(f"{value[:80]!r}: {error}") from error
    return value


def _current_device() -> Any:
    return sys.modules["torch"].cuda.current_device()


def _device(kind: str) -> Any:
    torch = sys.modules["torch"]
    return torch.device(kind, _current_device()) if kind == "cuda" else torch.device(kind)


def _dtype(name: str) -> Any:
    torch = sys.modules["torch"]
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError("it is no dtype of torch's")
    return found


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    if module.partition(".")[0] not in TYPE_PACKAGES:
        raise ValueError(f"classes are looked up in {', '.join(TYPE_PACKAGES)} alone")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise ValueError("it is no class")
    return found
