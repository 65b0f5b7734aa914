"""An engine as TensorRT-LLM on the null device: prefills of other lengths than were traced, no compiles."""

from __future__ import annotations

import argparse
import json
import os
from itertools import accumulate

import torch
from cute_process import forbid_compiling

from prefetchd.cute.artifacts import find_root
from prefetchd.cute.engine import attach
from prefetchd.cute.homes import sites
from prefetchd.cute.loading import preload
from prefetchd.targets import load_target

HEADS, DIM = 2, 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("lengths", nargs="+", help="The lengths of one batch, with commas between.")
    arguments = parser.parse_args()
    torch.zeros(1, device="cuda")
    preload()
    target, environment = load_target(arguments.target), dict(os.environ)
    mode, _ = attach(find_root(environment, None), lambda: target, environment, sites())
    forbid_compiling()
    from tensorrt_llm._torch.custom_ops.cute_dsl_kimi_k3_custom_ops import KdaPrefillRunner

    for text in arguments.lengths:
        lengths = [int(length) for length in text.split(",")]
        total = sum(lengths)
        KdaPrefillRunner.forward(
            *(rand(1, total, HEADS, DIM) for _ in range(4)),
            rand(1, total, HEADS),
            torch.zeros(arguments.slots, HEADS, DIM, DIM, device="cuda"),
            torch.arange(len(lengths), dtype=torch.int32, device="cuda"),
            DIM**-0.5,
            cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda"),
            use_gate_in_kernel=True,
            A_log=torch.zeros(HEADS, device="cuda"),
            dt_bias=torch.zeros(HEADS * DIM, device="cuda"),
        )
    print(json.dumps(mode.counts))


def rand(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    main()
