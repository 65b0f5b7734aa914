"""A function that is running, as a call that can be made again: its name and what its arguments hold now."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

from prefetchd.cute.calls import Call, Undescribable, describe

# One under a cache under a library's own decorator is three; more is a ring.
MAX_LAYERS = 32


def module_of(frame: FrameType) -> str:
    """The name of the module whose code runs; empty where it has none."""
    return str(frame.f_globals.get("__name__") or "")


def takes_any_number(frame: FrameType) -> bool:
    """Whether the frame's function has arguments without names of their own."""
    return bool(frame.f_code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))


def layers_of(frame: FrameType) -> list[Any]:
    """What the function's name leads to, from outside in, if that is the frame's function; else nothing."""
    found: Any = frame.f_globals
    for part in frame.f_code.co_qualname.split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
    layers: list[Any] = []
    while found is not None and len(layers) < MAX_LAYERS:
        layers.append(found)
        if getattr(found, "__code__", None) is frame.f_code:
            return layers
        found = getattr(found, "__wrapped__", None)
    return []


def call_of(frame: FrameType, packages: tuple[str, ...] = ()) -> Call:
    """The running call as data, objects of these packages included. Raises `Undescribable`.

    Its arguments are what its frame's variables hold now; where the function has changed one since, what is
    made from the record has another key and is refused.
    """
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    if len(arguments) != len(names):
        raise Undescribable("an argument's variable holds nothing any more")
    return describe(module_of(frame), code.co_qualname, arguments, packages)
