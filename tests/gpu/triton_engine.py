"""A serving process's view of one tuned call: what its first run takes, and how much of that is measuring.

Usage: triton_engine.py CASE. The call is the library's own, with real tensors, and nothing of ours is in this
process. Prints one JSON object on the last line; device time is included, since each call is synchronised.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import logsigmoid

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from tables.triton_counting import count_benchmarks

BF16, FLOAT, INT = torch.bfloat16, torch.float32, torch.int32
LENGTHS = (256, 64)
TOKENS = sum(LENGTHS)
# A warm call's time is the best of these.
REPEATS = 5


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def boundaries() -> torch.Tensor:
    return torch.tensor([0, LENGTHS[0], TOKENS], device="cuda", dtype=INT)


def kda(heads: int) -> Callable[[], Any]:
    from fla.ops.kda import chunk_kda

    offsets = boundaries()
    given = {name: random(1, TOKENS, heads, 128) for name in ("q", "k", "v")}
    given["g"] = logsigmoid(random(1, TOKENS, heads, 128, dtype=FLOAT))
    given["beta"] = random(1, TOKENS, heads, dtype=FLOAT).sigmoid()
    state = torch.zeros(len(LENGTHS), heads, 128, 128, device="cuda")
    return lambda: chunk_kda(
        **given,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=offsets,
    )


def gdn() -> Callable[[], Any]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    heads, values, offsets = 4, 8, boundaries()
    given = {name: random(1, TOKENS, heads, 128) for name in ("q", "k")}
    given["v"] = random(1, TOKENS, values, 128)
    given["g"] = logsigmoid(random(1, TOKENS, values, dtype=FLOAT))
    given["beta"] = random(1, TOKENS, values, dtype=FLOAT).sigmoid()
    state = torch.zeros(len(LENGTHS), values, 128, 128, device="cuda")
    return lambda: chunk_gated_delta_rule(
        **given,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=offsets,
    )


def mamba() -> Callable[[], Any]:
    # The package's own __init__ wants its compiled extensions, which these kernels do not need.
    package = ModuleType("mamba_ssm")
    package.__path__ = [f"{path}/mamba_ssm" for path in sys.path]
    sys.modules["mamba_ssm"] = package
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    heads, size, groups, state = 128, 64, 8, 128
    inner, mixed = heads * size, groups * state
    # One buffer of the convolution's output, one of the projection, as a layer has them.
    buffer = random(1, TOKENS, inner + 2 * mixed)
    projected = random(1, TOKENS, 2 * inner + 2 * mixed + heads)
    x, b, c = buffer.split([inner, mixed, mixed], -1)
    given: dict[str, Any] = {
        "x": x.view(1, TOKENS, heads, size),
        "dt": projected[..., -heads:],
        "A": -random(heads, dtype=FLOAT).exp(),
        "B": b.view(1, TOKENS, groups, state),
        "C": c.view(1, TOKENS, groups, state),
        "chunk_size": 256,
        "D": random(heads, dtype=FLOAT),
        "dt_bias": random(heads, dtype=FLOAT),
        "initial_states": random(1, heads, size, state),
        "seq_idx": torch.repeat_interleave(torch.tensor(LENGTHS)).view(1, -1).to("cuda", INT),
        "cu_seqlens": boundaries(),
    }
    return lambda: mamba_chunk_scan_combined(**given, dt_softplus=True, return_varlen_states=True)


CASES: dict[str, Callable[[], Callable[[], Any]]] = {
    "kda-4": lambda: kda(4),
    "kda-32": lambda: kda(32),
    "gdn": gdn,
    "mamba": mamba,
}


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call, with what it left the device to do."""
    begun = time.perf_counter()
    with torch.inference_mode():
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def main(case: str) -> None:
    call = CASES[case]()
    benchmarks = count_benchmarks()
    # What any process on a GPU pays once: the context, and torch's own first kernel.
    torch.ones(8, device="cuda").sum().item()
    first = timed(call)
    count = len(benchmarks)
    again = min(timed(call) for _ in range(REPEATS))
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "first_call_s": round(first, 4),
                "benchmarks": count,
                "benchmark_s": round(sum(benchmarks[:count]), 3),
                "later_call_ms": round(again * 1e3, 3),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
