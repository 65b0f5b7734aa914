"""Where FlashInfer keeps what it compiles, as an engine with that environment finds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.config import FLASHINFER_CACHE_VARIABLE

BASE_VARIABLE = "FLASHINFER_WORKSPACE_BASE"
BELOW_BASE = (".cache", "flashinfer")


def base_directory(environment: Mapping[str, str]) -> Path:
    """The directory below which the library's own lies. Raises `CompilerUnavailable` for a relative one."""
    named = environment.get(FLASHINFER_CACHE_VARIABLE)
    base = environment.get(BASE_VARIABLE) or environment.get("HOME", "")
    if named:
        if Path(named).parts[-len(BELOW_BASE) :] != BELOW_BASE:
            raise CompilerUnavailable(
                f"{FLASHINFER_CACHE_VARIABLE}={named} does not end in {'/'.join(BELOW_BASE)}, where "
                f"FlashInfer looks; set {BASE_VARIABLE} to the directory above, here and in the engine"
            )
        base = str(Path(named).parents[len(BELOW_BASE) - 1])
    if not Path(base).is_absolute():
        raise CompilerUnavailable(
            f"{BASE_VARIABLE} or HOME is {base!r}; set {BASE_VARIABLE} to an absolute directory, here "
            "and in the engine"
        )
    return Path(base)
