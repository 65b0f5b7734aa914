"""One token for each sequence: `selective_state_update`.

A head's A, D and dt are one value for all its channels: expanded views of stride zero, by which the kernel
knows. Engines run the convolution in place, so that x, B and C are still columns of the projected buffer;
the library's layer has them in a buffer of their own.
"""

from __future__ import annotations

import inspect

import torch

from prefetchd.requests.mamba import Mamba2Decode

from .homes import Home, accepted
from .tensors import Tensors


def run(home: Home, request: Mamba2Decode) -> None:
    """One call of the update."""
    call = home.function("update")
    in_place = "out" in inspect.signature(call).parameters
    make = Tensors(request)
    batch, heads, groups, size = request.batch, request.heads, request.groups, request.head_dim
    pitch, first = (request.row, request.inner) if in_place else (request.channels, 0)

    def mixed(role: str, start: int, width: int) -> torch.Tensor:
        return make.columns(role, request.dtype, batch, first + start, width, pitch)

    def per_channel(role: str, dtype: str) -> torch.Tensor:
        return make.contiguous(role, dtype, heads)[:, None].expand(heads, size)

    dt = make.columns("dt", request.dt_dtype, batch, request.row - heads, heads, request.row)
    z = make.columns("z", request.dtype, batch, 0, request.inner, request.row).view(batch, heads, size)
    indices = _indices(make, request)
    call(
        _states(make, request),
        mixed("x", 0, request.inner).view(batch, heads, size),
        dt[:, :, None].expand(batch, heads, size),
        per_channel("A", request.a_dtype)[:, :, None].expand(heads, size, request.state),
        mixed("B", request.inner, request.mixed).view(batch, groups, request.state),
        mixed("C", request.inner + request.mixed, request.mixed).view(batch, groups, request.state),
        per_channel("D", request.d_dtype) if request.d else None,
        z=z if request.z else None,
        dt_bias=per_channel("dt_bias", request.dt_bias_dtype),
        dt_softplus=request.dt_softplus,
        state_batch_indices=indices,
        **accepted(
            call,
            dst_state_batch_indices=indices,
            out=make.contiguous("out", request.dtype, batch, heads, size),
        ),
    )


def _states(make: Tensors, request: Mamba2Decode) -> torch.Tensor:
    sizes = (request.heads, request.head_dim, request.state)
    inner = (request.head_dim * request.state, request.state, 1)
    pitch = request.cache_stride or request.heads * inner[0]
    return make.strided("state", request.state_dtype, (request.batch, *sizes), (pitch, *inner))


def _indices(make: Tensors, request: Mamba2Decode) -> torch.Tensor | None:
    if not request.indices:
        return None
    return make.strided("indices", request.index_dtype, (request.batch,), (request.index_stride,))
