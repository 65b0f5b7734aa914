"""An engine on the null device that serves random batches by the library's own functions and may not compile.

Usage: random_engine.py kda|mamba HEADS. Triton is used as it is, launcher and autotuner included: whatever it
does not find in its cache it begins to compile, and there it fails here and ends. Nothing of ours makes the
calls or their shapes. The answer is one JSON object on the last line.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

BF16, FLOAT, INT = torch.bfloat16, torch.float32, torch.int32
# What the scheduler of an engine gathers at most.
MAX_TOKENS = 8192
BATCHES = {"kda": 60, "mamba": 200}
# A tuner measures all candidates for the first batch that a process meets and launches its choice for others,
# of whatever class. So every so many batches it forgets, as if a process began there.
FRESH_EVERY = 10

Serve = Callable[[list[int]], object]


class Compiling(Exception):
    """The library has found no artifact for a kernel that it is about to launch."""


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to("cuda", INT)


def kda(heads: int) -> Serve:
    from fla.ops.kda import chunk_kda

    def serve(lengths: list[int]) -> object:
        tokens = sum(lengths)
        q, k, v = (tensor(1, tokens, heads, 128) for _ in range(3))
        return chunk_kda(
            q=q,
            k=k,
            v=v,
            g=tensor(1, tokens, heads, 128, dtype=FLOAT),
            beta=tensor(1, tokens, heads, dtype=FLOAT),
            initial_state=tensor(len(lengths), heads, 128, 128, dtype=FLOAT),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=boundaries(lengths),
        )

    return serve


def mamba(heads: int) -> Serve:
    # The package's own __init__ wants its compiled extensions, which these kernels do not need.
    package = ModuleType("mamba_ssm")
    package.__path__ = [f"{path}/mamba_ssm" for path in sys.path]
    sys.modules["mamba_ssm"] = package
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    size, groups, state = 64, 8, 128
    inner, mixed = heads * size, groups * state

    def serve(lengths: list[int]) -> object:
        tokens = sum(lengths)
        # One buffer of the convolution's output, one of the projection, as a layer has them.
        x, b, c = tensor(1, tokens, inner + 2 * mixed).split([inner, mixed, mixed], -1)
        projected = tensor(1, tokens, 2 * inner + 2 * mixed + heads)
        sequence = torch.repeat_interleave(torch.tensor(lengths)).view(1, -1)
        return mamba_chunk_scan_combined(
            x.view(1, tokens, heads, size),
            projected[..., -heads:],
            tensor(heads, dtype=FLOAT),
            b.view(1, tokens, groups, state),
            c.view(1, tokens, groups, state),
            256,
            D=tensor(heads, dtype=FLOAT),
            dt_bias=tensor(heads, dtype=FLOAT),
            dt_softplus=True,
            initial_states=tensor(1, heads, size, state),
            seq_idx=sequence.to("cuda", INT),
            cu_seqlens=boundaries(lengths),
            return_varlen_states=True,
        )

    return serve


def random_lengths(chance: random.Random) -> list[int]:
    """Any number of sequences, short ones, whole chunks, prompts of thousands, within the largest batch."""
    lengths: list[int] = []
    for _ in range(chance.choice([1, 1, 2, 5, 17, 32])):
        length = chance.choice(
            [1, chance.randint(1, 60), 64 * chance.randint(1, 8), chance.randint(1, 900), 4096]
        )
        if sum(lengths) + length <= MAX_TOKENS:
            lengths.append(length)
    return lengths


def listen(found: set[str], missed: list[str]) -> None:
    """Every kernel the library loads, and every one that it would have to compile, which fails."""
    from triton import knobs
    from triton.compiler.compiler import ASTSource

    def listener(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        (found.add if cache_hit else missed.append)(metadata["hash"])

    def make_ir(source: Any, *_: Any, **__: Any) -> None:
        missed.append(source.name)
        raise Compiling(source.name)

    knobs.compilation.listener = listener
    ASTSource.make_ir = make_ir


def forget_choices() -> None:
    from triton.runtime.autotuner import Autotuner

    for tuner in [each for each in gc.get_objects() if isinstance(each, Autotuner)]:
        tuner.cache.clear()


def main(family: str, heads: int) -> None:
    found: set[str] = set()
    missed: list[str] = []
    listen(found, missed)
    serve = {"kda": kda, "mamba": mamba}[family](heads)
    chance = random.Random(f"{family} {heads}")
    served = 0
    for number in range(BATCHES[family]):
        if number % FRESH_EVERY == 0:
            forget_choices()
        try:
            with torch.inference_mode():
                serve(random_lengths(chance))
            served += 1
        except Compiling:
            # Later batches would meet the same, after the tuner has measured all the others again.
            break
    print(json.dumps({"served": served, "found": sorted(found), "missed": missed}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
