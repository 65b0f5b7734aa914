"""Libraries that keep kernels in a module's dict: TensorRT-LLM's KDA, and any module named by its path.

Their keys hold what no tensor shape shows. The subtle rules: **aligned or ragged** (every length a whole
chunk, or one sequence) is part of the key, and the engine passes it as a hint because it would read the
offsets back otherwise; the size of the state pool is part of the key too, so a request names it, and a
profile has it from what the engine said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefetchd.protocol import op_of
from prefetchd.requests.delta import (
    DEFAULT_CHUNK,
    ChunkRecurrence,
    Recurrence,
    StepRecurrence,
    sequence_lengths,
)
from prefetchd.requests.kda import ChunkKda, FusedRecurrentKda

from ..cute_homes import PREFIX
from ..linear_ops.tensors import Tensors, equal_lengths
from .calling import call, matching

TRT_PREFILL = "tensorrt_llm._torch.custom_ops.cute_dsl_kimi_k3_custom_ops"


def run_tensorrt_llm(request: Recurrence) -> None:
    """TensorRT-LLM's KDA prefill, by what its operator calls."""
    arguments = matching(TRT_PREFILL, "KdaPrefillRunner.forward", offered(request))
    call(TRT_PREFILL, "KdaPrefillRunner.forward", arguments)


def run_module(request: Recurrence) -> None:
    """The function of the op's name in a module named by its path, or without the family's name around it."""
    module = request.home.removeprefix(PREFIX)
    function = op_of(request)
    call(module, function, matching(module, function, offered(request)))


def offered(request: Recurrence) -> dict[str, Callable[[], Any]]:
    """Every argument that a request determines, under each name that libraries give it."""
    tensors = Tensors(request.unaligned)
    lengths = sequence_lengths(request)  # type: ignore[arg-type]
    step = isinstance(request, StepRecurrence)
    heads, values = request.heads, request.value_heads or request.heads
    rows = (len(lengths),) if step and request.per_sequence == 1 else _rows(request, lengths)  # type: ignore[attr-defined]
    keyed = isinstance(request, (ChunkKda, FusedRecurrentKda))
    gate = (*rows, values, request.key_dim) if keyed else (*rows, values)
    slots = request.pool or len(lengths)
    last = (request.value_dim, request.key_dim)
    state = (slots, values, *(last if request.state_v_first else last[::-1]))

    def tensor(name: str, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        return lambda: tensors.empty(name, shape, dtype)

    def pool() -> Any:
        return tensors.pool("initial_state", state, request.state_dtype, request.state_stride)

    def indices() -> Any:
        return tensors.integers("state_indices", list(range(len(lengths))), "int32")

    def cu_seqlens() -> Any:
        return tensors.offsets(lengths, request.index_dtype)[0]

    found: dict[str, Callable[[], Any]] = {
        "q": tensor("q", (*rows, heads, request.key_dim), request.dtype),
        "k": tensor("k", (*rows, heads, request.key_dim), request.dtype),
        "v": tensor("v", (*rows, values, request.value_dim), request.dtype),
        **dict.fromkeys(("g", "gate", "a"), tensor("g", gate, request.g_dtype)),
        **dict.fromkeys(("beta", "b"), tensor("beta", (*rows, values), request.beta_dtype)),
        "A_log": tensor("A_log", (values,), "float32"),
        "scale": lambda: float(request.key_dim**-0.5),
        "lengths": lambda: tuple(lengths),
        "safe_gate": lambda: isinstance(request, ChunkKda) and request.safe_gate,
        "use_gate_in_kernel": lambda: request.gate_in_kernel,
        "use_beta_sigmoid_in_kernel": lambda: request.beta_sigmoid,
        "use_qk_l2norm_in_kernel": lambda: request.qk_l2norm,
        "chunk_size": lambda: getattr(request, "chunk_size", 0) or DEFAULT_CHUNK,
        "varlen_is_aligned": lambda: is_aligned(lengths, getattr(request, "chunk_size", 0) or DEFAULT_CHUNK),
        "single_sequence_length": lambda: lengths[0] if len(lengths) == 1 else None,
    }
    if request.dt_bias:
        found["dt_bias"] = tensor("dt_bias", (values * request.key_dim if keyed else values,), "float32")
    if isinstance(request, (ChunkKda, FusedRecurrentKda)) and request.lower_bound:
        found["lower_bound"] = lambda: float(request.lower_bound)
    if request.varlen and not step:
        found["cu_seqlens"] = cu_seqlens
    if request.initial_state:
        names = ("initial_state", "state_pool", "pool", "h0_source", "initial_state_source")
        found |= dict.fromkeys(names, pool)
        found |= dict.fromkeys(("state_indices", "slots", "h0_indices", "initial_state_indices"), indices)
    return found


def is_aligned(lengths: list[int], chunk: int) -> bool:
    """Whether TensorRT-LLM takes the variant without masks: every length a whole chunk, or one sequence."""
    return len(lengths) == 1 or all(length % chunk == 0 for length in lengths)


def _rows(request: Recurrence, lengths: list[int]) -> tuple[int, ...]:
    """The dimensions before the heads: packed in one row, a batch, or plain tokens for a chunked call."""
    if isinstance(request, ChunkRecurrence) and request.varlen:
        return (1, request.tokens)
    return equal_lengths(lengths)
