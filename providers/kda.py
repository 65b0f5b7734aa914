"""KDA (Kimi Delta Attention): the chunked prefill, the recurrent steps and the kernels around them.

fla's kernels, or an engine's copy of them, are told apart by their flags: with or without an initial state,
the gate inside or outside, dtypes and index types. Of the batch only the bucket of the token count matters in
fla, through the norms. So the universe is one packed request for each set of flags and bucket, plus the steps
that no warm-up forward reaches: decode and the verification of drafts.

Committing states, when a sequence is suspended or drafts are verified, is a kernel in SGLang alone: fla has
none, and vLLM copies states by torch's own indexing, which compiles nothing.
"""

from __future__ import annotations

from typing import ClassVar

from prefetchd.protocol import op_of
from prefetchd.requests.delta import Delta
from prefetchd.requests.kda import (
    ChunkKda,
    FusedKdaDecode,
    FusedRecurrentKda,
    KdaGate,
    KdaGatedNorm,
    KdaPackedDecode,
    KdaShortConvolution,
    KdaStateCommit,
)

from .delta_provider import CuteProvider, DeltaProvider

KINDS: tuple[type[Delta], ...] = (
    ChunkKda,
    FusedRecurrentKda,
    KdaPackedDecode,
    KdaGate,
    KdaShortConvolution,
    KdaGatedNorm,
    KdaStateCommit,
)


class KdaProvider(DeltaProvider):
    """The KDA family."""

    name: ClassVar[str] = "kda"
    kinds: ClassVar[dict[str, type[Delta]]] = {op_of(kind): kind for kind in KINDS}


class KdaCuteProvider(CuteProvider):
    """The same family where its kernels are CuTe DSL: FlashInfer, TensorRT-LLM, and modules by their path."""

    name: ClassVar[str] = "kda_cute"
    kinds: ClassVar[dict[str, type[Delta]]] = {
        op_of(kind): kind for kind in (ChunkKda, FusedRecurrentKda, FusedKdaDecode)
    }
