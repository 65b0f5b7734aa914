"""An engine on the null device: a scheduler's random batches, and the library calls that each one causes.

Usage: serving_engine.py PROFILE MAX_TOKENS STEPS RECORDS RESULT [kda]. It attaches, says `attached` on
standard output, and steps once a line comes in. Its nvcc leaves every compile's arguments in RECORDS, and
Triton tells of those it had to do itself; both are counted here, independently of the observer that `attach`
installs and that alone tells the daemon. How rows come about is written here anew: routing is drawn token by
token, as a model does it.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deep_gemm
import torch
from engine import BF16, CALLS, INT, empty

from prefetchd import attach
from prefetchd.profiles import GemmSite, Profile, read_profile
from prefetchd.protocol import Batch
from prefetchd.targets import load_target

TARGET = "h200"


def bf16_contiguous(site: GemmSite, m: int) -> Callable[[], Any]:
    a, b, d = empty(BF16, m, site.k), empty(BF16, site.groups, site.n, site.k), empty(BF16, m, site.n)
    return lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, empty(INT, m))


def bf16_masked(site: GemmSite, expected_m: int) -> Callable[[], Any]:
    rows, used = max(128, expected_m), empty(INT, site.groups)
    a, d = empty(BF16, site.groups, rows, site.k), empty(BF16, site.groups, rows, site.n)
    b = empty(BF16, site.groups, site.n, site.k)
    return lambda: deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, used, expected_m)


ALL_CALLS = {
    **CALLS,
    "m_grouped_bf16_gemm_nt_contiguous": bf16_contiguous,
    "m_grouped_bf16_gemm_nt_masked": bf16_masked,
}


def random_batch(chance: random.Random, max_tokens: int) -> Batch:
    """Prompts, or their chunks, and decodes, together no more than the scheduler may gather."""
    decodes = chance.randint(0, max_tokens // 2)
    lengths, left = [], max_tokens - decodes
    for _ in range(chance.choice((0, 1, 1, 2, 5))):
        length = chance.randint(1, max(1, left // 2))
        if length < left:
            lengths.append(length)
            left -= length
    tokens = sum(lengths) + decodes
    return Batch(tokens=tokens or 1, prefill_lengths=tuple(lengths), decodes=decodes or int(not tokens))


def rows(site: GemmSite, profile: Profile, batch: Batch, chance: random.Random) -> int:
    """M of the site's call in this step; 0 for none."""
    match site.m:
        case "tokens":
            return batch.tokens
        case "context":
            return sum(batch.prefill_lengths)
        case "routed":
            # Every expert's rows begin at an aligned place.
            routed: Counter[int] = Counter()
            for _ in range(batch.tokens):
                routed.update(chance.sample(range(site.groups), profile.top_k))
            step = profile.alignment
            return sum(-(-count // step) * step for count in routed.values())
        case "expected":
            return -(-batch.tokens * profile.top_k // site.groups)
    raise ValueError(site.m)


class Compiles:
    """What this process compiled itself, counted as the compilers themselves tell of it."""

    def __init__(self, records: Path) -> None:
        self._records = records
        self.triton = 0

    @property
    def nvcc(self) -> int:
        """How often nvcc compiled."""
        return len(list(self._records.glob("*.argv")))

    def listen_to_triton(self) -> None:
        from triton import knobs

        before = knobs.compilation.listener

        def listener(*, cache_hit: bool, **others: Any) -> None:
            self.triton += not cache_hit
            if before is not None:
                before(cache_hit=cache_hit, **others)

        knobs.compilation.listener = listener


def main(path: str, max_tokens: int, steps: int, records: str, result: str, kda: bool) -> None:
    profile = read_profile(path)
    # Without KDA's kernels their provider has nothing to do.
    families = ("deep_gemm", "kda") if kda else ("deep_gemm",)
    handle = attach(profile, target=load_target(TARGET), max_tokens=max_tokens, providers=families)
    assert handle.client is not None, handle.reason
    compiles = Compiles(Path(records))
    serve: Callable[[list[int]], object] | None = None
    if kda:
        from random_engine import kda as layer

        serve = layer(next(site.sizes["heads"] for site in profile.kernels if site.op == "chunk_kda"))
        compiles.listen_to_triton()
    print("attached", flush=True)
    sys.stdin.readline()
    chance = random.Random(path)
    calls = 0
    failed: list[str] = []
    for _ in range(steps):
        batch = random_batch(chance, max_tokens)
        handle.on_schedule(batch)
        work = [
            ALL_CALLS[site.op](site, m) for site in profile.gemms if (m := rows(site, profile, batch, chance))
        ]
        if serve is not None and batch.prefill_lengths:
            lengths = list(batch.prefill_lengths)
            work.append(lambda lengths=lengths: serve(lengths))
        for call in work:
            calls += 1
            try:
                with torch.inference_mode():
                    call()
            except RuntimeError as error:
                failed.append(str(error)[:500])
    found = {"calls": calls, "failed": failed, "nvcc": compiles.nvcc, "triton": compiles.triton}
    Path(result).write_text(json.dumps(found))
    # Stays attached until the test has read the daemon's figures.
    print("served", flush=True)
    sys.stdin.readline()
    handle.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], "kda" in sys.argv)
