"""The short convolution in Triton: `causal_conv1d_fn` over a prefill, `causal_conv1d_update` for decoding.

The library has none (its own package is CUDA, compiled ahead); engines carry one. Theirs plans a prefill's
programs on the host from the sequences' lengths, which the engine hands over ready-made: `Plan` is that, so
that no length has to be read back from the device.
"""

from __future__ import annotations

import torch

from prefetchd.provider import Unavailable
from prefetchd.requests.mamba import CausalConv1d

from .homes import Home, accepted
from .tensors import Tensors

# The rows of one program, fixed in the known kernels.
BLOCK = 8


class Plan:
    """What engines compute once a batch for all layers: which program does which rows of which sequence."""

    def __init__(self, make: Tensors, tokens: int) -> None:
        programs = -(-tokens // BLOCK)
        self.batch_ptr = make.contiguous("plan", "int32", programs)
        self.token_chunk_offset_ptr = make.contiguous("plan", "int32", programs)
        self.nums_dict = {
            BLOCK: {
                "tot": programs,
                "mlist": self.batch_ptr,
                "mlist_len": programs,
                "offsetlist": self.token_chunk_offset_ptr,
                "batch_ptr": self.batch_ptr,
                "token_chunk_offset_ptr": self.token_chunk_offset_ptr,
            }
        }


def run(home: Home, request: CausalConv1d) -> None:
    """One call. Raises `Unavailable` without a Triton kernel, or without the cache's size."""
    call = home.function("conv_update" if request.decode else "conv")
    if not request.cache_lines:
        raise Unavailable(
            "causal_conv1d: the number of states in the engine's cache is compiled into this kernel and only "
            "the engine knows it; set cache_lines (with cache_stride and block_size) in the site's flags"
        )
    make = Tensors(request)
    x = make.columns("x", request.dtype, request.tokens, request.inner, request.channels, request.row)
    weight = make.contiguous("weight", request.dtype, request.channels, request.conv)
    bias = make.contiguous("bias", request.dtype, request.channels) if request.bias else None
    activation = None if request.activation == "none" else request.activation
    sequences = request.tokens if request.decode else 1
    indices = _indices(make, request, sequences)
    if request.decode:
        call(x, _states(make, request), weight, bias, activation, conv_state_indices=indices)
        return
    has_state = torch.empty(sequences, dtype=torch.bool, device="cuda") if request.initial_states else None
    call(
        x.transpose(0, 1),
        weight,
        bias,
        conv_states=_states(make, request),
        query_start_loc=make.contiguous("cu_seqlens", request.index_dtype, sequences + 1),
        cache_indices=indices,
        has_initial_state=has_state,
        activation=activation,
        **accepted(
            call,
            metadata=Plan(make, request.tokens),
            block_size_to_align=request.block_size,
            seq_lens_cpu=[request.tokens],
        ),
    )


def _states(make: Tensors, request: CausalConv1d) -> torch.Tensor:
    """The cache as the kernel sees it: channels next to each other, then the remembered tokens."""
    kept = request.conv - 1
    pitch = request.cache_stride or kept * request.channels
    shape, strides = (request.cache_lines, request.channels, kept), (pitch, 1, request.channels)
    return make.strided("state", request.state_dtype, shape, strides)


def _indices(make: Tensors, request: CausalConv1d, sequences: int) -> torch.Tensor | None:
    if not request.indices:
        return None
    return make.strided("indices", request.index_dtype, (sequences,), (request.index_stride,))
