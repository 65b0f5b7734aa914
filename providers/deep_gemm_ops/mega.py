"""The fused kernels. Their symmetric buffer is an ordinary one here: no rank is there to write into it."""

from __future__ import annotations

from types import SimpleNamespace

import deep_gemm
import torch

from prefetchd.requests.deep_gemm_mega import (
    Bf16MegaMoe,
    Fp8Fp4MegaMoe,
    Fp8MegaMoe,
    MegaGate,
    MegaHyperConnection,
    MegaMoe,
)

from .driver import BF16, FLOAT, FP4, FP8, INT, Call, Driver, align, drives

# More than any expert layer needs; on the null device it is address space only.
BUFFER_BYTES = 1 << 34
# Elements of K behind one word of four exponents, at 1 x 32.
WORD = 128


def capacity_alignment(driver: Driver) -> int:
    """What the package's own buffer class rounds a capacity up to; it has no public name."""
    name = (
        "get_token_alignment_for_sm90_mega_moe" if driver.major == 9 else "get_token_alignment_for_mega_moe"
    )
    try:
        function = getattr(deep_gemm._C, name)
    except AttributeError:
        # Older packages align both architectures alike.
        function = deep_gemm._C.get_token_alignment_for_mega_moe
    return int(function())


def shared_buffer(driver: Driver, request: MegaMoe, types: str) -> SimpleNamespace:
    """What the ops read of a symmetric buffer: its memory as every rank sees it, and its configuration."""
    buffer = driver.weight("symmetric", torch.int8, BUFFER_BYTES)
    return SimpleNamespace(
        buffer=buffer,
        handle=SimpleNamespace(buffer_ptrs=[buffer.data_ptr()] * request.ranks),
        group=SimpleNamespace(rank=lambda: 0, size=lambda: request.ranks),
        num_max_tokens_per_rank=align(request.max_tokens, capacity_alignment(driver)),
        num_experts=request.experts,
        num_topk=request.top_k,
        mma_type=types,
    )


def matrices(driver: Driver, request: MegaMoe, dtype: torch.dtype, packed: int = 1) -> list[torch.Tensor]:
    """Gate and up in one, and down, of this rank's experts."""
    local, hidden, inner = request.experts // request.ranks, request.hidden, request.intermediate
    return [
        driver.weight("l1", dtype, local, 2 * inner, hidden // packed),
        driver.weight("l2", dtype, local, hidden, inner // packed),
    ]


@drives(Fp8MegaMoe, majors=(9,))
def fp8_mega_moe(driver: Driver, call: Call, request: Fp8MegaMoe) -> None:
    """Float32 scales in blocks."""
    local, hidden, inner = (
        request.experts // request.ranks,
        request.hidden // 128,
        request.intermediate // 128,
    )
    l1, l2 = matrices(driver, request, FP8)
    call(
        driver.tensor("y", BF16, request.tokens, request.hidden),
        (l1, driver.weight("l1_sf", FLOAT, local, 2 * inner, hidden)),
        (l2, driver.weight("l2_sf", FLOAT, local, hidden, inner)),
        shared_buffer(driver, request, "fp8xfp8"),
    )


def packed_scales(driver: Driver, role: str, groups: int, rows: int, k: int) -> torch.Tensor:
    """Rows fastest, a word for each 128 of K."""
    words = k // WORD
    return driver.strided(role, INT, (groups, rows, words), (rows * words, 1, rows))


@drives(Fp8Fp4MegaMoe, majors=(10,))
def fp8_fp4_mega_moe(driver: Driver, call: Call, request: Fp8Fp4MegaMoe) -> None:
    """Packed scales."""
    local, hidden, inner = request.experts // request.ranks, request.hidden, request.intermediate
    fp4 = request.experts_type == "fp4"
    l1, l2 = matrices(driver, request, FP4 if fp4 else FP8, 2 if fp4 else 1)
    call(
        driver.tensor("y", BF16, request.tokens, hidden),
        (l1, packed_scales(driver, "l1_sf", local, 2 * inner, hidden)),
        (l2, packed_scales(driver, "l2_sf", local, hidden, inner)),
        shared_buffer(driver, request, f"fp8x{request.experts_type}"),
    )


@drives(Bf16MegaMoe, majors=(10,))
def bf16_mega_moe(driver: Driver, call: Call, request: Bf16MegaMoe) -> None:
    """No scales."""
    l1, l2 = matrices(driver, request, BF16)
    y = driver.tensor("y", BF16, request.tokens, request.hidden)
    call(y, l1, l2, shared_buffer(driver, request, "bf16xbf16"))


@drives(MegaGate, majors=(10,))
def bf16_mega_gate(driver: Driver, call: Call, request: MegaGate) -> None:
    """Routed experts only, on rank 0, unscaled: numbers that are arguments of the kernel."""
    call(
        driver.tensor("x", BF16, request.tokens, request.hidden),
        driver.weight("gate", BF16, request.experts, request.hidden),
        request.top_k,
        False,
        0,
        1.0,
        0,
        bias=driver.weight("bias", FLOAT, request.experts) if request.biased else None,
    )


@drives(MegaHyperConnection, majors=(10,))
def mega_mhc(driver: Driver, call: Call, request: MegaHyperConnection) -> None:
    """The epsilons and scales are arguments of the kernel."""
    tokens, hidden, routes = request.tokens, request.hidden, request.routes
    outputs = routes * (routes + 2)
    result: dict[str, torch.Tensor] = {}
    if request.fp8:
        pitch = align(tokens, 4)
        result["y_fp8"] = driver.tensor("y", FP8, tokens, hidden)
        result["y_gemm_sf"] = driver.strided("y_sf", INT, (tokens, hidden // WORD), (1, pitch))
    else:
        result["y_bf16"] = driver.tensor("y", BF16, tokens, hidden)
    call(
        driver.tensor("x", BF16, tokens, hidden),
        driver.tensor("residual", BF16, tokens, routes, hidden),
        driver.tensor("prev_mix", FLOAT, tokens, routes, 1) if request.shifted else None,
        driver.tensor("post_mix", FLOAT, tokens, routes, 1),
        driver.tensor("res_mix", FLOAT, tokens, routes, routes),
        driver.weight("fn", FLOAT, outputs, routes * hidden),
        driver.weight("mix_scales", FLOAT, 3),
        driver.weight("mix_bases", FLOAT, outputs),
        routes,
        1e-6,
        1e-6,
        2.0,
        1e-6,
        request.sinkhorn_iterations,
        driver.weight("norm", BF16, hidden),
        1e-6,
        1.0,
        driver.tensor("new_residual", BF16, tokens, routes, hidden),
        driver.tensor("new_prev_mix", FLOAT, tokens, routes, 1) if request.shifted else None,
        driver.tensor("new_post_mix", FLOAT, tokens, routes, 1),
        driver.tensor("new_res_mix", FLOAT, tokens, routes, routes),
        **result,
    )
