"""An engine on the null device: a scheduler's random batches, and the library calls that each one causes.

Usage: serving_engine.py PROFILE MAX_TOKENS STEPS RECORDS RESULT [kda]. It attaches, says `attached` on
standard output, and steps once a line comes in. Its nvcc leaves every compile's source and arguments in
RECORDS, and Triton tells of those it had to do itself; each is reported to the daemon as an engine's observer
does. How rows come about is written here anew: routing is drawn token by token, as a model does it.
"""

from __future__ import annotations

import json
import os
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
from prefetchd.compilers import load_compiler
from prefetchd.compilers.deep_jit_payload import missed_payloads
from prefetchd.compilers.triton_cache import key_of
from prefetchd.profiles import GemmSite, Profile, read_profile
from prefetchd.protocol import Batch, Event
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
    """What this process compiled itself, reported as it is seen."""

    def __init__(self, records: Path, tell: Callable[[Event], bool]) -> None:
        self._records, self._tell = records, tell
        self._nvcc = load_compiler("deep_jit", load_target(TARGET), os.environ).nvcc
        self._seen: set[Path] = set()
        self.nvcc = self.triton = 0

    def look(self) -> None:
        """At the sources that nvcc was started for since the last look."""
        new = set(self._records.glob("*.argv")) - self._seen
        if not new:
            return
        place = self._records / "new"
        place.mkdir(exist_ok=True)
        for path in new:
            for suffix in (".argv", ".cu"):
                (place / path.name).with_suffix(suffix).write_bytes(path.with_suffix(suffix).read_bytes())
        for payload in missed_payloads(place):
            self.nvcc += 1
            self._report("deep_jit", digest=payload.digest(self._nvcc))
        for path in place.iterdir():
            path.unlink()
        self._seen |= new

    def listen_to_triton(self) -> None:
        from triton import knobs

        def listener(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                self.triton += 1
                self._report("triton", key=key_of(metadata["hash"]))

        knobs.compilation.listener = listener

    def _report(self, compiler: str, **name: str) -> None:
        for what in ("started", "ended"):
            self._tell(Event(what=what, compiler=compiler, seconds=0.1, **name))


def main(path: str, max_tokens: int, steps: int, records: str, result: str, kda: bool) -> None:
    profile = read_profile(path)
    # Without KDA's kernels their provider has nothing to do.
    families = ("deep_gemm", "kda") if kda else ("deep_gemm",)
    handle = attach(profile, target=load_target(TARGET), max_tokens=max_tokens, providers=families)
    assert handle.client is not None, handle.reason
    compiles = Compiles(Path(records), handle.client.event)
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
        compiles.look()
    found = {"calls": calls, "failed": failed, "nvcc": compiles.nvcc, "triton": compiles.triton}
    Path(result).write_text(json.dumps(found))
    # Stays attached until the test has read the daemon's figures.
    print("served", flush=True)
    sys.stdin.readline()
    handle.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], "kda" in sys.argv)
