"""The gated norm after the scan: `rmsnorm_fn` of the library, `rms_norm_gated` of engines, `layernorm_fn`."""

from __future__ import annotations

from prefetchd.requests.mamba import GatedNorm

from .homes import Home
from .tensors import Tensors


def run(home: Home, request: GatedNorm) -> None:
    """One call over the scan's output, gated by the columns of the projected buffer that are z."""
    call = home.function("rms_norm" if request.rms else "layer_norm")
    make = Tensors(request)
    z = (
        make.columns("z", request.dtype, request.tokens, 0, request.inner, request.row)
        if request.gate
        else None
    )
    call(
        make.contiguous("x", request.dtype, request.tokens, request.inner),
        make.contiguous("weight", request.weight_dtype, request.inner),
        make.contiguous("bias", request.weight_dtype, request.inner) if request.bias else None,
        z=z,
        group_size=request.inner // request.groups,
        norm_before_gate=request.norm_before_gate,
    )
