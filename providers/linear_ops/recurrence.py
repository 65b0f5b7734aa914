"""The calls of the recurrences: chunked prefill and recurrent steps, of KDA and of the gated delta rule.

One builder serves both, because their arguments have the same names in every home. What they differ in is the
gate: as wide as the keys in KDA, one number a value head in GDN. Flags that are off are left to the library's
own default, except the l2norm, whose default the homes do not agree on.
"""

from __future__ import annotations

from typing import Any

import torch

from prefetchd.delta_requests import ChunkRecurrence, Recurrence, StepRecurrence, sequence_lengths
from prefetchd.gdn_requests import FusedSigmoidGatingUpdate
from prefetchd.kda_requests import ChunkKda, FusedRecurrentKda
from prefetchd.protocol import op_of

from .homes import FLA, call, entry
from .tensors import Tensors, equal_lengths

# Slots beyond those in use, so that a pool is larger than the batch, as an engine's is.
SPARE_SLOTS = 1


def run_recurrence(request: Recurrence) -> None:
    """One call of the home's prefill or step function."""
    tensors = Tensors(request.unaligned)
    arguments = _inputs(request, tensors) | _gate(request, tensors) | _state(request, tensors)
    arguments |= _flags(request)
    if isinstance(request, ChunkRecurrence) and request.chunk_size:
        arguments["chunk_size"] = request.chunk_size
    tensors.check_names()
    call(request.home, _function(request, arguments), arguments)


def run_gating_update(request: FusedSigmoidGatingUpdate) -> None:
    """The engines' decode step, which takes raw projections `a` and `b` for the gate and beta."""
    tensors = Tensors(request.unaligned)
    heads = request.value_heads or request.heads
    inputs = _inputs(request, tensors)
    raw = {"a": tensors.empty("a", (request.tokens, heads), request.dtype)}
    raw["b"] = tensors.empty("b", (request.tokens, heads), request.dtype)
    arguments = {name: inputs[name] for name in ("q", "k", "v", "cu_seqlens") if name in inputs} | raw
    arguments["A_log"] = tensors.empty("A_log", (heads,), "float32")
    arguments["dt_bias"] = tensors.empty("dt_bias", (heads,), "float32")
    state = _state(request, tensors)
    if request.state_indices == "initial_state_indices":
        state["initial_state_source"] = state.pop("initial_state")
        arguments |= {"softplus_beta": 1.0, "softplus_threshold": 20.0}
    arguments |= state
    arguments["use_qk_l2norm_in_kernel"] = request.qk_l2norm
    tensors.check_names()
    call(request.home, entry(request.home, op_of(request)), arguments)


def _function(request: Recurrence, arguments: dict[str, Any]) -> Any:
    op = op_of(request)
    if request.home == FLA and isinstance(request, FusedRecurrentKda) and request.state_indices:
        # Below the public function, whose default is not to write states where they came from.
        arguments["inplace_final_state"] = True
        return entry(request.home, f"{op}.pool")
    return entry(request.home, op)


def _inputs(request: Recurrence, tensors: Tensors) -> dict[str, Any]:
    lengths = sequence_lengths(request)  # type: ignore[arg-type]
    batch, tokens = (1, request.tokens) if request.varlen else equal_lengths(lengths)
    values = request.value_heads or request.heads
    keyed = isinstance(request, (ChunkKda, FusedRecurrentKda))
    gate = (batch, tokens, values, request.key_dim) if keyed else (batch, tokens, values)
    found: dict[str, Any] = {
        "q": tensors.empty("q", (batch, tokens, request.heads, request.key_dim), request.dtype),
        "k": tensors.empty("k", (batch, tokens, request.heads, request.key_dim), request.dtype),
        "v": tensors.empty("v", (batch, tokens, values, request.value_dim), request.dtype),
        "g": tensors.empty("g", gate, request.g_dtype),
        "beta": tensors.empty("beta", (batch, tokens, values), request.beta_dtype),
    }
    if request.varlen:
        found["cu_seqlens"], host = tensors.offsets(lengths, request.index_dtype)
        if isinstance(request, ChunkRecurrence) and request.cu_seqlens_cpu:
            found["cu_seqlens_cpu"] = host
    return found


def _gate(request: Recurrence, tensors: Tensors) -> dict[str, Any]:
    """What a gate inside the kernel needs."""
    if not request.gate_in_kernel:
        return {}
    values = request.value_heads or request.heads
    keyed = isinstance(request, (ChunkKda, FusedRecurrentKda))
    found: dict[str, Any] = {"use_gate_in_kernel": True}
    if not isinstance(request, (ChunkKda, FusedRecurrentKda)) or request.a_log:
        found["A_log"] = tensors.empty("A_log", (values,), "float32")
    if request.dt_bias:
        size = values * request.key_dim if keyed else values
        found["dt_bias"] = tensors.empty("dt_bias", (size,), "float32")
    return found


def _state(request: Recurrence, tensors: Tensors) -> dict[str, Any]:
    found: dict[str, Any] = {"output_final_state": True} if request.final_state else {}
    if not request.initial_state:
        return found
    count = len(sequence_lengths(request))  # type: ignore[arg-type]
    values = request.value_heads or request.heads
    last = (request.key_dim, request.value_dim)
    last = last[::-1] if request.state_v_first else last
    if not request.state_indices:
        shape = (count, values, *last)
        found["initial_state"] = tensors.pool(
            "initial_state", shape, request.state_dtype, request.state_stride
        )
        return found
    per_sequence = request.per_sequence if isinstance(request, StepRecurrence) else 1
    accepted = isinstance(request, StepRecurrence) and request.accepted_tokens
    used = count * per_sequence if accepted else count
    shape = (used + SPARE_SLOTS, values, *last)
    found["initial_state"] = tensors.pool("initial_state", shape, request.state_dtype, request.state_stride)
    slots = torch.arange(used, dtype=torch.int32)
    # One slot a sequence; with drafts a row of slots, one after each token.
    indices = slots.view(count, per_sequence) if accepted else slots
    found[request.state_indices] = tensors.integers(request.state_indices, indices.tolist(), "int32")
    if accepted:
        found["num_accepted_tokens"] = tensors.integers("num_accepted_tokens", [1] * count, "int32")
    return found


def _flags(request: Recurrence) -> dict[str, Any]:
    found: dict[str, Any] = {"use_qk_l2norm_in_kernel": request.qk_l2norm}
    switches = {
        "use_beta_sigmoid_in_kernel": request.beta_sigmoid,
        "allow_neg_eigval": request.neg_eigval,
        "state_v_first": request.state_v_first,
        "safe_gate": isinstance(request, ChunkKda) and request.safe_gate,
    }
    found |= {name: True for name, on in switches.items() if on}
    if isinstance(request, (ChunkKda, FusedRecurrentKda)) and request.lower_bound:
        found["lower_bound"] = float(request.lower_bound)
    return found
