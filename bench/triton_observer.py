"""What an observed engine pays for its Triton: per launch, and per variant it sees for the first time.

A kernel that does next to nothing is launched in rounds, with the adaptor and without it by turns, on the
null device, whose launch is cheaper than a real one; so a cost is seen as large as it gets. The figure is the
median of the rounds' ratios; the same figure of two rounds without it says what it is worth. All times are
the processor's, so that other programs' are not in them.

A variant seen first costs what our hooks take for it, from the library's writing its specialization down (it
does so only for a hook) to the observer's record in the queue of its sink. These are summed in place while
variants are compiled, and while a second process's worth of them is found on disk.

    python bench/triton_observer.py [--rounds 200] [--launches 1000] [--variants 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefetchd.null_device import launcher
from prefetchd.targets import load_target

# The bars: per launch, where two equal rounds differ by up to 2 % on a busy machine; per first-seen variant.
BAR_RATIO = 1.02
BAR_MS = 0.5

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def small(x, n, BLOCK: tl.constexpr, VARIANT: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, VARIANT + tl.load(x + at, mask=at < n), mask=at < n)
"""
# Where the library or our hooks work for the observer's sake alone: module, class, function.
OURS = (
    ("triton.runtime.jit", "JITFunction", "_call_hook"),
    ("prefetchd.observing.triton_lookups", "LookUps", "begins"),
    ("prefetchd.observing.triton_lookups", "LookUps", "opened"),
    ("prefetchd.observing.triton_lookups", "LookUps", "_looked_up"),
    ("prefetchd.observing.triton_lookups", "LookUps", "told"),
    ("prefetchd.observing.triton_lookups", "LookUps", "over"),
    ("prefetchd.observing.triton_lookups", "LookUps", "load_begins"),
    ("prefetchd.observing.triton_lookups", "LookUps", "loaded"),
)


class Sink:
    """As the real one: on the engine's thread a report is put into a queue, whatever becomes of it."""

    def __init__(self) -> None:
        self.reports: deque[tuple[Any, ...]] = deque()

    def __getattr__(self, _: str) -> Any:
        return lambda *report: self.reports.append(report)


class Clock:
    """The processor's time spent in `OURS`, of calls within each other once; other programs' is not in it."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **named: Any) -> Any:
            self._depth += 1
            begun = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - begun

        return timed

    def install(self) -> None:
        """Before the adaptor, whose hooks are bound when it is installed."""
        from importlib import import_module

        for module, class_, name in OURS:
            owner = getattr(import_module(module), class_)
            setattr(owner, name, self.around(getattr(owner, name)))


def observed() -> tuple[Any, Any]:
    """An observer, and its adaptor, not installed."""
    from prefetchd.observer import Observer
    from prefetchd.observing.call_site import call_site
    from prefetchd.observing.triton import TritonAdaptor

    return Observer(Sink(), site=call_site), TritonAdaptor()


def launches(kernel: Any, rounds: int, count: int) -> dict[str, Any]:
    """Microseconds a launch; in each round with the adaptor, then without it, then without it once more."""
    import torch

    x = torch.empty(32, device="cuda")
    observer, adaptor = observed()
    kernel[(1,)](x, 32, BLOCK=32, VARIANT=0)

    def launch() -> float:
        begun = time.thread_time()
        for _ in range(count):
            kernel[(1,)](x, 32, BLOCK=32, VARIANT=0)
        return (time.thread_time() - begun) / count * 1e6

    launch()
    times: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        adaptor.install(observer)
        with_it = launch()
        adaptor.remove()
        times.append((with_it, launch(), launch()))
    return {
        "launch_us_without": round(statistics.median(each[1] for each in times), 3),
        "launch_us_with": round(statistics.median(each[0] for each in times), 3),
        "launch_ratio": round(statistics.median(each[0] / each[1] for each in times), 4),
        "launch_noise": round(statistics.median(each[2] / each[1] for each in times), 4),
    }


def first_seen(kernel: Any, variants: int) -> dict[str, Any]:
    """Milliseconds of ours a variant, compiled and found on disk."""
    import torch

    clock = Clock()
    clock.install()
    observer, adaptor = observed()
    adaptor.install(observer)
    x = torch.empty(32, device="cuda")
    figures: dict[str, Any] = {}
    for way in ("compiled", "found"):
        spent = []
        kernel.device_caches.clear()
        for variant in range(1, variants + 1):
            before = clock.seconds
            kernel[(1,)](x, 32, BLOCK=32, VARIANT=variant)
            spent.append((clock.seconds - before) * 1e3)
        figures[f"{way}_ms"] = round(statistics.median(spent), 4)
        figures[f"{way}_worst_ms"] = round(max(spent), 4)
    counted = observer.figures()
    assert (counted["triton.compiles"], counted["triton.hits"]) == (variants, variants), counted
    assert observer.guard.errors == 0
    return figures


def inside(options: argparse.Namespace) -> None:
    """In the process on the null device."""
    import torch

    source = options.place / "bench_kernel.py"
    source.write_text(KERNEL)
    sys.path.insert(0, str(options.place))
    import triton
    from bench_kernel import small  # type: ignore[import-not-found]

    figures: dict[str, Any] = {"triton": triton.__version__, "torch": torch.__version__}
    figures |= launches(small, options.rounds, options.launches)
    figures |= first_seen(small, options.variants)
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--variants", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.place:
        inside(options)
        return
    with tempfile.TemporaryDirectory() as place:
        environment = launcher.environment(load_target("h200"), _base(place), integer_ops=True)
        numbers = [f"--{name}={getattr(options, name)}" for name in ("rounds", "launches", "variants")]
        done = subprocess.run(
            [sys.executable, __file__, "--place", place, *numbers],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures = json.loads(done.stdout.splitlines()[-1])
    figures |= {"bar_launch_ratio": BAR_RATIO, "bar_first_seen_ms": BAR_MS}
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    slow = max(figures["compiled_ms"], figures["found_ms"]) > BAR_MS
    if slow or figures["launch_ratio"] > BAR_RATIO * figures["launch_noise"]:
        sys.exit(1)


def _base(place: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return {**kept, "HOME": place, "TRITON_CACHE_DIR": f"{place}/cache"}


if __name__ == "__main__":
    main()
