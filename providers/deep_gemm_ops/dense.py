"""The dense products: FP8, FP8 x FP4, FP4 and BF16, in the four transpositions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import deep_gemm
import torch

from prefetchd.codec import op_of
from prefetchd.requests.deep_gemm import (
    Bf16Gemm,
    Bf16GemmNn,
    Bf16GemmNt,
    Bf16GemmTn,
    Bf16GemmTt,
    DenseGemm,
    Fp4GemmNt,
    Fp8Fp4GemmNt,
    Fp8Gemm,
    Fp8GemmNn,
    Fp8GemmNt,
    Fp8GemmNtSkipHeadMid,
    Fp8GemmTn,
    Fp8GemmTt,
)

from .driver import BF16, FLOAT, FP4, FP8, Call, Driver, drives, given
from .scales import activation_scales, recipe, weight_scales

DTYPES = {"bfloat16": BF16, "float32": FLOAT}
# FP4 is scaled by 1 x 32, whatever the other operand is.
FP4_GRAN_K = 32


def result(driver: Driver, request: DenseGemm) -> tuple[torch.Tensor, torch.Tensor | None]:
    """D, and C where the request accumulates: engines accumulate in place."""
    d = driver.tensor("d", DTYPES[request.output], request.m, request.n)
    return d, d if request.accumulate else None


@drives(Fp8GemmNt)
def fp8_gemm_nt(driver: Driver, call: Call, request: Fp8GemmNt) -> None:
    """Plain: what engines call."""
    m, n, k = request.m, request.n, request.k
    d, c = result(driver, request)
    sfa = activation_scales(driver, m, k, request.scales, request.scale_layout)
    sfb = weight_scales(driver, n, k, request.scales, request.weight_block)
    call(
        (driver.tensor("a", FP8, m, k), sfa),
        (driver.weight("b", FP8, n, k), sfb),
        d,
        c,
        **given(
            recipe=recipe(driver, request.scales, request.weight_block), compiled_dims=request.compiled_dims
        ),
    )


@drives(Fp8GemmNn, Fp8GemmTn, Fp8GemmTt)
def fp8_gemm_transposed(driver: Driver, call: Call, request: Fp8Gemm) -> None:
    """Operands (and scales) transposed: on sm_90, which only multiplies K-major ones, as views of such."""
    op = op_of(request)
    m, n, k = request.m, request.n, request.k
    d, c = result(driver, request)
    sfa = activation_scales(driver, m, k, request.scales, request.scale_layout)
    sfb = weight_scales(driver, n, k, request.scales, request.weight_block)
    a = driver.tensor("a", FP8, m, k)
    b = driver.weight("b", FP8, n, k)
    if op[-2] == "t":
        a, sfa = (driver.tensor("a", FP8, k, m) if driver.major >= 10 else a.T), sfa.T
    if op[-1] == "n":
        b, sfb = (driver.weight("b", FP8, k, n) if driver.major >= 10 else b.T), sfb.T
    call(
        (a, sfa),
        (b, sfb),
        d,
        c,
        **given(
            recipe=recipe(driver, request.scales, request.weight_block), compiled_dims=request.compiled_dims
        ),
    )


@drives(Fp8Fp4GemmNt, majors=(10, 12))
def fp8_fp4_gemm_nt(driver: Driver, call: Call, request: Fp8Fp4GemmNt) -> None:
    """Mixed: the two sides are scaled at different widths, so each has its recipe."""
    m, n, k = request.m, request.n, request.k
    d, c = result(driver, request)
    sfa = activation_scales(driver, m, k, request.scales, request.scale_layout, gran_k=request.gran_k)
    sfb = weight_scales(driver, n, k, request.scales, 1, gran_k=FP4_GRAN_K)
    call(
        (driver.tensor("a", FP8, m, k), sfa),
        (driver.weight("b", FP4, n, k // 2), sfb),
        d,
        c,
        recipe_a=(1, request.gran_k),
        recipe_b=(1, FP4_GRAN_K),
        **given(compiled_dims=request.compiled_dims),
    )


@drives(Fp4GemmNt, majors=(10, 12), other_names=("fp8_fp4_gemm_nt",))
def fp4_gemm_nt(driver: Driver, call: Call, request: Fp4GemmNt) -> None:
    """FP4 on both sides."""
    m, n, k = request.m, request.n, request.k
    d, c = result(driver, request)
    sfa = activation_scales(driver, m, k, request.scales, request.scale_layout, gran_k=FP4_GRAN_K)
    sfb = weight_scales(driver, n, k, request.scales, 1, gran_k=FP4_GRAN_K)
    call(
        (driver.tensor("a", FP4, m, k // 2), sfa),
        (driver.weight("b", FP4, n, k // 2), sfb),
        d,
        c,
        recipe_a=(1, FP4_GRAN_K),
        recipe_b=(1, FP4_GRAN_K),
        **given(compiled_dims=request.compiled_dims),
    )


@drives(Bf16GemmNt, Bf16GemmNn, Bf16GemmTn, Bf16GemmTt)
def bf16_gemm(driver: Driver, call: Call, request: Bf16Gemm) -> None:
    """All four: BF16 may be K-major or not on every architecture."""
    op = op_of(request)
    m, n, k = request.m, request.n, request.k
    d, c = result(driver, request)
    a = driver.tensor("a", BF16, k, m) if op[-2] == "t" else driver.tensor("a", BF16, m, k)
    b = driver.weight("b", BF16, k, n) if op[-1] == "n" else driver.weight("b", BF16, n, k)
    with deterministic(request.deterministic):
        call(a, b, d, c, **given(compiled_dims=request.compiled_dims))


@drives(Fp8GemmNtSkipHeadMid)
def fp8_gemm_nt_skip_head_mid(driver: Driver, call: Call, request: Fp8GemmNtSkipHeadMid) -> None:
    """The output has a gap in every head, so it is wider than N."""
    m, n, k = request.m, request.n, request.k
    split = request.left + request.right
    heads = n // split
    d = driver.tensor("d", BF16, m, heads * (split + request.middle))
    sfa = activation_scales(driver, m, k, request.scales, request.scale_layout)
    sfb = weight_scales(driver, n, k, request.scales, 128)
    call(
        (driver.tensor("a", FP8, m, k), sfa),
        (driver.weight("b", FP8, n, k), sfb),
        d,
        (request.left, request.middle, request.right),
    )


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """The library without cuBLASLt, for one call. Packages that lack the switch never use it unasked."""
    switch = getattr(deep_gemm, "use_deterministic_algorithms", None)
    if not wanted or switch is None:
        yield
        return
    # Some builds have the switch and no way to ask for its state, which is off unless someone turned it on.
    before = getattr(deep_gemm, "get_deterministic_algorithms", lambda: False)()
    switch(True)
    try:
        yield
    finally:
        switch(before)
