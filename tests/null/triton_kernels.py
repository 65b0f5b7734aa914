"""Kernels small enough to compile in a fraction of a second, one for each thing a capture must get right.

One has a name that begins with an underscore, as many a library's has: so does the file of a group.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _scale(x, y, n, factor, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, factor * tl.load(x + at, mask=at < n), mask=at < n)


def fitting(configs: list[Any], named: dict[str, Any], **_: Any) -> list[Any]:
    return [config for config in configs if config.kwargs["BLOCK"] <= named["n"]]


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=1) for block in (32, 64, 128)],
    key=["n"],
    prune_configs_by={"early_config_prune": fitting},
    cache_results=True,
)
@triton.heuristics({"EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
@triton.jit
def double(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # noqa: ANN001, ANN201
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(x + at, 2 * tl.load(x + at))
    else:
        tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


# What `run_all` asks for: every class of pointer and integer of `_scale`, and both candidates of `double`
# that fit, of each evenness.
SCALE_VARIANTS = 5
DOUBLE_VARIANTS = 4


def run_blocks(blocks: list[int]) -> None:
    """One variant of `_scale` a block."""
    x = torch.empty(64, device="cuda")
    for block in blocks:
        _scale[(1,)](x, x, 64, 2.5, BLOCK=block)


def run_all() -> None:
    x = torch.empty(128, device="cuda")
    for n in (64, 96, 63, 1):
        _scale[(1,)](x, x, n, 2.5, BLOCK=32)
    # A view that starts 4 bytes in: no freshly made tensor has such a pointer.
    _scale[(1,)](x[1:], x, 64, 2.5, BLOCK=32)
    _scale[(1,)](x, x, 2**40, 2.5, BLOCK=32)
    double[(1,)](x, 64)
    double[(1,)](x, 100)
