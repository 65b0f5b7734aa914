"""Scale factors in the layouts that engines pass.

The library wants activation scales with rows fastest and a row pitch that TMA can load. Given anything
else it first launches a layout kernel of its own - a kernel like any other, compiled on first use, and
keyed by K alone. So the layout is part of a request.
"""

from __future__ import annotations

import torch

from prefetchd.provider import Unavailable
from prefetchd.requests.deep_gemm import ScaleLayout, Scales

from .driver import FLOAT, INT, Driver, align, ceil_div

# Exponents of one byte in a 32-bit word.
PACKED = 4
# TMA loads rows of 16 bytes: four words of scale factors.
TMA_WORDS = 4


def packed(driver: Driver, scales: Scales) -> bool:
    """Whether the request means packed UE8M0 scales on this device. Raises `Unavailable` for sm_90."""
    if scales == "auto":
        return bool(driver.major >= 10)
    if scales == "ue8m0" and driver.major < 10:
        raise Unavailable(
            f"packed UE8M0 scales are for sm_100 and newer; {driver.device()} takes float32 ones"
        )
    return scales == "ue8m0"


def activation_scales(
    driver: Driver,
    rows: int,
    k: int,
    scales: Scales,
    layout: ScaleLayout,
    *,
    gran_k: int = 128,
    groups: int | None = None,
    role: str = "sfa",
) -> torch.Tensor:
    """One scale for each row and `gran_k` of K; with `groups` the same for each group."""
    is_packed = packed(driver, scales)
    dtype = INT if is_packed else FLOAT
    width = ceil_div(k, gran_k * PACKED) if is_packed else ceil_div(k, gran_k)
    if layout == "rows":
        shape, strides = (rows, width), (width, 1)
        pitch = rows
    else:
        pitch = align(rows, TMA_WORDS) if layout == "tma" else rows
        shape, strides = (rows, width), (1, pitch)
    if groups is None:
        return driver.strided(role, dtype, shape, strides)
    return driver.strided(role, dtype, (groups, *shape), (pitch * width, *strides))


def weight_scales(
    driver: Driver,
    n: int,
    k: int,
    scales: Scales,
    block: int,
    *,
    gran_k: int = 128,
    groups: int | None = None,
) -> torch.Tensor:
    """Weight scales as an engine holds them after loading: float32 blocks, or one packed row for each N."""
    if packed(driver, scales) or block == 1:
        return activation_scales(driver, n, k, scales, "tma", gran_k=gran_k, groups=groups, role="sfb")
    shape = (ceil_div(n, block), ceil_div(k, gran_k))
    return driver.weight("sfb", FLOAT, *(shape if groups is None else (groups, *shape)))


def recipe(driver: Driver, scales: Scales, block: int) -> tuple[int, int, int] | None:
    """What to pass as `recipe`: nothing where the library infers it from the scales' types."""
    return (1, 1, 128) if block == 1 and not packed(driver, scales) else None
