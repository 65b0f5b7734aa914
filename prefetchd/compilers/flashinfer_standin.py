"""In place of a module of FlashInfer's while an engine names what it needs: its functions do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StandInModule:
    """A loaded module whose functions do nothing and return nothing, by whatever name they are asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Python's own protocols are no functions of a module: copying and pickling ask for them.
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def __getitem__(self, name: str) -> Callable[..., None]:
        return _nothing


def stand_in_for(spec: Any) -> Any:
    """What the library's `build_and_load` would return for a module, without one."""
    module = StandInModule(str(spec.name))
    adapter = getattr(spec, "post_load_adapter", None)
    return module if adapter is None else adapter(module)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a kernel's launch."""
