"""The requests of the gated delta rule (GDN, as in Qwen3-Next): the recurrence and the kernels around it.

GDN's gate is one number for each value head. Shared fields are in `delta.py`.
"""

from __future__ import annotations

from prefetchd.requests.delta import (
    ChunkRecurrence,
    Gate,
    GatedNorm,
    PackedDecode,
    ShortConvolution,
    StepRecurrence,
)


class ChunkGatedDeltaRule(ChunkRecurrence, frozen=True, kw_only=True, tag="chunk_gated_delta_rule"):
    """Prefill."""


class FusedRecurrentGatedDeltaRule(
    StepRecurrence, frozen=True, kw_only=True, tag="fused_recurrent_gated_delta_rule"
):
    """Single-token decode and multi-token verification, the gate computed before or inside."""


class FusedSigmoidGatingUpdate(
    StepRecurrence, frozen=True, kw_only=True, tag="fused_sigmoid_gating_delta_rule_update"
):
    """The decode step of vLLM and SGLang, with gate and beta computed inside from the raw projections."""


class GdnPackedDecode(
    PackedDecode, frozen=True, kw_only=True, tag="fused_recurrent_gated_delta_rule_packed_decode"
):
    """The newer decode step of vLLM and SGLang."""


class GdnGate(Gate, frozen=True, kw_only=True, tag="fused_gdn_gate"):
    """The gate of every value head."""


class GdnShortConvolution(ShortConvolution, frozen=True, kw_only=True, tag="gdn_short_conv"):
    """The short convolution of a GDN layer, over q, k and v together or one by one."""


class GdnGatedNorm(GatedNorm, frozen=True, kw_only=True, tag="gdn_gated_norm"):
    """The output norm of a GDN layer."""
