"""What a shape log keeps of a CuTe variant, and how much of it is believed when it comes back.

An engine's observer writes a variant as plain fields (`recorded`); a replay makes a variant of them again.
In between lies a file that anyone may have written. The subtle rule: a record chooses among the places that
this installation knows (`cute/homes.py` and the settings), among values with a canonical form, for a dict
among the functions that may fill it (`cute/fillers.py`), and else among the functions and objects of
packages that are allowed. Nothing in it is a path, and no other module is reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from prefetchd.compilers.base import NotRebuildable
from prefetchd.compilers.cute_dsl_modes import Variant
from prefetchd.cute.artifacts import is_name
from prefetchd.cute.calls import Call
from prefetchd.cute.fillers import near
from prefetchd.cute.homes import Site, calling
from prefetchd.cute.hooks import Place
from prefetchd.kernel_packages import lies_in
from prefetchd.shapelog import Record


def recorded(place: Place, name: str, architecture: str, call: Call | None) -> dict[str, Any]:
    """A compile as a record's `rebuild` holds it."""
    variant = Variant(
        name=name,
        namespace=place.site.namespace,
        node=place.node,
        number=place.number,
        architecture=architecture,
        call=call,
    )
    fields: dict[str, Any] = msgspec.to_builtins(variant)
    return fields


def site_of(variant: Variant, known: Mapping[str, Site], packages: tuple[str, ...]) -> Site | None:
    """Where the variant's kernel is kept; None where that is no place known here. Imports nothing."""
    site = known.get(variant.namespace)
    call = variant.call
    if site is None and call is not None and lies_in(call.module, packages):
        named = calling(call.module, call.function)
        return named if named.namespace == variant.namespace else None
    return site


def variant_of(
    record: Record, architecture: str, known: Mapping[str, Site], packages: tuple[str, ...] = ()
) -> Variant:
    """The variant of a record, if it may be compiled here. Raises `NotRebuildable`. Imports nothing."""
    if not record.ok:
        raise NotRebuildable("ok: false: the engine's own compile of it failed, and so would ours")
    if record.rebuild is None:
        raise NotRebuildable("rebuild: absent: its key has no form as text; trace its request instead")
    try:
        variant = msgspec.convert(record.rebuild, Variant)
    except msgspec.ValidationError as error:
        raise NotRebuildable(f"rebuild: {error}") from error
    if not is_name(record.key) or variant.name != record.key:
        raise NotRebuildable(f"key: {record.key[:80]!r} is not the name that rebuild.name gives")
    site = site_of(variant, known, packages)
    if site is None:
        raise NotRebuildable(
            f"rebuild.namespace: {variant.namespace[:120]!r} is no place of compiled kernels that is known "
            "here; name it in cute_dicts or cute_functions, or its package in replay_packages"
        )
    if variant.architecture != architecture:
        raise NotRebuildable(
            f"rebuild.architecture: {variant.architecture[:32]!r}, and this target is {architecture}; replay "
            "it on the target it was recorded on"
        )
    if site.kind == "dict" and (variant.call is None or not near(site, variant.call.module)):
        raise NotRebuildable(
            "rebuild.call: a key of a dict is compiled from a call of the dict's own package, and the record "
            "names none; trace its request instead"
        )
    return variant
