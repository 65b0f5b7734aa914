"""From a model's configuration, as an engine has it in memory, to the profile of a rank of that engine.

The sizes come from the tables that `warm` uses too. What differs between engines is where their copies of the
kernels live and how these are called. The subtle rule: nothing here may keep an engine from being attached. A
model that no table knows gets a profile without sites, and is planned for by what the engine's modules say,
or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from prefetchd.profiles import KernelSite, Profile, ProfileError, profile_from_config
from prefetchd.profiles.model_config import CONTEXT_TOKENS

log = logging.getLogger("prefetchd")

# For one op of the tables, the ops an engine really calls and the flag set of each.
Calls = Mapping[str, tuple[tuple[str, str], ...]]


class Engine(NamedTuple):
    """How an engine runs kernels: its name for homes and flag sets, and where it calls other ops as well."""

    name: str
    calls: Calls


def engine_profile(
    fields: Mapping[str, Any], model: str, engine: Engine, *, tp: int, ep: int, dp: int
) -> Profile:
    """The profile of a configuration's fields on one rank. A configuration that gives none is no error."""
    # Unknown quantization: DeepGEMM has no part in it, while the other kernels stay as they are.
    for quantization in (None, "bf16"):
        try:
            found = profile_from_config(fields, quantization=quantization, tp=tp, ep=ep, dp=dp)
        except ProfileError as error:
            log.info("prefetchd: %s: the configuration gives no sites: %s", model, error)
            continue
        return msgspec.structs.replace(
            found,
            model=model,
            # Unquantized products go to cuBLAS.
            gemms=found.gemms if found.quantization == "fp8" else (),
            kernels=tuple(_as_called(found.kernels, engine)),
        )
    return Profile(
        model=model,
        architecture=", ".join(map(str, fields.get("architectures") or ())) or "unknown",
        quantization="fp8" if fields.get("quantization_config") else "bf16",
        context_tokens=CONTEXT_TOKENS,
        tp=tp,
        ep=ep,
        dp=dp,
    )


def _as_called(kernels: tuple[KernelSite, ...], engine: Engine) -> Iterator[KernelSite]:
    for site in kernels:
        usual = ((site.op, engine.name if "set" in site.flags else ""),)
        for op, flag_set in engine.calls.get(site.op, usual):
            yield msgspec.structs.replace(
                site,
                name=f"{site.name}.{op}.{flag_set}".rstrip("."),
                op=op,
                home=engine.name,
                flags={"set": flag_set} if flag_set else {},
            )
