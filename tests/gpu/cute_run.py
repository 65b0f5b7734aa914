"""Launches the kernels of `cute_link.py` on a real device, without the DSL, and compares them with torch.

    python tests/gpu/cute_run.py DIRECTORY

Prints one JSON object: the largest difference of each kernel, what each load took, whether a DSL was there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tvm_ffi


def main() -> None:
    place = Path(sys.argv[1])
    kernels = json.loads((place / "kernels.json").read_text())
    # The context and torch's own first launch are not what a load takes.
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    torch.manual_seed(0)
    differences, loads, launches = {}, {}, {}
    for call, check in (("scale", scale), ("decode", decode)):
        begun = time.perf_counter()
        function = tvm_ffi.load_module(str(place / kernels[call]["file"]))[kernels[call]["symbol"]]
        loads[call] = round(1000 * (time.perf_counter() - begun), 2)
        begun = time.perf_counter()
        differences[call] = check(function)
        launches[call] = round(1000 * (time.perf_counter() - begun), 2)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(0),
                "differences": differences,
                "load_ms": loads,
                "first_call_and_check_ms": launches,
                "compiles": 0 if importlib.util.find_spec("cutlass") is None else "the DSL is importable",
                "dsl_imported": "cutlass" in sys.modules,
            }
        )
    )


def scale(function: Callable[..., Any]) -> float:
    x = torch.rand(100_003, device="cuda")
    y = torch.zeros_like(x)
    function(x, y, x.numel())
    return difference(y, 3.0 * x)


def decode(function: Callable[..., Any]) -> float:
    """Three steps, since each reads the state that the one before wrote."""
    sequences, heads, dim, size = 4, 2, 32, 8
    pool = torch.rand(size, heads, dim, dim, device="cuda")
    expected_pool = pool.double()
    slots = torch.tensor([6, 0, 3, 5], dtype=torch.int32, device="cuda")
    worst = 0.0
    for _ in range(3):
        q, k, v = (torch.rand(sequences, heads, dim, device="cuda") for _ in range(3))
        k = k / dim
        gate = -torch.rand(sequences, heads, dim, device="cuda")
        beta = torch.rand(sequences, heads, device="cuda")
        o = torch.zeros(sequences, heads, dim, device="cuda")
        function(q, k, v, gate, beta, pool, slots, o)
        wanted = reference(q, k, v, gate, beta, expected_pool, slots)
        worst = max(worst, difference(o, wanted), difference(pool, expected_pool))
    return worst


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor,
    pool: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The recurrence in double precision; the pool in place."""
    q, k, v, gate, beta = (each.double() for each in (q, k, v, gate, beta))
    state = pool[slots.long()] * gate.exp()[..., None]
    correction = beta[..., None] * (v - torch.einsum("nhkv,nhk->nhv", state, k))
    state = state + k[..., None] * correction[..., None, :]
    pool[slots.long()] = state
    return torch.einsum("nhkv,nhk->nhv", state, q) * q.shape[-1] ** -0.5


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).abs().max())


if __name__ == "__main__":
    main()
