"""FlashInfer's public functions of KDA and of the gated delta rule.

Which kernel serves a prefill is the library's own choice by shape and device, unless `backend` names one, as
an engine may.
"""

from __future__ import annotations

from typing import Any

from prefetchd.provider import Unavailable
from prefetchd.requests.delta import ChunkRecurrence, Recurrence, StepRecurrence, sequence_lengths
from prefetchd.requests.kda import ChunkKda, FusedKdaDecode, FusedRecurrentKda

from ..linear_ops.tensors import Tensors, equal_lengths
from .calling import call

CONV = 4


def run_kda(request: ChunkKda | FusedRecurrentKda) -> None:
    """Prefill, or a step of one token for each sequence: one public function serves both."""
    call("flashinfer.kda", "recurrent_kda", kda_arguments(request))


def kda_arguments(request: ChunkKda | FusedRecurrentKda) -> dict[str, Any]:
    """The arguments of `recurrent_kda`. Raises `Unavailable` for what that function does not take."""
    tensors = Tensors(request.unaligned)
    if request.key_dim != request.value_dim:
        raise Unavailable("FlashInfer's KDA has keys and values of one size")
    lengths = sequence_lengths(request)
    step = isinstance(request, StepRecurrence)
    batch, tokens = (1, request.tokens) if request.varlen and not step else equal_lengths(lengths)
    heads, dim = request.heads, request.key_dim
    found: dict[str, Any] = {
        name: tensors.empty(name, (batch, tokens, heads, dim), request.dtype) for name in ("q", "k", "v")
    }
    found["g"] = tensors.empty("g", (batch, tokens, heads, dim), request.g_dtype)
    found["beta"] = tensors.empty("beta", (batch, tokens, heads), request.beta_dtype)
    if request.gate_in_kernel:
        found["A_log"] = tensors.empty("A_log", (heads,), "float32")
        found["dt_bias"] = tensors.empty("dt_bias", (heads * dim,), "float32")
    if request.varlen and not step:
        found["cu_seqlens"], _ = tensors.offsets(lengths, request.index_dtype)
    if request.initial_state:
        slots = (request.pool if isinstance(request, ChunkRecurrence) else 0) or len(lengths)
        shape = (slots, heads, dim, dim)
        found["initial_state"] = tensors.pool(
            "initial_state", shape, request.state_dtype, request.state_stride
        )
        if request.state_indices:
            indices = list(range(len(lengths)))
            found["ssm_state_indices"] = tensors.integers("ssm_state_indices", indices, "int32")
    tensors.check_names()
    return found | {
        "output_final_state": request.final_state,
        "use_qk_l2norm_in_kernel": request.qk_l2norm,
        "use_gate_in_kernel": request.gate_in_kernel,
        "lower_bound": float(request.lower_bound) if request.lower_bound else None,
        "beta_is_logit": request.beta_sigmoid,
        "backend": request.backend or "auto",
    }


def run_fused_decode(request: FusedKdaDecode) -> None:
    """The step with convolution and norm in one kernel."""
    tensors = Tensors(request.unaligned)
    heads, dim, rows = request.heads, request.key_dim, request.tokens
    width = heads * dim
    # Slot 0 is nobody's.
    slots = request.pool or rows + 1
    arguments = {
        "x": tensors.empty("x", (rows, 3 * width), request.dtype),
        "weight": tensors.empty("weight", (3, CONV, width), "float32"),
        "conv_state": tensors.empty("conv_state", (slots, 3 * width, CONV - 1), request.dtype),
        "raw_gate": tensors.empty("raw_gate", (1, rows, heads, dim), request.dtype),
        "raw_beta": tensors.empty("raw_beta", (1, rows, heads), request.dtype),
        "A_log": tensors.empty("A_log", (heads,), "float32"),
        "dt_bias": tensors.empty("dt_bias", (width,), "float32"),
        "state_indices": tensors.integers("state_indices", list(range(1, rows + 1)), "int32"),
        "state": tensors.empty("state", (slots, heads, dim, dim), request.state_dtype),
        "output_gate": tensors.empty("output_gate", (rows, heads, dim), request.dtype),
        "norm_weight": tensors.empty("norm_weight", (dim,), "float32"),
        "lower_bound": float(request.lower_bound) if request.lower_bound else None,
    }
    tensors.check_names()
    call("flashinfer.kda_decode", "fused_kda_decode", arguments)


def run_gdn(request: Recurrence) -> None:
    """Prefill of the gated delta rule; the library has no sequence of a batch but packed ones."""
    tensors = Tensors(request.unaligned)
    if not isinstance(request, ChunkRecurrence) or not request.varlen:
        raise Unavailable("FlashInfer's gated delta rule is called for packed prefills alone")
    lengths = sequence_lengths(request)
    values = request.value_heads or request.heads
    tokens, dim = request.tokens, request.key_dim
    gates = max(request.heads, values)
    found: dict[str, Any] = {
        "q": tensors.empty("q", (tokens, request.heads, dim), request.dtype),
        "k": tensors.empty("k", (tokens, request.heads, dim), request.dtype),
        "v": tensors.empty("v", (tokens, values, request.value_dim), request.dtype),
        "g": tensors.empty("g", (tokens, gates), "float32"),
        "beta": tensors.empty("beta", (tokens, gates), "float32"),
        "output_final_state": request.final_state,
        "use_qk_l2norm_in_kernel": request.qk_l2norm,
        "backend": request.backend or "auto",
    }
    found["cu_seqlens"], _ = tensors.offsets(lengths, request.index_dtype)
    if request.initial_state:
        shape = (request.pool or len(lengths), values, request.value_dim, dim)
        found["initial_state"] = tensors.empty("initial_state", shape, request.state_dtype)
    tensors.check_names()
    call("flashinfer.gdn_prefill", "chunk_gated_delta_rule", found)
