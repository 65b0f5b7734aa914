"""The calls of the recurrences: chunked prefill and recurrent steps, of KDA and of the gated delta rule.

One builder serves both, because their arguments have the same names in every home. What they differ in is the
gate: as wide as the keys in KDA, one number a value head in GDN. Flags that are off are left to the library's
own default, except the l2norm, whose default the homes do not agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from prefetchd.protocol import op_of
from prefetchd.provider import Unavailable
from prefetchd.requests.delta import (
    ChunkRecurrence,
    PackedDecode,
    Recurrence,
    StepRecurrence,
    sequence_lengths,
)
from prefetchd.requests.gdn import FusedSigmoidGatingUpdate
from prefetchd.requests.kda import ChunkKda, FusedRecurrentKda, KdaPackedDecode

from .homes import FLA, call, entry, takes
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
    function = _function(request, arguments)
    call(request.home, function, _renamed(request, function, arguments))


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


def run_packed_decode(request: PackedDecode) -> None:
    """Decode from the convolution's output as it is, q, k and v side by side in each row."""
    function = entry(request.home, op_of(request))
    names = signature(function).parameters
    tensors = Tensors(request.unaligned)
    keyed = isinstance(request, KdaPackedDecode)
    heads, batch = request.value_heads or request.heads, request.tokens
    row = 2 * request.heads * request.key_dim + heads * request.value_dim
    width = heads * (request.key_dim if keyed else 1)
    state = (batch + SPARE_SLOTS, heads, request.value_dim, request.key_dim)
    indices = "state_indices" if "state_indices" in names else "ssm_state_indices"
    # vLLM's KDA keeps the heads apart, the others have one row a token.
    raw = "raw_g" in names
    gate = (1, batch, heads, request.key_dim) if raw else (batch, width)
    arguments = {
        "mixed_qkv": tensors.pool("mixed_qkv", (batch, row), request.dtype, request.row_stride),
        "raw_g" if raw else "a": tensors.empty("g", gate, request.dtype),
        "raw_beta" if raw else "b": tensors.empty(
            "beta", (1, batch, heads) if raw else (batch, heads), request.dtype
        ),
        "A_log": tensors.empty("A_log", (heads,), "float32"),
        "dt_bias": tensors.empty("dt_bias", (width,), "float32"),
        "scale": request.key_dim**-0.5,
        "initial_state": tensors.pool("initial_state", state, request.state_dtype, request.state_stride),
        "out": tensors.empty("out", (batch, 1, heads, request.value_dim), request.dtype),
        indices: tensors.integers("state_indices", list(range(batch)), "int32"),
    }
    if "lower_bound" in names:
        bound = request.lower_bound if isinstance(request, KdaPackedDecode) else 0
        arguments["lower_bound"] = float(bound) if bound else None
    if "use_qk_l2norm_in_kernel" in names:
        arguments["use_qk_l2norm_in_kernel"] = True
    if raw:
        # It makes its own output, in the shape of vLLM's attention layers.
        del arguments["out"]
    tensors.check_names()
    call(request.home, function, arguments)


def _function(request: Recurrence, arguments: dict[str, Any]) -> Any:
    op = op_of(request)
    if request.home == FLA and isinstance(request, FusedRecurrentKda) and request.state_indices:
        # Below the public function, whose default is not to write states where they came from.
        arguments["inplace_final_state"] = True
        return entry(request.home, f"{op}.pool")
    if isinstance(request, ChunkKda) and request.gate_in_kernel:
        # vLLM has a function of its own for it.
        return entry(request.home, "chunk_kda_with_fused_gate", op)
    return entry(request.home, op)


def _renamed(request: Recurrence, function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments under the names that engines' copies give to raw gates and betas.

    Such a function has no switch for what it always does, and then there is nothing to switch off either.
    """
    names = signature(function).parameters
    found = dict(arguments)
    always = {
        "raw_g": ("use_gate_in_kernel", request.gate_in_kernel),
        "raw_beta": ("use_beta_sigmoid_in_kernel", request.beta_sigmoid),
        # The step of newer vLLM normalises q and k whatever it is asked.
        "fuse_gate": ("use_qk_l2norm_in_kernel", request.qk_l2norm),
    }
    for name, (switch, on) in always.items():
        if name in names and switch not in names:
            if not on:
                what = f"{getattr(function, '__name__', function)} of home {request.home!r}"
                raise Unavailable(f"{what} always does what {switch} asks for; plan it with that flag on")
            del found[switch]
    if "A_log" in names and not takes(function, "use_gate_in_kernel"):
        # SGLang's copy takes the gate as raw when it gets what activates it.
        found.pop("use_gate_in_kernel", None)
    if "beta_is_raw" in names:
        found["beta_is_raw"] = bool(found.pop("use_beta_sigmoid_in_kernel", False))
    for old, new in (("g", "raw_g"), ("beta", "raw_beta"), ("dt_bias", "g_bias")):
        if new in names and old in found:
            found[new] = found.pop(old)
    return {name: None for name in ("dt_bias", "g_bias", "lower_bound") if name in names} | found


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
