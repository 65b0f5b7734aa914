"""The grouped products of mixtures of experts: contiguous, masked, and grouped along K."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import deep_gemm
import torch

from prefetchd.requests.deep_gemm import (
    Bf16GroupedContiguousNn,
    Bf16GroupedContiguousNt,
    Bf16GroupedMaskedNt,
    Fp8Fp4GroupedContiguousNt,
    Fp8Fp4GroupedMaskedNt,
    Fp8GroupedContiguousNn,
    Fp8GroupedContiguousNt,
    Fp8GroupedMaskedNt,
    GroupedContiguous,
    GroupedMasked,
)

from .dense import FP4_GRAN_K
from .driver import BF16, FP4, FP8, INT, Call, Driver, drives, given
from .scales import activation_scales, weight_scales

# Rows reserved for a group when the request does not say: one tile. The reserve is a tensor size, and no
# kernel is chosen by it.
MASKED_ROWS = 128


def layout(driver: Driver, request: GroupedContiguous) -> torch.Tensor:
    """The group of each row, or with `psum` the end of each group."""
    return driver.tensor("layout", INT, request.groups if request.psum else request.m)


@contextmanager
def alignment(rows: int) -> Iterator[None]:
    """The library's alignment of groups, for one call; 0 leaves it as it is."""
    if not rows:
        yield
        return
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(rows)
    try:
        yield
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(before)


def contiguous_options(request: GroupedContiguous) -> dict[str, object]:
    """Keyword arguments that all contiguous ops share."""
    return given(
        compiled_dims=request.compiled_dims,
        use_psum_layout=request.psum or None,
        expected_m_for_psum_layout=request.expected_m or None,
    )


@drives(Fp8GroupedContiguousNt, Fp8GroupedContiguousNn)
def fp8_contiguous(
    driver: Driver, call: Call, request: Fp8GroupedContiguousNt | Fp8GroupedContiguousNn
) -> None:
    """FP8 experts; `nn` gets transposed weights, which sm_90 only takes as views of K-major ones."""
    groups, m, n, k = request.groups, request.m, request.n, request.k
    sfa = activation_scales(driver, m, k, request.scales, request.scale_layout)
    sfb = weight_scales(driver, n, k, request.scales, 128, groups=groups)
    b = driver.weight("b", FP8, groups, n, k)
    if isinstance(request, Fp8GroupedContiguousNn):
        b, sfb = (driver.weight("b", FP8, groups, k, n) if driver.major >= 10 else b.mT), sfb.mT
    with alignment(request.alignment):
        call(
            (driver.tensor("a", FP8, m, k), sfa),
            (b, sfb),
            driver.tensor("d", BF16, m, n),
            layout(driver, request),
            **contiguous_options(request),
        )


@drives(Fp8Fp4GroupedContiguousNt, majors=(10, 12))
def fp8_fp4_contiguous(driver: Driver, call: Call, request: Fp8Fp4GroupedContiguousNt) -> None:
    """FP8 activations, FP4 experts."""
    groups, m, n, k = request.groups, request.m, request.n, request.k
    sfa = activation_scales(driver, m, k, request.scales, request.scale_layout, gran_k=request.gran_k)
    sfb = weight_scales(driver, n, k, request.scales, 1, gran_k=FP4_GRAN_K, groups=groups)
    with alignment(request.alignment):
        call(
            (driver.tensor("a", FP8, m, k), sfa),
            (driver.weight("b", FP4, groups, n, k // 2), sfb),
            driver.tensor("d", BF16, m, n),
            layout(driver, request),
            recipe_a=(1, request.gran_k),
            recipe_b=(1, FP4_GRAN_K),
            **contiguous_options(request),
        )


@drives(Bf16GroupedContiguousNt, Bf16GroupedContiguousNn)
def bf16_contiguous(
    driver: Driver, call: Call, request: Bf16GroupedContiguousNt | Bf16GroupedContiguousNn
) -> None:
    """BF16 experts."""
    groups, m, n, k = request.groups, request.m, request.n, request.k
    transposed = isinstance(request, Bf16GroupedContiguousNn)
    with alignment(request.alignment):
        call(
            driver.tensor("a", BF16, m, k),
            driver.weight("b", BF16, groups, *((k, n) if transposed else (n, k))),
            driver.tensor("d", BF16, m, n),
            layout(driver, request),
            **contiguous_options(request),
        )


def masked_tensors(driver: Driver, request: GroupedMasked) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The rows reserved for a group, D, and the tensor of used rows."""
    m = request.m or MASKED_ROWS
    d = driver.tensor("d", BF16, request.groups, m, request.n)
    return m, d, driver.weight("masked_m", INT, request.groups)


@drives(Fp8GroupedMaskedNt, other_names=("fp8_m_grouped_gemm_nt_masked",))
def fp8_masked(driver: Driver, call: Call, request: Fp8GroupedMaskedNt) -> None:
    """FP8 experts."""
    groups, n, k = request.groups, request.n, request.k
    m, d, used = masked_tensors(driver, request)
    sfa = activation_scales(driver, m, k, request.scales, request.scale_layout, groups=groups)
    sfb = weight_scales(driver, n, k, request.scales, 128, groups=groups)
    call(
        (driver.tensor("a", FP8, groups, m, k), sfa),
        (driver.weight("b", FP8, groups, n, k), sfb),
        d,
        used,
        request.expected_m,
        **given(compiled_dims=request.compiled_dims),
    )


@drives(Fp8Fp4GroupedMaskedNt, majors=(10, 12))
def fp8_fp4_masked(driver: Driver, call: Call, request: Fp8Fp4GroupedMaskedNt) -> None:
    """FP8 activations, FP4 experts."""
    groups, n, k = request.groups, request.n, request.k
    m, d, used = masked_tensors(driver, request)
    sfa = activation_scales(
        driver, m, k, request.scales, request.scale_layout, gran_k=request.gran_k, groups=groups
    )
    sfb = weight_scales(driver, n, k, request.scales, 1, gran_k=FP4_GRAN_K, groups=groups)
    call(
        (driver.tensor("a", FP8, groups, m, k), sfa),
        (driver.weight("b", FP4, groups, n, k // 2), sfb),
        d,
        used,
        request.expected_m,
        recipe_a=(1, request.gran_k),
        recipe_b=(1, FP4_GRAN_K),
        **given(compiled_dims=request.compiled_dims),
    )


@drives(Bf16GroupedMaskedNt)
def bf16_masked(driver: Driver, call: Call, request: Bf16GroupedMaskedNt) -> None:
    """BF16 experts."""
    groups, n, k = request.groups, request.n, request.k
    m, d, used = masked_tensors(driver, request)
    call(
        driver.tensor("a", BF16, groups, m, k),
        driver.weight("b", BF16, groups, n, k),
        d,
        used,
        request.expected_m,
        **given(compiled_dims=request.compiled_dims),
    )
