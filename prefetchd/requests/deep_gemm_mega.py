"""The requests of DeepGEMM's fused ("mega") kernels: a whole expert layer, gate or hyper-connection in one.

A mega-MoE kernel spans the ranks of an expert-parallel group; what one rank compiles depends on their
number and on the capacity of the shared buffer, not on which rank it is.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from prefetchd.request import Size
from prefetchd.requests.deep_gemm import DeepGemmRequest


class MegaMoe(DeepGemmRequest, frozen=True, kw_only=True):
    """`tokens` of at most `max_tokens` a rank; `experts` over all `ranks`, `top_k` of them for each token."""

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    max_tokens: Size
    experts: Size
    top_k: Size
    hidden: Size
    intermediate: Size
    ranks: Size = 1


class Fp8MegaMoe(MegaMoe, frozen=True, kw_only=True, tag="fp8_mega_moe"):
    """FP8 experts with 128 x 128 scales, for sm_90."""


class Fp8Fp4MegaMoe(MegaMoe, frozen=True, kw_only=True, tag="fp8_fp4_mega_moe"):
    """FP8 activations, experts in FP4 or FP8 with 1 x 32 scales."""

    experts_type: Literal["fp4", "fp8"] = "fp4"


class Bf16MegaMoe(MegaMoe, frozen=True, kw_only=True, tag="bf16_mega_moe"):
    """BF16 throughout."""


class MegaGate(DeepGemmRequest, frozen=True, kw_only=True, tag="bf16_mega_gate"):
    """The router's product and its top-k; `biased` adds a correction bias to the scores."""

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    experts: Size
    hidden: Size
    top_k: Size
    biased: bool = False


class MegaHyperConnection(DeepGemmRequest, frozen=True, kw_only=True, tag="mega_mhc"):
    """Mixing of the residual routes with the next RMS norm, whose result may be FP8 with 1 x 32 scales."""

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    hidden: Size
    routes: Size = 4
    sinkhorn_iterations: Size = 20
    fp8: bool = False
    shifted: bool = False
