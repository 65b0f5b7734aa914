"""What the requests of KDA and of the gated delta rule have in common.

Both families are the same recurrence with another decay gate, launched by the same kinds of kernels: a
chunked prefill, a recurrent decode, a short convolution before them, a gate and a gated norm around them. A
field is here when it can change which Triton variant is launched: shapes, dtypes, which tensors are there at
all, and what a pointer or an integer is divisible by. `home` is whose copy of the kernels runs, because
their source text is part of every key.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from prefetchd.request import Request, Size, SizeOrDefault

Dtype = Literal["bfloat16", "float16", "float32"]
IndexDtype = Literal["int32", "int64"]
# The argument by which the library is told where in a pool of states each sequence's own lies; empty when
# states are passed one after another. The two names are those of vLLM's and of SGLang's kernels.
StateIndices = Literal["", "ssm_state_indices", "initial_state_indices"]
# Whether every sequence is a whole number of chunks, for homes whose kernels are specialised on it.
Lengths = Literal["any", "aligned", "ragged"]
Name = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z0-9_-]*\Z")]
# What fla, vLLM and SGLang use unless told otherwise.
DEFAULT_CHUNK = 64


class Delta(Request, frozen=True, kw_only=True):
    """One call on `tokens` tokens in all. `unaligned` names tensors whose pointer is no multiple of 16."""

    sweep_field: ClassVar[str | None] = "tokens"

    home: str = "fla"
    tokens: Size
    dtype: Dtype = "bfloat16"
    unaligned: tuple[str, ...] = ()


class Recurrence(Delta, frozen=True, kw_only=True):
    """The recurrence itself. `value_heads` 0 is as many as `heads`; `lower_bound` 0 is none."""

    heads: Size
    value_heads: SizeOrDefault = 0
    key_dim: Size
    value_dim: Size
    g_dtype: Dtype = "bfloat16"
    beta_dtype: Dtype = "bfloat16"
    # One packed row of sequences with their offsets, or a batch of equally long ones without.
    varlen: bool = True
    index_dtype: IndexDtype = "int32"
    initial_state: bool = False
    final_state: bool = False
    state_dtype: Dtype = "float32"
    state_indices: StateIndices = ""
    # Elements from one state to the next in a pool; 0 is one right after the other.
    state_stride: SizeOrDefault = 0
    state_v_first: bool = False
    # Slots of the engine's whole pool of states, where a kernel's key has that; 0 is as many as needed.
    pool: SizeOrDefault = 0
    # Which of the library's own implementations, where it has several; empty is the library's choice.
    backend: Name = ""
    qk_l2norm: bool = False
    gate_in_kernel: bool = False
    dt_bias: bool = True
    beta_sigmoid: bool = False
    neg_eigval: bool = False


class ChunkRecurrence(Recurrence, frozen=True, kw_only=True):
    """Prefill, chunk by chunk."""

    sequences: Size = 1
    lengths: Lengths = "any"
    # 0 is the library's own.
    chunk_size: SizeOrDefault = 0
    # Whether the offsets are passed on the host too.
    cu_seqlens_cpu: bool = False


class StepRecurrence(Recurrence, frozen=True, kw_only=True):
    """Decode, and the verification of drafts: `per_sequence` tokens for each of the sequences.

    With `accepted_tokens` each sequence starts from the state of its last accepted draft.
    """

    per_sequence: Size = 1
    accepted_tokens: bool = False


class PackedDecode(Delta, frozen=True, kw_only=True):
    """An engine's decode of one token for each of `tokens` sequences, from the convolution's output.

    `row_stride` is the pitch of a token's q, k and v where they are a part of a longer row; 0 is none.
    """

    heads: Size
    value_heads: SizeOrDefault = 0
    key_dim: Size
    value_dim: Size
    row_stride: SizeOrDefault = 0
    state_dtype: Dtype = "float32"
    state_stride: SizeOrDefault = 0


class ShortConvolution(Delta, frozen=True, kw_only=True):
    """The causal convolution over the last `conv` tokens; `decode` is one token for each sequence."""

    channels: Size
    conv: Size
    weight_dtype: Dtype = "bfloat16"
    decode: bool = False
    # Of a dense batch, each with its share of the tokens; a packed one is a single sequence.
    sequences: Size = 1
    bias: bool = False
    activation: Literal["silu", "none"] = "silu"
    varlen: bool = True
    index_dtype: IndexDtype = "int32"
    initial_state: bool = False
    final_state: bool = False
    cu_seqlens_cpu: bool = False


class GatedNorm(Delta, frozen=True, kw_only=True):
    """The RMS norm of each head's output, multiplied by an activated gate."""

    heads: Size
    dim: Size
    gate_dtype: Dtype = "bfloat16"
    weight_dtype: Dtype = "bfloat16"
    activation: Literal["sigmoid", "swish"] = "swish"


class Gate(Delta, frozen=True, kw_only=True):
    """The decay gate computed before the recurrence, by a kernel of its own."""

    heads: Size
    dt_bias: bool = True


def sequence_lengths(request: ChunkRecurrence | StepRecurrence | ShortConvolution) -> list[int]:
    """How the request's tokens fall into sequences. Raises `ValueError` for lengths that cannot be."""
    tokens = request.tokens
    if isinstance(request, StepRecurrence):
        if tokens % request.per_sequence:
            raise ValueError(
                f"tokens = {tokens} is no multiple of per_sequence = {request.per_sequence}; every sequence "
                "has that many"
            )
        return [request.per_sequence] * (tokens // request.per_sequence)
    if isinstance(request, ShortConvolution):
        return [1] * tokens if request.decode else _spread(tokens, request.sequences, 1)
    count, chunk = request.sequences, request.chunk_size or DEFAULT_CHUNK
    if request.lengths == "ragged" and tokens % chunk == 0:
        # The tokens alone do not make it ragged, so one sequence has a single token.
        count = max(count, 2)
        return [*_spread(tokens - 1, count - 1, 1), 1]
    return _spread(tokens, count, chunk if request.lengths == "aligned" else 1)


def _spread(tokens: int, count: int, step: int) -> list[int]:
    """As even as possible in multiples of `step`, the last sequence the longest."""
    each = tokens // count // step * step
    if tokens % step or not each:
        raise ValueError(
            f"tokens = {tokens}: cannot be {count} sequences of a multiple of {step} tokens each"
        )
    return [each] * (count - 1) + [tokens - each * (count - 1)]
