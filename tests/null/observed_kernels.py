"""What an engine launches and nobody planned: small kernels of no library, one for each way it can go.

`commit` is what a suspended request runs and no warm-up forward does: of the states after each draft, the one
to go on from is copied into the request's slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def commit_states(pool, drafts, slots, steps, layers, SIZE: tl.constexpr, DRAFTS: tl.constexpr):  # noqa: ANN001, ANN201
    row, layer = tl.program_id(0), tl.program_id(1)
    slot, step = tl.load(slots + row), tl.load(steps + row)
    at = tl.arange(0, SIZE)
    state = tl.load(drafts + ((layer * DRAFTS + row) * DRAFTS + step) * SIZE + at)
    tl.store(pool + (slot * layers + layer) * SIZE + at, state)


def commit(layers: int = 3) -> None:
    pool = torch.empty(8, layers, 64, device="cuda")
    drafts = torch.empty(layers, 2, 4, 64, device="cuda")
    slots, steps = (torch.zeros(2, device="cuda", dtype=torch.int32) for _ in range(2))
    commit_states[(2, layers)](pool, drafts, slots, steps, layers, SIZE=64, DRAFTS=4)


@triton.jit
def twice(x):  # noqa: ANN001, ANN201
    return 2 * x


@triton.jit
def mapped(x, function: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    at = tl.arange(0, BLOCK)
    tl.store(x + at, function(tl.load(x + at)))


def map_function() -> None:
    mapped[(1,)](torch.empty(32, device="cuda"), twice, BLOCK=32)


@triton.jit
def broken(x, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    tl.static_assert(BLOCK > 1000, "this kernel is for large blocks")
    tl.store(x + tl.arange(0, BLOCK), 1.0)


def fail() -> None:
    broken[(1,)](torch.empty(32, device="cuda"), BLOCK=32)


def local() -> None:
    @triton.jit
    def inside(x, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
        tl.store(x + tl.arange(0, BLOCK), 1.0)

    inside[(1,)](torch.empty(32, device="cuda"), BLOCK=32)


def directly() -> None:
    """As torch's Inductor does it: no jit function is called."""
    from triton.compiler import ASTSource

    source = ASTSource(twice_in_place, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 32})
    triton.compile(source)


def in_other_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from triton.runtime._async_compile import AsyncCompileMode

    x = torch.empty(64, device="cuda")
    with ThreadPoolExecutor(2) as pool, AsyncCompileMode(pool):
        for block in (16, 32, 64):
            twice_in_place[(1,)](x, BLOCK=block)


def directly_broken() -> None:
    from triton.compiler import ASTSource

    triton.compile(ASTSource(broken, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 32}))


@triton.jit
def twice_in_place(x, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    at = tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at))
