"""Kernels of the imitated package: each stage is one, so that a change of it must change every key."""

# ruff: noqa: ANN201, ANN202

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute

CHUNK = 64


@cute.kernel
def _stage_kernel(x: cute.Tensor, y: cute.Tensor, count: cutlass.Int32, masked: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * CHUNK + thread
    if cutlass.const_expr(masked):
        if i < count:
            y[i] = x[i]
    else:
        y[i] = x[i]


def make_stage(masked: bool):
    """The host function of one variant, as a closure."""

    @cute.jit
    def host(x: cute.Tensor, y: cute.Tensor, count: cutlass.Int32, stream: driver.CUstream):
        _stage_kernel(x, y, count, masked).launch(
            grid=[(count + CHUNK - 1) // CHUNK, 1, 1], block=[CHUNK, 1, 1], stream=stream
        )

    return host
