"""A process on the null device that traces tuned kernels, or runs them as an engine does.

Usage: winners_process.py trace|engine|listen CALLS [--scratch DIR] [--given FILE]. CALLS is `kept`, `all` or
a request of the KDA family as JSON. As an engine, Triton's tuner keeps and reads results again, which the
null device forbids everybody else; its benchmark is a count, by which the last candidate is the fastest.
What was done is one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.triton import Triton, payload_of
from prefetchd.targets import load_target
from prefetchd.winners import Given, Winner


def calls(text: str) -> Callable[[], None]:
    if text.startswith("{"):
        from prefetchd.protocol import request_from_fields
        from prefetchd.provider import load_providers

        (provider,) = load_providers(["kda"]).values()
        provider.warm_up()
        request = request_from_fields(json.loads(text))
        return lambda: provider.run(request)
    import winners_kernels

    return {"kept": winners_kernels.run_kept, "all": winners_kernels.run_all}[text]


def trace(text: str, target: str, scratch: Path, given: Path | None) -> dict[str, Any]:
    compiler = Triton(load_target(target), dict(os.environ))
    if given is not None:
        compiler.use_winners(msgspec.json.decode(given.read_bytes(), type=Given))
    compiler.prepare(scratch)
    run = calls(text)
    with compiler.capture(scratch) as capture:
        run()
    return {
        "tunings": msgspec.to_builtins(capture.tunings()),
        "keys": [job.key for job in capture.jobs()],
        "kernels": [payload_of(job).name for job in capture.jobs()],
    }


def tune_as_an_engine() -> list[float]:
    """Gives the library its own look-up back; the list grows by one for each benchmark."""
    from triton.runtime import autotuner

    spec = importlib.util.spec_from_file_location("triton.runtime.untouched_autotuner", autotuner.__file__)
    assert spec is not None
    assert spec.loader is not None
    untouched = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(untouched)
    autotuner.Autotuner.check_disk_cache = untouched.Autotuner.check_disk_cache
    untouched.Config = autotuner.Config
    benchmarks: list[float] = []

    def do_bench(kernel_call: Callable[[], None], quantiles: object = None) -> list[float]:
        kernel_call()
        benchmarks.append(1 / (1 + len(benchmarks)))
        return [benchmarks[-1]] * 3

    autotuner.Autotuner.do_bench = property(lambda _tuner: do_bench)
    return benchmarks


def engine(text: str) -> dict[str, Any]:
    from triton import knobs

    benchmarks = tune_as_an_engine()
    made: list[str] = []
    found: list[str] = []

    def listener(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        (found if cache_hit else made).append(metadata["hash"])

    knobs.compilation.listener = listener
    calls(text)()
    return {"benchmarks": len(benchmarks), "made": made, "found": found}


def listen(text: str) -> dict[str, Any]:
    """Records as an engine would, beside somebody else's listener, with a sink that fails at first."""
    from triton import knobs

    from prefetchd.compilers.triton_winners import record_winners

    on_null_device = record_winners(lambda winner: None)
    # From here on this process passes for one with a real device.
    del os.environ["PREFETCHD_NULL"]
    tune_as_an_engine()
    others: list[str] = []
    if hasattr(knobs.autotuning, "listener"):
        knobs.autotuning.listener = lambda **known: others.append(known["fn"].__name__)
    heard: list[Winner] = []
    failures: list[str] = []

    def failing(winner: Winner) -> None:
        failures.append(winner.kernel)
        raise RuntimeError("a sink that fails")

    listening = record_winners(failing) and record_winners(heard.append)
    calls(text)()
    return {
        "on_null_device": on_null_device,
        "listening": listening,
        "others": others,
        "failures": failures,
        "heard": msgspec.to_builtins(heard),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["trace", "engine", "listen"])
    parser.add_argument("calls")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--given", type=Path)
    arguments = parser.parse_args()
    if arguments.mode == "trace":
        answer = trace(arguments.calls, arguments.target, arguments.scratch, arguments.given)
    else:
        answer = {"engine": engine, "listen": listen}[arguments.mode](arguments.calls)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
