"""An engine with FlashInfer on the null device: one call of each kind, with the store and without compiling.

Its answer is one JSON object on the last line: what the store answered, and what each load took, those of
FlashInfer's own directory among them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
from cute_process import Sink, Ticker, Windows, forbid_compiling

from prefetchd.cute.artifacts import find_root
from prefetchd.cute.engine import attach
from prefetchd.cute.homes import sites
from prefetchd.cute.loading import preload
from prefetchd.observer import Observer
from prefetchd.observing.cute_dsl import CuteDslAdaptor
from prefetchd.profiles import read_profile
from prefetchd.provider import Limits, load_providers
from prefetchd.shapelog import encode_record
from prefetchd.targets import load_target

PROVIDERS = ("kda_cute", "gdn_cute")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--allowed", action="store_true", help="Compile what is not found.")
    parser.add_argument("--observed", action="store_true", help="As --allowed, and tell the records.")
    arguments = parser.parse_args()
    target, environment = load_target(arguments.target), dict(os.environ)
    torch.zeros(1, device="cuda")
    took = preload()
    sink = Sink()
    observer = Observer(sink)
    if arguments.observed:
        adaptor = CuteDslAdaptor(target)
        adaptor.install(observer)
        assert adaptor.mode is not None
        mode = adaptor.mode
    else:
        mode, _ = attach(find_root(environment, None), lambda: target, environment, sites())
    providers = load_providers(PROVIDERS)
    for provider in providers.values():
        provider.warm_up()
    if not arguments.allowed and not arguments.observed:
        forbid_compiling()
    own = time_own_loads()
    profile = read_profile(arguments.profile)
    limits = Limits(max_tokens=256, target=target)
    from cutlass.base_dsl.compiler import CompileCallable

    from prefetchd.cute import engine as engine_module

    loads, compiles = Windows(engine_module, "load"), Windows(CompileCallable, "_compile")
    ticks, failures = Ticker(), []
    with ticks:
        for provider in providers.values():
            for request in provider.universe(profile, limits):
                try:
                    provider.run(request)
                except Exception as error:
                    failures.append(f"{request}: {type(error).__name__}: {error}"[:400])
    print(
        json.dumps(
            {
                "counts": mode.counts,
                "loads_ms": [round(1000 * seconds, 2) for seconds in mode.seconds["load"]],
                "compiles_s": [round(seconds, 2) for seconds in mode.seconds["compile"]],
                "all_compiles_s": [round(until - since, 2) for since, until in compiles.spans],
                "own_loads_ms": [round(1000 * seconds, 2) for seconds in own],
                "runtimes_s": {name: round(seconds, 3) for name, seconds in took.items()},
                "wait_while_loading_ms": ticks.longest_ms(loads),
                "wait_while_compiling_ms": ticks.longest_ms(compiles),
                "failures": failures,
                "records": [encode_record(record).decode() for record in sink.records],
                "figures": observer.figures(),
            }
        )
    )


def time_own_loads() -> list[float]:
    """How long each load from FlashInfer's own directory takes, as they happen."""
    from flashinfer.jit.cute_dsl_core import JitSpecCuteDsl

    seconds: list[float] = []
    before = JitSpecCuteDsl._load_from_disk

    def timed(spec: Any) -> Any:
        begun = time.perf_counter()
        found = before(spec)
        seconds.append(time.perf_counter() - begun)
        return found

    JitSpecCuteDsl._load_from_disk = timed
    return seconds


if __name__ == "__main__":
    main()
