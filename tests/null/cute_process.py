"""A process on the null device that runs the small CuTe libraries: traced, proving, or as an engine would.

Its answer is one JSON object on the last line. As an engine it attaches to the store and may be told to fail
where it would compile.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.cute_dsl import CuteDsl
from prefetchd.targets import load_target


def trace(mode: str, target: str, scratch: Path, calls: list[str]) -> dict[str, Any]:
    compiler = CuteDsl(load_target(target), dict(os.environ))
    compiler.prepare(scratch)
    from cute_kernels import run

    from prefetchd.cute.calls import noted

    raised = []
    with (compiler.capture if mode == "capture" else compiler.forbid)(scratch) as capture:
        for call in calls:
            try:
                with noted(*described(call)):
                    run(call)
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
    return {"jobs": base64.b64encode(msgspec.msgpack.encode(capture.jobs())).decode(), "raised": raised}


def described(call: str) -> tuple[str, str, dict[str, Any]]:
    """The library's function behind a call, as a provider names it."""
    import torch
    from cute_kernels import decode_tensors

    if call == "decode":
        return "cute_kernels", "kda_decode", decode_tensors()
    aligned = call == "prefill.aligned"
    tokens = torch.zeros(256, device="cuda")
    pool = torch.zeros(8, 2, 16, 16, device="cuda")
    lengths = (128, 128) if aligned else (200, 56)
    return "cute_kernels", "kda_prefill", {"q": tokens, "lengths": lengths, "state_pool": pool}


def engine(target: str, calls: list[str], *, forbidden: bool, ahead: bool = False) -> dict[str, Any]:
    import torch

    from prefetchd.cute.artifacts import find_root
    from prefetchd.cute.engine import attach
    from prefetchd.cute.homes import sites
    from prefetchd.cute.loading import preload
    from prefetchd.kernel_packages import allowed_packages

    torch.zeros(1, device="cuda")
    environment = dict(os.environ)
    places = sites(
        *(environment.get(f"PREFETCHD_CUTE_{kind}", "").split(",") for kind in ("DICTS", "FUNCTIONS"))
    )
    root = find_root(environment, environment.get("PREFETCHD_CUTE_STORE"))
    took = preload()
    packages = allowed_packages(environment)
    mode, _ = attach(root, lambda: load_target(target), environment, places, packages=packages)
    if forbidden:
        forbid_compiling()
    loaded_ahead = in_a_thread(mode.preload_all) if ahead else 0
    from cute_kernels import run
    from cutlass.base_dsl.dsl import BaseDSL

    from prefetchd.cute import engine as engine_module

    ticks, loads, compiles = Ticker(), Windows(engine_module, "load"), Windows(BaseDSL, "_func")
    with ticks:
        for call in calls:
            run(call)
            run(call)
    return {
        "counts": mode.counts,
        "loaded_ahead": loaded_ahead,
        "loads_ms": [round(1000 * seconds, 2) for seconds in mode.seconds["load"]],
        "compiles_s": [round(seconds, 3) for seconds in mode.seconds["compile"]],
        "runtimes_s": {name: round(seconds, 3) for name, seconds in took.items()},
        "wait_while_loading_ms": ticks.longest_ms(loads),
        "wait_while_compiling_ms": ticks.longest_ms(compiles),
    }


def in_a_thread(function: Callable[[], int]) -> int:
    """What the function returns, from a thread beside this one."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def observed(target: str, calls: list[str]) -> dict[str, Any]:
    """An engine whose compiles are observed; its records, as a shape log has them."""
    import torch

    from prefetchd.observer import Observer
    from prefetchd.observing.cute_dsl import CuteDslAdaptor
    from prefetchd.shapelog import encode_record

    torch.zeros(1, device="cuda")
    sink = Sink()
    observer = Observer(sink)
    adaptor = CuteDslAdaptor()
    adaptor.install(observer)
    from cute_kernels import run

    for call in calls:
        run(call)
        run(call)
    adaptor.remove()
    run(calls[0])
    return {
        "records": [encode_record(record).decode() for record in sink.records],
        "figures": observer.figures(),
        "preloaded": sorted(adaptor.preloaded),
        "open": len(observer.running()),
    }


class Sink:
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def record(self, record: Any) -> None:
        self.records.append(record)

    def began(self, _started: Any) -> None:
        pass

    def over(self, _token: int) -> None:
        pass

    def event(self, _event: Any) -> None:
        pass

    def winner(self, _winner: Any) -> None:
        pass


def forbid_compiling() -> None:
    """Below all hooks of ours: what would really compile fails."""
    from cutlass.base_dsl.dsl import BaseDSL

    def refuse(*_args: Any, **_known: Any) -> Any:
        raise RuntimeError("this engine may not compile")

    BaseDSL._func = refuse


class Windows:
    """When something ran, by wrapping it; on the clock of `Ticker`."""

    def __init__(self, owner: Any, name: str) -> None:
        self.spans: list[tuple[float, float]] = []
        before = getattr(owner, name)

        def timed(*args: Any, **known: Any) -> Any:
            begun = time.perf_counter()
            try:
                return before(*args, **known)
            finally:
                self.spans.append((begun, time.perf_counter()))

        setattr(owner, name, timed)


class Ticker:
    """A thread that wants to run every millisecond, and how long it had to wait for it."""

    def __init__(self) -> None:
        self._waits: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def longest_ms(self, windows: Windows) -> float:
        """The longest wait any part of which fell into one of the windows."""
        waits = [
            end - begin - 0.001
            for begin, end in self._waits
            if any(begin < until and since < end for since, until in windows.spans)
        ]
        return round(1000 * max(waits, default=0.0), 1)

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._stop.wait(0.001):
            now = time.perf_counter()
            self._waits.append((last, now))
            last = now


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "mode", choices=["capture", "forbid", "engine", "engine-forbidden", "engine-ahead", "observed"]
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("calls", nargs="+")
    arguments = parser.parse_args()
    if arguments.mode.startswith("engine"):
        ahead = arguments.mode == "engine-ahead"
        forbidden = arguments.mode != "engine"
        answer = engine(arguments.target, arguments.calls, forbidden=forbidden, ahead=ahead)
    elif arguments.mode == "observed":
        answer = observed(arguments.target, arguments.calls)
    else:
        answer = trace(arguments.mode, arguments.target, arguments.scratch, arguments.calls)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
