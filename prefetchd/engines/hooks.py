"""How an engine's own functions get us called: after an import, and round a method, undone by nothing.

An engine's methods keep their signatures and results. Whatever ours raises is caught and counted; what the
engine's own raises passes unchanged. The subtle rule: an engine may load its plug-ins several times and fork
afterwards, so a method is wrapped once by each of our functions, however often that is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from prefetchd import post_import

# On a wrapped method: which functions of ours are round it.
MARK = "_prefetchd_wrapped"

# Gets the original and the arguments of the call, and answers what the engine gets to see.
Around = Callable[..., Any]


class NotFound(Exception):
    """The engine lacks a function that we know by name; the text says which."""


def when_imported(hooks: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Calls each with its module: now where that is imported already, else right after its import."""
    waiting: dict[str, Callable[[ModuleType], None]] = {}
    for name, hook in hooks.items():
        module = sys.modules.get(name)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            waiting[name] = hook
        else:
            hook(module)
    if waiting:
        post_import.install(waiting)


def wrap(owner: Any, name: str, around: Around) -> None:
    """Replaces `owner.name` by `around(original, ...)`, once. Raises `NotFound`."""
    original = getattr(owner, name, None)
    if not callable(original):
        raise NotFound(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
    ours = f"{around.__module__}.{around.__qualname__}"
    present = getattr(original, MARK, ())
    if ours in present:
        return

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, MARK, (*present, ours))
    setattr(owner, name, wrapper)
