"""Runs on the null device: asks fla for the keys of KDA and GDN requests and compiles nothing.

Its arguments are a scenario and an output file, where it writes what it found as JSON. Keys are the library's
own: the names of the directories it would look into.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.triton_capture import intercept
from prefetchd.profiles import profile_from_config
from prefetchd.provider import Limits, Unavailable
from prefetchd.request import Request
from prefetchd.requests.delta import ChunkRecurrence, ShortConvolution, StepRecurrence
from prefetchd.requests.gdn import (
    ChunkGatedDeltaRule,
    FusedRecurrentGatedDeltaRule,
    FusedSigmoidGatingUpdate,
    GdnGate,
    GdnGatedNorm,
    GdnPackedDecode,
)
from prefetchd.requests.kda import (
    ChunkKda,
    FusedRecurrentKda,
    KdaGate,
    KdaGatedNorm,
    KdaPackedDecode,
    KdaShortConvolution,
    KdaStateCommit,
)
from prefetchd.targets import load_target
from prefetchd_providers.delta_provider import DeltaProvider
from prefetchd_providers.gdn import GdnProvider
from prefetchd_providers.kda import KdaProvider

MODELS = Path(__file__).parents[2] / "examples/models"
SIZES: dict[str, Any] = {"heads": 32, "key_dim": 128, "value_dim": 128}
# The request whose numbers were measured first: packed, gate outside, states in and out.
BASE: dict[str, Any] = {
    **SIZES,
    "g_dtype": "float32",
    "beta_dtype": "float32",
    "qk_l2norm": True,
    "initial_state": True,
    "final_state": True,
}
POOL: dict[str, Any] = {"state_indices": "ssm_state_indices", "final_state": False}
BATCHES = 60


class Keys:
    """What each request asked for."""

    def __init__(self) -> None:
        self.provider = KdaProvider()
        self.provider.warm_up()
        # The first look-up of a process initialises the device and digests Triton's own code.
        self.of(KdaGatedNorm(tokens=1, heads=1, dim=16))
        self.seconds: list[float] = []

    def of(self, request: Request) -> set[str]:
        found: set[str] = set()
        begun = time.process_time()
        with intercept(lambda key, _variant, _source: found.add(key)):
            self.provider.run(request)
        self.seconds = [*getattr(self, "seconds", []), time.process_time() - begun]
        return found

    def all(self, requests: Iterable[Request]) -> set[str]:
        return set().union(*(self.of(request) for request in requests))


def chunk(tokens: int = 128, **changes: Any) -> ChunkKda:
    return ChunkKda(**{**BASE, "tokens": tokens, **changes})


def step(tokens: int = 1, **changes: Any) -> FusedRecurrentKda:
    return FusedRecurrentKda(**{**BASE, "tokens": tokens, **changes})


def counts(keys: Keys) -> dict[str, Any]:
    """The numbers measured for KDA with 32 heads."""
    base = keys.of(chunk())
    changes: dict[str, dict[str, Any]] = {
        "no initial state": {"initial_state": False},
        "int64 offsets": {"index_dtype": "int64"},
        "bf16 gate": {"g_dtype": "bfloat16"},
        "dense": {"varlen": False},
        "chunk 32": {"chunk_size": 32},
        "q not aligned": {"unaligned": ("q",)},
        "values first": {"state_v_first": True},
        "offsets on the host": {"cu_seqlens_cpu": True},
        "seven ragged sequences": {"sequences": 7, "lengths": "ragged", "tokens": 1000},
        "one token": {"tokens": 1},
    }
    return {
        "base": len(base),
        "buckets": len(base | keys.all(chunk(tokens) for tokens in (2049, 4097, 6145))),
        "new": {name: len(keys.of(chunk(**change)) - base) for name, change in changes.items()},
        "decode": len(keys.of(step())),
        "decode in a pool": len(keys.of(step(**POOL)) - keys.of(step())),
        "verify": len(keys.of(step(6, per_sequence=3, accepted_tokens=True, **POOL)) - keys.of(step(**POOL))),
        "padded pool": len(keys.of(step(**POOL, state_stride=1 << 20)) - keys.of(step(**POOL))),
        "gdn": len(keys.of(ChunkGatedDeltaRule(**BASE, tokens=128))),
        "gdn decode": len(keys.of(FusedRecurrentGatedDeltaRule(**BASE, tokens=1))),
        "seconds": max(keys.seconds),
    }


def random_batches(keys: Keys) -> dict[str, Any]:
    """Batches of many sequences against the universe, for each layer and each caller's flags."""
    found = {}
    for name, model, provider in (
        ("kda", "kimi-linear-48b-a3b", KdaProvider()),
        ("gdn", "qwen3-next-80b-a3b", GdnProvider()),
    ):
        for tp, flag_set in ((1, "vllm"), (8, "vllm"), (8, "fla-layer")):
            listed = universe(provider, model, tp, flag_set)
            known = keys.all(listed)
            met = keys.all(random_requests(listed, random.Random(tp)))
            found[f"{name} {flag_set} tp {tp}"] = {"misses": len(met - known), "met": len(met)}
    return found


def universe(provider: DeltaProvider, model: str, tp: int, flag_set: str) -> list[Any]:
    profile = profile_from_config(MODELS / f"{model}.json", tp=tp)
    known = {"fused_kda_gate", "fused_gdn_gate"} if flag_set == "fla-layer" else set()
    kernels = tuple(
        msgspec.structs.replace(site, flags={"set": flag_set})
        for site in profile.kernels
        if site.op not in known
    )
    limits = Limits(max_tokens=8192, target=load_target("h200"))
    return list(provider.universe(msgspec.structs.replace(profile, kernels=kernels), limits))


def random_requests(listed: list[Any], chance: random.Random) -> Iterable[Request]:
    """Each kind of request with token and sequence counts that no list knows of."""
    kinds = list(dict.fromkeys(msgspec.structs.replace(request, tokens=1) for request in listed))
    for _ in range(BATCHES):
        request = chance.choice(kinds)
        sequences = chance.choice([1, 1, 2, 5, 16, 17, 32])
        each = chance.choice([1, chance.randint(1, 60), 16 * chance.randint(1, 15), 256])
        tokens = sequences * each if chance.random() < 0.8 else chance.randint(4096, 8192)
        if isinstance(request, StepRecurrence):
            yield msgspec.structs.replace(request, tokens=sequences * request.per_sequence)
        elif isinstance(request, (ChunkRecurrence, ShortConvolution)):
            fits = tokens % sequences == 0 and not getattr(request, "decode", False)
            count = sequences if fits else 1
            yield msgspec.structs.replace(request, tokens=tokens, sequences=count)
        else:
            yield msgspec.structs.replace(request, tokens=tokens)


def unavailable(keys: Keys) -> dict[str, str]:
    """Why the provider refuses what a home does not have, and what a call does not take."""
    requests = {
        "unknown home": chunk(home="nowhere"),
        "missing home": chunk(home="no_such_engine.kda"),
        "commit": KdaStateCommit(**SIZES, tokens=1, layers=2, slots=4, drafts=3),
        "sigmoid gating": FusedSigmoidGatingUpdate(**BASE, tokens=1),
        "ignored argument": chunk(state_indices="ssm_state_indices"),
        "gate outside": chunk(home="fake_engine.newer"),
        "unknown tensor": chunk(unaligned=("queries",)),
    }
    reasons = {}
    for name, request in requests.items():
        try:
            keys.of(request)
        except (Unavailable, ValueError) as error:
            reasons[name] = f"{type(error).__name__}: {error}"
    return reasons


def engine(keys: Keys) -> dict[str, Any]:
    """An engine's own module (on the path) shows what it is handed."""
    home = "fake_engine.kda"
    around: dict[str, Any] = {"home": home, "tokens": 20}
    requests: dict[str, Request] = {
        "chunk": chunk(20, home=home, sequences=2, state_indices="initial_state_indices", final_state=False),
        "decode": step(3, home=home, **POOL, state_stride=1 << 20, unaligned=("q",)),
        "verify": FusedSigmoidGatingUpdate(
            home=home, tokens=6, per_sequence=3, accepted_tokens=True, **SIZES, initial_state=True, **POOL
        ),
        "gate": KdaGate(**around, heads=4, key_dim=128),
        "gdn gate": GdnGate(**around, heads=4),
        "conv": KdaShortConvolution(**around, channels=64, conv=4, initial_state=True),
        "step": KdaShortConvolution(**around, channels=64, conv=4, decode=True),
        "norm": KdaGatedNorm(**around, heads=4, dim=128, activation="sigmoid"),
        "raw chunk": chunk(20, home="fake_engine.newer", gate_in_kernel=True, beta_sigmoid=True),
        "raw step": step(2, home="fake_engine.newer", gate_in_kernel=True, beta_sigmoid=True, **POOL),
        "packed": KdaPackedDecode(**SIZES, home="fake_engine.newer", tokens=2, row_stride=1 << 14),
        "packed gdn": GdnPackedDecode(**SIZES, home="fake_engine.newer", tokens=2),
        "commit": KdaStateCommit(
            **SIZES, home="fake_engine.newer", tokens=2, layers=3, slots=5, drafts=4, state_dtype="bfloat16"
        ),
        "mamba norm": GdnGatedNorm(**(around | {"home": "fake_engine.norm"}), heads=4, dim=128),
    }
    given = {}
    for name, request in requests.items():
        keys.provider.run(request)
        given[name] = sys.modules["fake_engine"].CALLS.pop()
    return given


SCENARIOS = (counts, random_batches, unavailable, engine)

if __name__ == "__main__":
    scenario = {function.__name__: function for function in SCENARIOS}[sys.argv[1]]
    Path(sys.argv[2]).write_text(json.dumps(scenario(Keys())))
