"""The chunked scan: `mamba_chunk_scan_combined` of the library, `..._varlen` of engines.

The library's takes a batch of one and a sequence index for each token. Engines' copies began as that, with a
state for each sequence; newer ones take no batch, and a list of chunks, each within one sequence. Which form
a home has is read off its function's parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from prefetchd.requests.mamba import Mamba2Prefill

from .homes import Call, Home, accepted
from .tensors import TYPES, Tensors


def run(home: Home, request: Mamba2Prefill) -> None:
    """One call for the request: as one sequence, or as the fewest sequences that make its chunks."""
    scan(home.function("scan"), request, lengths_for(request))


def lengths_for(request: Mamba2Prefill) -> tuple[int, ...]:
    """Sequence lengths that make the request's tokens and, where they are cut at their ends, its chunks."""
    natural = -(-request.tokens // request.chunk)
    extra = request.chunks - natural
    if extra <= 0:
        return (request.tokens,)
    if request.chunks > request.tokens:
        raise ValueError(
            f"chunks = {request.chunks} of tokens = {request.tokens}: a chunk holds at least one token"
        )
    # Sequences of one token take a chunk each; what they leave may then need fewer.
    singles, rest = 0, request.tokens
    while singles + -(-rest // request.chunk) < request.chunks:
        singles, rest = singles + 1, rest - 1
    return (*(1,) * singles, rest)


def scan(call: Call, request: Mamba2Prefill, lengths: Sequence[int]) -> None:
    """Calls the function in its own form, for sequences of these lengths."""
    parameters = inspect.signature(call).parameters
    if "return_varlen_states" in parameters:
        _library(call, request, lengths)
    else:
        _engine(call, request, lengths, listed="cu_chunk_seqlens" in parameters)


def _library(call: Call, request: Mamba2Prefill, lengths: Sequence[int]) -> None:
    make = Tensors(request)
    x, dt, b, c, z = (
        None if tensor is None else tensor.unsqueeze(0) for tensor in _activations(make, request)
    )
    tokens, count = request.tokens, len(lengths)
    # An engine's copy of this form begins each sequence in its own state, the library all in one.
    own_states = "chunk_indices" in inspect.signature(call).parameters
    initial = _initial_states(make, request, count if own_states else 1)
    pieces = make.contiguous("chunks", "int32", _chunks(request, lengths)) if initial is not None else None
    call(
        x,
        dt,
        make.contiguous("A", request.a_dtype, request.heads),
        b,
        c,
        request.chunk,
        z=z,
        initial_states=initial,
        seq_idx=make.contiguous("seq_idx", request.index_dtype, 1, tokens) if request.seq_idx else None,
        cu_seqlens=_boundaries(make, request, count) if request.cu_seqlens else None,
        return_varlen_states=request.cu_seqlens,
        **_parameters(make, request),
        **accepted(
            call,
            chunk_indices=pieces,
            chunk_offsets=pieces,
            out=make.contiguous("out", request.dtype, 1, tokens, request.heads, request.head_dim),
            state_dtype=TYPES[request.state_dtype],
        ),
    )


def _engine(call: Call, request: Mamba2Prefill, lengths: Sequence[int], *, listed: bool) -> None:
    make = Tensors(request)
    x, dt, b, c, z = _activations(make, request)
    chunks, count = _chunks(request, lengths), len(lengths)
    initial = _initial_states(make, request, count)
    pieces = make.contiguous("chunks", "int32", chunks) if initial is not None else None
    call(
        x,
        dt,
        make.contiguous("A", request.a_dtype, request.heads),
        b,
        c,
        request.chunk,
        z=z,
        initial_states=initial,
        seq_idx=make.contiguous("seq_idx", request.index_dtype, chunks if listed else request.tokens),
        cu_seqlens=_boundaries(make, request, count),
        **_parameters(make, request),
        **accepted(
            call,
            cu_chunk_seqlens=make.contiguous("chunks", "int32", chunks + 1),
            last_chunk_indices=make.contiguous("chunks", "int32", count),
            chunk_indices=pieces,
            chunk_offsets=pieces,
            out=make.contiguous("out", request.dtype, request.tokens, request.heads, request.head_dim),
            state_dtype=TYPES[request.state_dtype],
        ),
    )


def _chunks(request: Mamba2Prefill, lengths: Sequence[int]) -> int:
    return sum(-(-length // request.chunk) for length in lengths)


def _activations(
    make: Tensors, request: Mamba2Prefill
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, dt, B, C and z: columns of the convolution's output, and of the projected buffer."""
    tokens, heads, groups = request.tokens, request.heads, request.groups

    def mixed(role: str, first: int, width: int) -> torch.Tensor:
        return make.columns(role, request.dtype, tokens, first, width, request.channels)

    x = mixed("x", 0, request.inner).view(tokens, heads, request.head_dim)
    b = mixed("B", request.inner, request.mixed).view(tokens, groups, request.state)
    c = mixed("C", request.inner + request.mixed, request.mixed).view(tokens, groups, request.state)
    dt = make.columns("dt", request.dt_dtype, tokens, request.row - heads, heads, request.row)
    if not request.z:
        return x, dt, b, c, None
    z = make.columns("z", request.dtype, tokens, 0, request.inner, request.row)
    return x, dt, b, c, z.view(tokens, heads, request.head_dim)


def _initial_states(make: Tensors, request: Mamba2Prefill, count: int) -> torch.Tensor | None:
    if not request.initial_states:
        return None
    sizes = (request.heads, request.head_dim, request.state)
    return make.contiguous("state", request.state_dtype, count, *sizes)


def _boundaries(make: Tensors, request: Mamba2Prefill, count: int) -> torch.Tensor:
    return make.contiguous("cu_seqlens", request.index_dtype, count + 1)


def _parameters(make: Tensors, request: Mamba2Prefill) -> dict[str, object]:
    """The layer's own parameters and flags, which every form takes alike."""
    shapes = {"heads": (request.heads,), "channels": (request.heads, request.head_dim)}
    shape = shapes.get(request.d)
    bias = make.contiguous("dt_bias", request.dt_bias_dtype, request.heads) if request.dt_bias else None
    return {
        "D": make.contiguous("D", request.d_dtype, *shape) if shape else None,
        "dt_bias": bias,
        "dt_softplus": request.dt_softplus,
    }
