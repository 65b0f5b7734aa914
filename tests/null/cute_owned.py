"""A small library of CuTe kernels that keeps them as engines keep their own: nowhere that has a name.

`Adder` is one object of a module with a dict of its own, keyed by a class of its own; `Scaler.compile` is a
static method under `functools.cache`. The kernels are those of `cute_kernels`, with annotations as there.
"""
# ruff: noqa: ANN001, ANN201, ANN204, ANN205

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS = 128
CUTE = {torch.float32: cutlass.Float32, torch.bfloat16: cutlass.BFloat16}


class AddKernel:
    """What is compiled: an object whose attributes steer the trace."""

    def __init__(self, amount: int):
        self.amount = amount

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        y: cute.Tensor,
        n: cutlass.Int32,
        stream: driver.CUstream,
        offset: cutlass.Int32 = 0,
    ):
        blocks = (n + THREADS - 1) // THREADS
        self.add(x, y, n, offset).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def add(self, x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, offset: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < n:
            y[i] = (x[i] + self.amount + offset).to(y.element_type)


def vectors(dtype: torch.dtype):
    size = cute.sym_int()
    return tuple(make_fake_compact_tensor(CUTE[dtype], (size,)) for _ in range(2))


class Adder:
    @dataclass(frozen=True)
    class CompileKey:
        amount: int
        dtype: torch.dtype

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def compile(self, compile_key) -> None:
        x, y = vectors(compile_key.dtype)
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        self._compiled[compile_key] = cute.compile(
            AddKernel(compile_key.amount), x, y, cutlass.Int32(1), stream, options="--enable-tvm-ffi"
        )

    def __call__(self, x: torch.Tensor, amount: int) -> None:
        key = self.CompileKey(amount, x.dtype)
        if key not in self._compiled:
            self.compile(key)
        self._compiled[key](x, torch.empty_like(x), x.numel(), torch.cuda.current_stream().cuda_stream)


adder = Adder()


class Cached:
    @functools.cache
    @staticmethod
    def compile(amount: int, dtype: torch.dtype):
        x, y = vectors(dtype)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile(AddKernel(amount), x, y, cutlass.Int32(1), stream, options="--enable-tvm-ffi")


def touch() -> None:
    """What no record may have called."""
    Path(os.environ["HOME"], "touched").touch()


def run(what: str) -> None:
    """One call by name, with the arguments of an engine."""
    x = torch.zeros(1000, device="cuda")
    if what == "owned.object":
        adder(x, 1)
    elif what == "owned.other":
        adder(x.bfloat16(), 2)
    else:
        Cached.compile(3, x.dtype)(x, torch.empty_like(x), x.numel())
