"""Products grouped along K, batched products by expression, hyper-connections, and scale conversion."""

from __future__ import annotations

import torch

from prefetchd.requests.deep_gemm import (
    Bf16KGroupedTn,
    Einsum,
    Fp4KGroupedNt,
    Fp8Einsum,
    Fp8KGroupedNt,
    Fp8KGroupedTn,
    HcPrenormGemm,
    KGrouped,
    TransformScales,
)

from .dense import DTYPES, FP4_GRAN_K, deterministic
from .driver import BF16, FLOAT, FP4, FP8, INT, Call, Driver, ceil_div, drives, given
from .grouped import alignment
from .scales import activation_scales, packed, weight_scales

# The FP4 kernel reads K in steps of 256, and the library refuses a smaller alignment of the groups.
FP4_ALIGNMENT = 256


def k_grouped_call(
    driver: Driver,
    call: Call,
    request: KGrouped,
    a: object,
    b: object,
    *,
    recipe: tuple[int, int, int] | None = None,
) -> None:
    """The call that all of them make: equal groups, whose sizes go in on the host and on the device."""
    groups = request.groups
    d = driver.tensor("d", FLOAT, groups, request.m, request.n)
    call(
        a,
        b,
        d,
        [request.k] * groups,
        driver.weight("layout", INT, groups),
        d if request.accumulate else None,
        **given(recipe=recipe, compiled_dims=request.compiled_dims, use_psum_layout=request.psum or None),
    )


@drives(Fp8KGroupedTn, majors=(10,))
def fp8_k_grouped_tn(driver: Driver, call: Call, request: Fp8KGroupedTn) -> None:
    """K outermost, float32 scales that the library packs itself."""
    total = request.groups * request.k
    rows = total // request.gran_k
    k_grouped_call(
        driver,
        call,
        request,
        (driver.tensor("a", FP8, total, request.m), driver.tensor("sfa", FLOAT, rows, request.m)),
        (driver.tensor("b", FP8, total, request.n), driver.tensor("sfb", FLOAT, rows, request.n)),
        recipe=(1, 1, request.gran_k),
    )


@drives(Fp8KGroupedNt, majors=(9,))
def fp8_k_grouped_nt(driver: Driver, call: Call, request: Fp8KGroupedNt) -> None:
    """Groups of K-major matrices one after another in a flat tensor."""
    total = request.groups * request.k
    rows = total // 128
    k_grouped_call(
        driver,
        call,
        request,
        (driver.tensor("a", FP8, total * request.m), driver.tensor("sfa", FLOAT, rows, request.m)),
        (driver.tensor("b", FP8, total * request.n), driver.tensor("sfb", FLOAT, rows, request.n)),
    )


@drives(Fp4KGroupedNt, majors=(10,))
def fp4_k_grouped_nt(driver: Driver, call: Call, request: Fp4KGroupedNt) -> None:
    """Packed FP4, all groups along one K."""
    total = request.groups * request.k
    rows = total // FP4_GRAN_K
    with alignment(FP4_ALIGNMENT):
        k_grouped_call(
            driver,
            call,
            request,
            (driver.tensor("a", FP4, request.m, total // 2), driver.tensor("sfa", FLOAT, rows, request.m)),
            (driver.tensor("b", FP4, request.n, total // 2), driver.tensor("sfb", FLOAT, rows, request.n)),
        )


@drives(Bf16KGroupedTn, majors=(9, 10))
def bf16_k_grouped_tn(driver: Driver, call: Call, request: Bf16KGroupedTn) -> None:
    """K outermost."""
    total = request.groups * request.k
    a, b = driver.tensor("a", BF16, total, request.m), driver.tensor("b", BF16, total, request.n)
    k_grouped_call(driver, call, request, a, b)


# The letters of each expression that stand for the batch, the rows, the columns and the sum.
ROLES = {
    "bhr,hdr->bhd": ("h", "b", "d", "r"),
    "bhd,hdr->bhr": ("h", "b", "r", "d"),
    "bhd,bhr->hdr": ("h", "d", "r", "b"),
    "bmk,bnk->mn": ("b", "m", "n", "k"),
}


def operands(expr: str, groups: int, m: int, n: int, k: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of A, B and D that an expression means for `groups` products of m x k and n x k."""
    left, rest = expr.split(",")
    right, out = rest.split("->")
    batch, rows, columns, summed = ROLES[expr]
    sizes = {batch: groups, rows: m, columns: n, summed: k}
    return tuple(tuple(sizes[letter] for letter in letters) for letters in (left, right, out))


@drives(Einsum)
def einsum(driver: Driver, call: Call, request: Einsum) -> None:
    """BF16 in; the summed expression accumulates into float32, and without C it needs a BF16 result."""
    a, b, d = operands(request.expr, request.groups, request.m, request.n, request.k)
    out = driver.tensor("d", DTYPES[request.output], *d)
    with deterministic(request.deterministic):
        call(
            request.expr,
            driver.tensor("a", BF16, *a),
            driver.weight("b", BF16, *b),
            out,
            out if request.accumulate else None,
        )


@drives(Fp8Einsum)
def fp8_einsum(driver: Driver, call: Call, request: Fp8Einsum) -> None:
    """FP8 in: scales are laid out for the batched product and handed over in the expression's order."""
    groups, m, n, k = request.groups, request.m, request.n, request.k
    a, b, d = operands(request.expr, groups, m, n, k)
    sfa = activation_scales(driver, m, k, request.scales, request.scale_layout, groups=groups)
    sfb = weight_scales(driver, n, k, request.scales, request.weight_block, groups=groups)
    if request.expr == "bhd,bhr->hdr":
        sfa, sfb = sfa.permute(2, 0, 1), sfb.permute(2, 0, 1)
    else:
        sfa = sfa.permute(1, 0, 2)
        sfb = sfb.mT if request.expr == "bhd,hdr->bhr" else sfb
    out = driver.tensor("d", DTYPES[request.output], *d)
    row_scaled = packed(driver, request.scales) or request.weight_block == 1
    call(
        request.expr,
        (driver.tensor("a", FP8, *a), sfa),
        (driver.weight("b", FP8, *b), sfb),
        out,
        out if request.accumulate else None,
        (1, 1, 128) if row_scaled else (1, 128, 128),
    )


@drives(HcPrenormGemm)
def tf32_hc_prenorm_gemm(driver: Driver, call: Call, request: HcPrenormGemm) -> None:
    """BF16 rows, float32 weights; with splits one partial result each."""
    m, n, k, splits = request.m, request.n, request.k, request.splits
    lead = (splits,) if splits else ()
    call(
        driver.tensor("a", BF16, m, k),
        driver.weight("b", FLOAT, n, k),
        driver.tensor("d", FLOAT, *lead, m, n),
        driver.tensor("sums", FLOAT, *lead, m),
        splits or None,
    )


@drives(TransformScales)
def transform_scales(driver: Driver, call: Call, request: TransformScales) -> None:
    """Float32 weight scales of one matrix or of a group of them."""
    shape: tuple[int, ...] = (ceil_div(request.mn, request.block), ceil_div(request.k, request.gran_k))
    if request.groups:
        shape = (request.groups, *shape)
    sf: torch.Tensor = driver.tensor("sfb", FLOAT, *shape)
    call(sf, request.mn, request.k, (request.block, request.gran_k), request.groups or None)
