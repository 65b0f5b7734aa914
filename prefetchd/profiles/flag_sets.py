"""Named sets of the flags that callers pass to linear-attention kernels (`flag_sets.toml`).

Each flag is another variant, and which flags are used is a habit of the caller, not of the model. So a site
names its callers, and overrides what is different in a deployment. The subtle rule: a list as a value stands
for every value the caller passes, and all combinations are planned; a list for a flag that is itself a list
(the unaligned tensors) is the value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from itertools import product
from typing import Any

import msgspec

from prefetchd.profiles.sites import KernelSite

# The flag of a site that names its sets.
SET = "set"

Flags = dict[str, Any]


def flag_alternatives(site: KernelSite, list_flags: Iterable[str] = ()) -> list[Flags]:
    """Every combination of flags that the site's callers pass, each once.

    `list_flags` are the flags whose value is itself a list. Raises `ValueError` naming the site and the set.
    """
    own = {name: value for name, value in site.flags.items() if name != SET}
    kept = frozenset(list_flags)
    found: list[Flags] = []
    for flags in _sets(site):
        for combination in _combinations({**flags, **own}, kept):
            if combination not in found:
                found.append(combination)
    return found


def set_names(op: str) -> list[str]:
    """The ready-made sets that know an op."""
    return [name for name, ops in ready_made().items() if op in ops]


@lru_cache(maxsize=1)
def ready_made() -> Mapping[str, Mapping[str, Flags]]:
    """Flags by set and op, as the file has them."""
    return tomllib.loads(files("prefetchd.profiles").joinpath("flag_sets.toml").read_text(encoding="utf-8"))


def _sets(site: KernelSite) -> Iterator[Mapping[str, Any]]:
    named = site.flags.get(SET)
    if named is None:
        yield {}
        return
    for name in named if isinstance(named, tuple) else (named,):
        known = set_names(site.op)
        if name not in known:
            raise ValueError(
                f"site {site.name!r}: there is no flag set {name!r} for {site.op}; there are: "
                f"{', '.join(known) or 'none'}. Choose one of them, or leave `set` out and give the flags"
            )
        yield ready_made()[str(name)][site.op]


def _combinations(flags: Mapping[str, Any], kept: frozenset[str]) -> Iterator[Flags]:
    choices = [
        tuple(value) if isinstance(value, (list, tuple)) and name not in kept else (value,)
        for name, value in flags.items()
    ]
    for values in product(*choices):
        yield dict(zip(flags, values, strict=True))


def list_fields(kind: type[msgspec.Struct]) -> list[str]:
    """The fields of a request type whose value is a list."""
    return [field.name for field in msgspec.structs.fields(kind) if isinstance(field.default, tuple)]
