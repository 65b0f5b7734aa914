"""The kernels around the recurrence: the decay gate, the convolution, the norm, committing states.

fla and the engines' copies give the same kernels different functions, told apart here by the arguments they
take, so that a module named by its path works too.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from prefetchd.protocol import op_of
from prefetchd.requests.delta import Gate, GatedNorm, ShortConvolution, sequence_lengths
from prefetchd.requests.kda import KdaGate, KdaStateCommit

from .homes import call, entry
from .tensors import Tensors, equal_lengths

EPSILON = 1e-5
# Slots beyond those in use, so that a pool is larger than the batch, as an engine's is.
SPARE_SLOTS = 1


def run_gate(request: Gate) -> None:
    """The gate as a kernel of its own."""
    tensors = Tensors(request.unaligned)
    function = entry(request.home, op_of(request), *_other_names(request))
    parameters = signature(function).parameters
    heads, dim = request.heads, request.key_dim if isinstance(request, KdaGate) else 1
    if "head_k_dim" in parameters:
        # The engines' copies of KDA's gate: projections as they come out of the matrix product.
        arguments = {
            "g": tensors.empty("g", (request.tokens, heads * dim), request.dtype),
            "A": tensors.empty("A_log", (1, 1, heads, 1), "float32"),
            "head_k_dim": dim,
        }
        bias = "g_bias"
    elif "a" in parameters:
        # The engines' gate of GDN makes beta as well.
        arguments = {name: tensors.empty(name, (request.tokens, heads), request.dtype) for name in ("a", "b")}
        arguments["A_log"] = tensors.empty("A_log", (heads,), "float32")
        bias = "dt_bias"
    else:
        shape = (
            (1, request.tokens, heads, dim) if isinstance(request, KdaGate) else (1, request.tokens, heads)
        )
        arguments = {"g": tensors.empty("g", shape, request.dtype)}
        if not isinstance(request, KdaGate) or request.a_log:
            arguments["A_log"] = tensors.empty("A_log", (heads,), "float32")
        bias = "dt_bias"
    if request.dt_bias:
        arguments[bias] = tensors.empty("dt_bias", (heads * dim,), "float32")
    if isinstance(request, KdaGate) and request.lower_bound:
        arguments["lower_bound"] = float(request.lower_bound)
    tensors.check_names()
    call(request.home, function, arguments)


def _other_names(request: Gate) -> tuple[str, ...]:
    return () if isinstance(request, KdaGate) else ("fused_gdn_gating",)


def run_conv(request: ShortConvolution) -> None:
    """The convolution over whole sequences, or of one token for each."""
    kind = "short_conv.decode" if request.decode else "short_conv"
    function = entry(request.home, kind, "causal_conv1d_update" if request.decode else "causal_conv1d_fn")
    tensors = Tensors(request.unaligned)
    arguments: dict[str, Any] = {
        "weight": tensors.empty("weight", (request.channels, request.conv), request.weight_dtype),
        "activation": None if request.activation == "none" else request.activation,
    }
    if request.bias:
        arguments["bias"] = tensors.empty("bias", (request.channels,), request.weight_dtype)
    pooled = {"conv_states", "conv_state"} & set(signature(function).parameters)
    if pooled:
        arguments.setdefault("bias", None)
        arguments |= _pooled_conv(request, tensors, pooled.pop())
        if "seq_lens_cpu" in signature(function).parameters:
            # SGLang hands the lengths over on the host as well.
            arguments["seq_lens_cpu"] = sequence_lengths(request)
    else:
        arguments |= _plain_conv(request, tensors)
    tensors.check_names()
    call(request.home, function, arguments)


def _plain_conv(request: ShortConvolution, tensors: Tensors) -> dict[str, Any]:
    """fla: a packed or dense batch, states of `conv` taps one after another."""
    lengths = sequence_lengths(request)
    shape = (1, request.tokens) if request.varlen or request.decode else equal_lengths(lengths)
    found: dict[str, Any] = {"x": tensors.empty("x", (*shape, request.channels), request.dtype)}
    state = (len(lengths), request.channels, request.conv)
    if request.decode:
        return found | {"cache": tensors.empty("cache", state, request.dtype)}
    if request.initial_state:
        found["initial_state"] = tensors.empty("initial_state", state, request.dtype)
    if request.final_state:
        found["output_final_state"] = True
    if request.varlen:
        found["cu_seqlens"], host = tensors.offsets(lengths, request.index_dtype)
        if request.cu_seqlens_cpu:
            found["cu_seqlens_cpu"] = host
    return found


def _pooled_conv(request: ShortConvolution, tensors: Tensors, states: str) -> dict[str, Any]:
    """The engines: channels first, states of `conv` - 1 taps in a pool whose channels lie side by side."""
    lengths = sequence_lengths(request)
    count = len(lengths)
    pool = tensors.empty(states, (count + SPARE_SLOTS, request.conv - 1, request.channels), request.dtype)
    x = tensors.empty("x", (request.tokens, request.channels), request.dtype)
    slots = list(range(count))
    if request.decode:
        indices = tensors.integers("conv_state_indices", slots, "int32")
        return {"x": x, states: pool.transpose(1, 2), "conv_state_indices": indices}
    offsets, _ = tensors.offsets(lengths, request.index_dtype)
    return {
        "x": x.transpose(0, 1),
        states: pool.transpose(1, 2),
        "query_start_loc": offsets,
        "cache_indices": tensors.integers("cache_indices", slots, "int32"),
        "has_initial_state": tensors.integers("has_initial_state", [request.initial_state] * count, "bool"),
    }


def run_norm(request: GatedNorm) -> None:
    """The gated norm of every head's output."""
    function: Callable[..., Any] = entry(
        request.home, op_of(request), "gated_norm", "rms_norm_gated", "rmsnorm_fn"
    )
    tensors = Tensors(request.unaligned)
    # `z` is the gate in the copies that came from Mamba, which take rows, norm first and gate afterwards.
    from_mamba = "z" in signature(function).parameters
    rows = (request.tokens * request.heads, request.dim)
    shape = rows if from_mamba else (1, request.tokens, request.heads, request.dim)
    gate = tensors.empty("g", shape, request.gate_dtype)
    arguments: dict[str, Any] = {
        "x": tensors.empty("x", shape, request.dtype),
        "weight": tensors.empty("weight", (request.dim,), request.weight_dtype),
        "bias": None,
        "eps": EPSILON,
    }
    if from_mamba:
        arguments |= {"z": gate, "norm_before_gate": True}
    else:
        arguments |= {"g": gate, "activation": request.activation}
    tensors.check_names()
    call(request.home, function, arguments)


def run_state_commit(request: KdaStateCommit) -> None:
    """Copying each sequence's accepted state into its slot, in all layers."""
    function = entry(request.home, op_of(request))
    tensors = Tensors(request.unaligned)
    state = (request.heads, request.key_dim, request.value_dim)
    pool = tensors.empty("pool", (request.layers, request.slots, *state), request.state_dtype)
    drafted = (request.layers, request.tokens, request.drafts, *state)
    drafts = tensors.empty("drafts", drafted, request.state_dtype)
    slots = tensors.integers("slots", list(range(request.tokens)), "int32")
    steps = tensors.integers("steps", [0] * request.tokens, "int32")
    tensors.check_names()
    # By position: the last two go by several names.
    function(pool, drafts, slots, steps)
