"""Everything beside a kernel's own key that its compiled form depends on, as two digests.

The *environment* is the DSL with its libraries, Python, the DSL's settings, the architecture and the
device's numbers, since kernels are traced with its SM count. The *source* is every .py file of the packages a
kernel is written in, because a key may leave out constants of that text. The subtle rule: both are computed
from what the process really has, in the engine and in the helper, never handed from one to the other; where
they differ, nothing is found and nothing wrong is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from prefetchd.targets import Target

DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
ARCHITECTURE_VARIABLE = "CUTE_DSL_ARCH"
# The one part of the DSL's own key text that is a path.
_LIBRARIES = re.compile(r"shared_libs=(?:'[^']*'|\"[^\"]*\"|[^;]*);")
# Variables of the DSL that change nothing in a kernel, in a DSL that does not say so itself.
_IDLE = ("LIBS", "CACHE_DIR", "DUMP_DIR", "ARCH", "LOG", "NO_CACHE", "DISABLE_FILE_CACHING", "JIT_CACHE")
# What of a target the traced code can ask for.
DEVICE_FIELDS = (
    "major",
    "minor",
    "sm_count",
    "shared_bytes_per_block_optin",
    "shared_bytes_per_sm",
    "registers_per_sm",
    "l2_bytes",
)


def architecture_of(target: Target, environment: Mapping[str, str]) -> str:
    """The architecture an engine with this environment compiles for: its variable, else the device's own.

    Raises `ValueError` when the variable names another device's.
    """
    own = f"sm_{target.capability}{'a' if target.major >= 9 else ''}"
    named = environment.get(ARCHITECTURE_VARIABLE)
    if not named:
        return own
    if re.fullmatch(rf"sm_{target.capability}[af]?", named) is None:
        raise ValueError(
            f"{ARCHITECTURE_VARIABLE}={named} and the target {target.name} is {own}; unset it, here and in "
            "the engine"
        )
    return named


def versions() -> dict[str, str]:
    """The installed distributions that take part, by name; an absent one is left out."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment_fingerprint(target: Target, architecture: str, settings: str) -> dict[str, str]:
    """By named field, so that a difference can be told. `settings` as `dsl_settings` gives it."""
    return {
        "python": f"{sys.implementation.cache_tag}-{os.uname().machine}",
        **versions(),
        "architecture": architecture,
        "settings": settings,
        **{f"device.{field}": str(getattr(target, field)) for field in DEVICE_FIELDS},
    }


def dsl_settings(manager: Any, environment: Mapping[str, str]) -> str:
    """What of the DSL's settings changes a compile; `manager` is its own object of them, or None.

    Where no DSL is imported, and in a DSL that keeps no such text, they are the variables.
    """
    if manager is not None and hasattr(manager, "cache_key_str"):
        return _LIBRARIES.sub("", manager.cache_key_str())
    chosen = {
        name: value
        for name, value in environment.items()
        if name.startswith("CUTE_DSL_") and not any(place in name for place in _IDLE)
    }
    return "".join(f"{name}={value};" for name, value in sorted(chosen.items()))


def digest(parts: Mapping[str, str]) -> str:
    """One digest of named fields."""
    text = "\0".join(f"{name}\0{value}" for name, value in sorted(parts.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def source_fingerprint(packages: Iterable[str]) -> str:
    """The digest of every .py file of these packages or modules. Raises `LookupError` for one not found."""
    return hashlib.sha256("".join(_package_digest(name) for name in packages).encode()).hexdigest()


@lru_cache(maxsize=64)
def _package_digest(name: str) -> str:
    whole = hashlib.sha256(name.encode())
    for place, root in _places(name):
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for file in files:
            whole.update(f"\0{file.relative_to(root)}\0".encode())
            whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def _places(name: str) -> list[tuple[Path, Path]]:
    """The directories of a package, or the file of a module, each with what names in it are relative to."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        return [(Path(place), Path(place)) for place in spec.submodule_search_locations]
    if spec is not None and spec.origin and Path(spec.origin).suffix == ".py":
        return [(Path(spec.origin), Path(spec.origin).parent)]
    raise LookupError(f"the package {name} has no source here; a kernel in it cannot be keyed")
