"""One noted call of a library's function, without gradients as engines call it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from prefetchd.cute.calls import Undescribable, function_of, noted
from prefetchd.provider import Unavailable


def call(module: str, function: str, arguments: Mapping[str, Any]) -> None:
    """Calls it. Raises `Unavailable` without the function, and whatever the library raises."""
    found = entry(module, function)
    with noted(module, function, arguments), torch.inference_mode():
        found(**arguments)


@lru_cache(maxsize=64)
def entry(module: str, function: str) -> Callable[..., Any]:
    """A function that the module defines. Raises `Unavailable`."""
    try:
        importlib.import_module(module)
        return function_of(module, function)
    except (ImportError, OSError, RuntimeError, AttributeError, Undescribable) as error:
        raise Unavailable(f"{module} gives no {function} here: {error}") from error


def matching(module: str, function: str, offered: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What the function takes of what is offered, made. Raises `Unavailable` naming what it lacks."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(entry(module, function)).parameters.items():
        if name in offered:
            found[name] = offered[name]()
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise Unavailable(f"{module}.{function} needs {name}, and no field of a request says what it is")
    return found
