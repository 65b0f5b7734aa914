"""prefetchd: a serving engine never compiles a kernel in its own process while requests wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefetchd.attaching import attach

__all__ = ["__version__", "attach"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Engines pay for `attach` and its imports when they use it, everybody else never.
    if name == "attach":
        from prefetchd.attaching import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
