"""GDN, the gated delta rule of Qwen3-Next: the machinery of KDA with another gate and other entry points.

The engines decode by kernels that compute gate and beta themselves, which fla does not have:
`fused_sigmoid_gating_delta_rule_update`, and newer ones on packed q, k and v. fla's own recurrence takes
either.
"""

from __future__ import annotations

from typing import ClassVar

from prefetchd.protocol import op_of
from prefetchd.requests.delta import Delta
from prefetchd.requests.gdn import (
    ChunkGatedDeltaRule,
    FusedRecurrentGatedDeltaRule,
    FusedSigmoidGatingUpdate,
    GdnGate,
    GdnGatedNorm,
    GdnPackedDecode,
    GdnShortConvolution,
)

from .delta_provider import CuteProvider, DeltaProvider

KINDS: tuple[type[Delta], ...] = (
    ChunkGatedDeltaRule,
    FusedRecurrentGatedDeltaRule,
    FusedSigmoidGatingUpdate,
    GdnPackedDecode,
    GdnGate,
    GdnShortConvolution,
    GdnGatedNorm,
)


class GdnProvider(DeltaProvider):
    """The gated-delta-rule family."""

    name: ClassVar[str] = "gdn"
    kinds: ClassVar[dict[str, type[Delta]]] = {op_of(kind): kind for kind in KINDS}


class GdnCuteProvider(CuteProvider):
    """The same family where its kernels are CuTe DSL."""

    name: ClassVar[str] = "gdn_cute"
    kinds: ClassVar[dict[str, type[Delta]]] = {
        op_of(kind): kind for kind in (ChunkGatedDeltaRule, FusedRecurrentGatedDeltaRule)
    }
