"""Tuned kernels, small enough to compile in a fraction of a second, one for each way results are treated."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

# Another list is another release of the kernel's library.
BLOCKS = [int(block) for block in os.environ.get("TEST_BLOCKS", "32,64,128").split(",")]
CONFIGS = [triton.Config({"BLOCK": block}, num_warps=1) for block in BLOCKS]


@triton.autotune(configs=CONFIGS, key=["n"], cache_results=True)
@triton.jit
def kept(x, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def forgotten(x, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 3 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, pre_hook=lambda named: None) for block in (32, 64)],
    key=["n"],
    cache_results=True,
)
@triton.jit
def hooked(x, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 4 * tl.load(x + at, mask=at < n), mask=at < n)


def run_kept() -> None:
    x = torch.empty(128, device="cuda")
    kept[(1,)](x, 64)
    kept[(1,)](x, 100)


def run_all() -> None:
    run_kept()
    x = torch.empty(128, device="cuda")
    forgotten[(1,)](x, 64)
    hooked[(1,)](x, 64)
