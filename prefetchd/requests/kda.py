"""The requests of the KDA family (Kimi Delta Attention): the recurrence and the kernels around it in a layer.

KDA's gate decays every key channel by itself, so it is as wide as the keys. Shared fields are in
`delta.py`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from prefetchd.request import Size, SizeOrDefault
from prefetchd.requests.delta import (
    ChunkRecurrence,
    Delta,
    Dtype,
    Gate,
    GatedNorm,
    PackedDecode,
    ShortConvolution,
    StepRecurrence,
)

# The least decay of a bounded gate, in log space; 0 is an unbounded one. Libraries take -5 to below 0.
LowerBound = Annotated[int, msgspec.Meta(ge=-5, le=0)]


class ChunkKda(ChunkRecurrence, frozen=True, kw_only=True, tag="chunk_kda"):
    """Prefill."""

    safe_gate: bool = False
    lower_bound: LowerBound = 0
    a_log: bool = True


class FusedRecurrentKda(StepRecurrence, frozen=True, kw_only=True, tag="fused_recurrent_kda"):
    """Single-token decode and multi-token verification."""

    lower_bound: LowerBound = 0
    a_log: bool = True


class KdaPackedDecode(PackedDecode, frozen=True, kw_only=True, tag="fused_recurrent_kda_packed_decode"):
    """The decode step of vLLM and SGLang."""

    lower_bound: LowerBound = 0


class FusedKdaDecode(Delta, frozen=True, kw_only=True, tag="fused_kda_decode"):
    """FlashInfer's decode step with the convolution before it and the norm behind it in one kernel."""

    heads: Size
    key_dim: Size
    pool: SizeOrDefault = 0
    state_dtype: Dtype = "float32"
    lower_bound: LowerBound = -5


class KdaGate(Gate, frozen=True, kw_only=True, tag="fused_kda_gate"):
    """The gate of every key channel."""

    key_dim: Size
    lower_bound: LowerBound = 0
    a_log: bool = True


class KdaShortConvolution(ShortConvolution, frozen=True, kw_only=True, tag="kda_short_conv"):
    """The short convolution of q, k or v in a KDA layer."""


class KdaGatedNorm(GatedNorm, frozen=True, kw_only=True, tag="kda_gated_norm"):
    """The output norm of a KDA layer."""


class KdaStateCommit(Delta, frozen=True, kw_only=True, tag="kda_state_commit"):
    """Keeping, of the states after each draft, the one that a suspended or verified sequence goes on from.

    For homes that have a kernel for it. All `layers` are done at once, `slots` is the size of their pool,
    and `tokens` counts the sequences, each with `drafts` states.
    """

    heads: Size
    key_dim: Size
    value_dim: Size
    layers: Size
    slots: Size
    drafts: Size
    state_dtype: Dtype = "float32"
