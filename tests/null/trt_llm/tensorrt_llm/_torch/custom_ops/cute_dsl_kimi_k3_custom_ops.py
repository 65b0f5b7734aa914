"""Imitates how TensorRT-LLM keeps its KDA prefill: three dicts, functions without TVM-FFI, hints.

The keys have the fields of its own: the device's number, whether lengths are aligned, the layout of the pool
of states with its number of slots. What the kernels compute is of no interest here.
"""

# ruff: noqa: ANN001, ANN202, ANN205

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

from ..attention.kernels.blackwell.kimi_k3_kda.stages import make_stage

CHUNK = 64
SM_COUNT = 148

_fused_k123_cache = {}
_akk_inv_cache = {}
_k4p_cache = {}


def _layout_key(tensor):
    return (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), True)


def _launch(cache, key, masked, x):
    y = torch.empty_like(x)
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    arguments = [from_dlpack(each.flatten()).mark_layout_dynamic() for each in (x, y)]
    arguments += [cutlass.Int32(x.numel()), stream]
    if key not in cache:
        cache[key] = cute.compile(make_stage(masked), *arguments)
    cache[key](*arguments)
    return y


class KdaPrefillRunner:
    """The prefill, by what the operator calls."""

    @staticmethod
    def forward(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        state_indices,
        scale,
        cu_seqlens=None,
        chunk_indices=None,
        chunk_size=CHUNK,
        safe_gate=False,
        lower_bound=None,
        use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=True,
        A_log=None,
        dt_bias=None,
        varlen_is_aligned=None,
        single_sequence_length=None,
    ):
        """One packed row of sequences; without the hint the offsets would be read back."""
        heads, device = q.shape[2], q.device.index or 0
        aligned = single_sequence_length is not None or varlen_is_aligned
        if aligned is None:
            lengths = cu_seqlens.diff().tolist()
            aligned = len(lengths) == 1 or all(length % CHUNK == 0 for length in lengths)
        types = (cu_seqlens.dtype, cu_seqlens.dtype)
        key = (heads, True, device, dt_bias is not None, safe_gate, bool(aligned), types, -1,
               use_beta_sigmoid_in_kernel, beta.dtype)  # fmt: skip
        out = _launch(_fused_k123_cache, key, not aligned, q)
        out = _launch(_akk_inv_cache, (heads, True, device, *types, -1, beta.dtype), True, out)
        indices = (state_indices.dtype, state_indices.stride())
        key = (device, SM_COUNT, heads, q.shape[3], v.shape[3], _layout_key(state_pool), indices)
        return _launch(_k4p_cache, key, True, out)
