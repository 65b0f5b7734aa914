"""Captures `chunk_kda` calls on the null device: the number of keys after one call, and with more lengths."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from prefetchd.compilers.triton import Triton
from prefetchd.targets import load_target


def call(tokens: int) -> None:
    """Varlen, bf16 with fp32 gate and beta, gate outside, fp32 initial and final state, int32 offsets."""
    import torch
    from fla.ops.kda import chunk_kda

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, device="cuda", dtype=dtype)

    heads, width = 32, 128
    q, k, v = (empty(1, tokens, heads, width) for _ in range(3))
    gate = empty(1, tokens, heads, width, dtype=torch.float32)
    beta = empty(1, tokens, heads, dtype=torch.float32)
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    with torch.no_grad():
        chunk_kda(
            q,
            k,
            v,
            gate,
            beta,
            initial_state=empty(1, heads, width, width, dtype=torch.float32),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=offsets.cuda(),
            cu_seqlens_cpu=offsets,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    arguments = parser.parse_args()
    compiler = Triton(load_target(arguments.target), dict(os.environ))
    compiler.prepare(arguments.scratch)
    counts = []
    with compiler.capture(arguments.scratch) as capture:
        for lengths in ((128,), (2049, 4097, 6145)):
            for tokens in lengths:
                call(tokens)
            counts.append(len(capture.jobs()))
    written = [str(path) for path in arguments.scratch.rglob("*.autotune.json")]
    print(json.dumps({"counts": counts, "written": written}))


if __name__ == "__main__":
    main()
