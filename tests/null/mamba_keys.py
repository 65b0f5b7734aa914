"""Runs on the null device: asks the library for the keys of requests and compiles nothing.

Its arguments are a scenario and an output file, where it writes what it found as JSON. Keys are the library's
own: the names of the directories it would look into.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prefetchd.compilers.triton_capture import intercept
from prefetchd.provider import Unavailable
from prefetchd.request import Request
from prefetchd.requests.mamba import CausalConv1d, GatedNorm, Mamba2Decode, Mamba2Prefill
from prefetchd_providers.mamba import MambaProvider
from prefetchd_providers.mamba_classes import scan_classes

# mamba2-codestral-7b on one rank: 128 heads of 64, 8 groups, a state of 128.
SIZES: dict[str, Any] = {"heads": 128, "head_dim": 64, "groups": 8, "state": 128}
SEVEN = (272, 300, 256, 100, 1, 4096, 3940)
# One rank of 32 of a smaller model: a row of the projected buffer is no multiple of 16 elements.
NARROW: dict[str, Any] = {"heads": 2, "head_dim": 64, "groups": 1, "state": 128}
BATCHES = 200


class Keys:
    """What each call asked for, call by call."""

    def __init__(self) -> None:
        self.provider = MambaProvider()
        self.provider.warm_up()
        self.seconds: list[float] = []
        # The first look-up of a process initialises the device and digests Triton's own code.
        self.request(norm(1))
        self.seconds.clear()

    def of(self, call: Callable[[], None]) -> set[str]:
        found: set[str] = set()
        begun = time.process_time()
        with intercept(lambda key, _variant, _source: found.add(key)):
            call()
        self.seconds.append(time.process_time() - begun)
        return found

    def request(self, request: Request) -> set[str]:
        return self.of(lambda: self.provider.run(request))

    def all(self, requests: Iterable[Request]) -> set[str]:
        return set().union(*(self.request(request) for request in requests))


def prefill(tokens: int, chunk: int = 256, **fields: Any) -> Mamba2Prefill:
    return Mamba2Prefill(**{**SIZES, "tokens": tokens, "chunk": chunk, **fields})


def counts(keys: Keys) -> dict[str, Any]:
    """The numbers measured for this model."""
    base = keys.request(prefill(272))
    listed = {
        chunk: keys.all(prefill(tokens, chunk) for tokens, _ in scan_classes(chunk, 8192).values())
        for chunk in (64, 128, 256)
    }
    changes: dict[str, dict[str, Any]] = {
        "initial_states": {"initial_states": False},
        "seq_idx": {"seq_idx": False},
        "z": {"z": True},
        "d_dtype": {"d_dtype": "bfloat16"},
        "d": {"d": "channels"},
        "index_dtype": {"index_dtype": "int64"},
        "state_dtype": {"state_dtype": "float32"},
        "dt_dtype": {"dt_dtype": "float32"},
        "dt_bias": {"dt_bias": False},
        "dt_softplus": {"dt_softplus": False},
        "unaligned": {"unaligned": ("x",)},
    }
    return {
        "base": len(base),
        "seven": len(keys.all(prefill(tokens) for tokens in SEVEN)),
        "seven_equals_listed": keys.all(prefill(tokens) for tokens in SEVEN) == listed[256],
        "listed": {str(chunk): len(found) for chunk, found in listed.items()},
        "new": {name: len(keys.request(prefill(272, **change)) - base) for name, change in changes.items()},
        "decode": len(keys.all(Mamba2Decode(**SIZES, batch=batch) for batch in (1, 2, 16))),
        "norm": len(keys.all(GatedNorm(**SIZES, tokens=tokens) for tokens in (1, 2, 16))),
        "seconds": max(keys.seconds),
    }


def random_batches(keys: Keys) -> dict[str, Any]:
    """Calls of the library's function with many sequences, of which the listed requests know nothing."""
    from prefetchd_providers.mamba_ops.homes import Home
    from prefetchd_providers.mamba_ops.scan import scan

    function = Home("mamba_ssm").function("scan")
    chance = random.Random(20)
    found = {}
    for name, sizes, chunk in (("wide", SIZES, 256), ("wide-128", SIZES, 128), ("narrow", NARROW, 256)):
        template = prefill(1, chunk, **sizes)
        classes = scan_classes(chunk, 8192, template.row).values()
        listed = keys.all(prefill(tokens, chunk, **sizes) for tokens, _ in classes)
        met: set[str] = set()
        for _ in range(BATCHES):
            lengths = random_lengths(chance)
            request = prefill(sum(lengths), chunk, **sizes)
            met |= keys.of(lambda request=request, lengths=lengths: scan(function, request, lengths))  # type: ignore[misc]
        found[name] = {"misses": len(met - listed), "met": len(met), "listed": len(listed)}
    return found


def random_lengths(chance: random.Random) -> list[int]:
    """Sequences whose sum stays within 8192, often a multiple of 16, sometimes of few tokens."""
    count = chance.choice([1, 1, 2, 5, 17])
    lengths = [
        chance.choice([1, chance.randint(1, 300), 16 * chance.randint(1, 29), 256]) for _ in range(count)
    ]
    return [*lengths[:-1], 4096 if chance.random() < 0.1 and count < 5 else lengths[-1]]


def other_counts(keys: Keys) -> dict[str, Any]:
    """Random decode batches and norm rows against the three that stand for them."""
    chance = random.Random(21)
    sizes = [1, *(chance.randint(1, 600) for _ in range(BATCHES))]
    listed = keys.all(kind for n in (1, 2, 16) for kind in (decode(n), norm(n)))
    met = keys.all(kind for n in sizes for kind in (decode(n), norm(n)))
    return {"misses": len(met - listed), "met": len(met)}


def decode(batch: int) -> Request:
    return Mamba2Decode(**SIZES, batch=batch)


def norm(tokens: int) -> Request:
    return GatedNorm(**SIZES, tokens=tokens)


def unavailable(keys: Keys) -> dict[str, Any]:
    """Why the provider refuses what this installation does not have."""
    requests = {
        "home": prefill(16, home="no_such_engine.ops"),
        "conv": CausalConv1d(**SIZES, tokens=16, conv=4, cache_lines=8),
    }
    reasons = {}
    for name, request in requests.items():
        try:
            keys.request(request)
        except Unavailable as error:
            reasons[name] = str(error)
    return reasons


def engine(keys: Keys) -> dict[str, Any]:
    """An engine's copy (a module on the path) shows how chunks and tensors are handed to it."""
    given = []
    home: dict[str, Any] = {"home": "fake_engine.ops", **SIZES}
    requests: list[Request] = [
        Mamba2Prefill(**home, tokens=272, chunk=256),
        Mamba2Prefill(**home, tokens=17, chunk=256, chunks=16, unaligned=("dt",), state_dtype="float32"),
        Mamba2Decode(**home, batch=3, indices=True),
        CausalConv1d(**home, tokens=20, conv=4, cache_lines=8, block_size=64, unaligned=("indices",)),
        CausalConv1d(**home, tokens=3, conv=4, cache_lines=8, decode=True),
        GatedNorm(**home, tokens=5),
    ]
    for request in requests:
        keys.provider.run(request)
        given.append(sys.modules["fake_engine.ops"].CALLS.pop())
    try:
        keys.provider.run(CausalConv1d(**home, tokens=3, conv=4))
    except Unavailable as error:
        return {"given": given, "unsized": str(error)}
    return {"given": given}


SCENARIOS = (counts, random_batches, other_counts, unavailable, engine)

if __name__ == "__main__":
    scenario = {function.__name__: function for function in SCENARIOS}[sys.argv[1]]
    Path(sys.argv[2]).write_text(json.dumps(scenario(Keys())))
