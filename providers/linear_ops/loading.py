"""Imports what can be imported ahead, so that a trace does not begin with it."""

from __future__ import annotations

import importlib.util

from prefetchd.provider import Unavailable

from .homes import ENTRIES, entry


def load_homes() -> None:
    """Imports torch, Triton and the kernels of every known home that is installed.

    A home that does not load is left for the requests that name it, whose failure says why; modules named by
    their path are imported by the trace that needs them. Raises `Unavailable` without torch or Triton.
    """
    try:
        import torch  # noqa: F401
        import triton  # noqa: F401

        from . import driver  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"torch and triton do not load: {error}") from error
    for home, ops in ENTRIES.items():
        if importlib.util.find_spec(home) is None:
            continue
        for op in ops:
            try:
                entry(home, op)
            except Unavailable:
                continue
