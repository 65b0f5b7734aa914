"""The engine of table 3, in a process of its own: the scheduler's steps as a hybrid model's kernels.

It runs real DeepGEMM, KDA and Mamba2 kernels for every step and waits for the device at its end, as an engine
does for the tokens. Only the arms with prefetchd attach. Prints nothing; its figures go to a file.

    python replay_engine.py ORDER.json
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prefetchd import attach
from prefetchd.protocol import Batch
from tables.hybrid_sites import DRAFTS
from tables.scheduler import BUDGET, MOST_RUNNING, Scheduler, Step, arrivals

# Of the model: enough that a step is a step, and few enough that a minute has thousands.
LAYERS = ("kda", "mamba", "kda", "kda") * 6
# What engines run before they serve: short, aligned, new sequences, and decode steps of graphs' sizes.
WARM_UP_PREFILL = (128,) * (BUDGET // 128)
WARM_UP_DECODES = (1, 2, 4, 8, 16, 32, 48)
# Of a step. `own_ms` is what its thread worked and `others_ms` what the process's other threads did,
# `launched_ms` is until the last launch, `ours_ms` is in the call of prefetchd, `collected_ms` in the garbage
# collector and `waited_ms` for a core; `pace_ms` is a fixed piece of work right after the step, by which a
# slow machine is told, and `stolen_ms` what the host has given of this core to others, which the thread
# counts as worked.
COLUMNS = (
    "at_s", "kind", "ms", "tokens", "own_ms", "others_ms", "launched_ms", "ours_ms", "collected_ms",
    "waited_ms", "pace_ms", "stolen_ms",
)  # fmt: skip
# Some 0.1 ms where nothing is in the way, a hundredth of a step.
PACE = range(5000)


class Order(msgspec.Struct, frozen=True):
    """What to do."""

    seed: int
    rate: float
    seconds: float
    warm_up: bool
    attach: str
    result: str


class Model:
    """All layers of the model; they share buffers, since only the launches matter."""

    def __init__(self) -> None:
        import torch

        from tables.hybrid import Kda, Mamba, Products
        from tables.triton_counting import count_benchmarks, count_compiles

        self.benchmarks, self.compiles = count_benchmarks(), count_compiles()
        self.torch, self.device = torch, torch.cuda.get_device_name()
        # When the last kernel of the step was launched; what follows is waiting for the device.
        self.launched = 0.0
        self._products = Products(BUDGET)
        self._mixers: dict[str, Any] = {
            "kda": Kda(BUDGET, MOST_RUNNING * DRAFTS),
            "mamba": Mamba(BUDGET, MOST_RUNNING),
        }
        torch.cuda.synchronize()

    def forward(self, lengths: tuple[int, ...], decodes: int, *, states: bool = True) -> None:
        """One step; returns when the device is through."""
        with self.torch.inference_mode():
            for layer in LAYERS:
                self._products(sum(lengths) + decodes)
                if lengths:
                    self._mixers[layer].prefill(lengths, states=states)
                if decodes:
                    self._mixers[layer].decode(decodes)
        self.launched = time.perf_counter()
        self.torch.cuda.synchronize()

    def suspend(self, decodes: int, leaving: int) -> None:
        """A decode step after which some are put away: their pending drafts are verified first."""
        with self.torch.inference_mode():
            for _ in range(LAYERS.count("kda")):
                self._mixers["kda"].verify(leaving, DRAFTS)
        self.forward((), decodes)

    def warm_up(self) -> None:
        """A forward of new sequences, and decode steps."""
        self.forward(WARM_UP_PREFILL, 0, states=False)
        for decodes in WARM_UP_DECODES:
            self.forward((), decodes)


def batch_of(step: Step) -> Batch:
    return Batch(
        tokens=step.tokens,
        prefill_lengths=step.lengths,
        decodes=len(step.decodes),
        speculative_tokens=DRAFTS if step.leaving else 0,
    )


def pace() -> float:
    """Milliseconds of a fixed piece of work: what this core does just now, whatever the engine does."""
    begun = time.perf_counter()
    for _ in PACE:
        pass
    return (time.perf_counter() - begun) * 1e3


class Counted:
    """Seconds of this thread so far that went neither into a step's kernels nor into waiting for them."""

    def __init__(self) -> None:
        self.ours = self.collected = 0.0
        self._begun = 0.0
        self._schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        gc.callbacks.append(self._collecting)

    def now(self) -> tuple[float, float, float]:
        """In prefetchd's call, in the garbage collector, and ready to run without a core."""
        return self.ours, self.collected, int(self._schedule.read_text().split()[1]) / 1e9

    def _collecting(self, phase: str, _about: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self.collected += time.perf_counter() - self._begun


def stolen_ticks() -> dict[int, int]:
    """By core, what the host has given to others, as the kernel counts it: the eighth figure of its line."""
    lines = Path("/proc/stat").read_text().splitlines()[1:]
    of_cores = [line.split() for line in itertools.takewhile(lambda line: line.startswith("cpu"), lines)]
    return {int(fields[0][3:]): int(fields[8]) for fields in of_cores}


class Stolen:
    """What the host has given to others of the cores that this thread ran on."""

    TICK_MS = 1e3 / os.sysconf("SC_CLK_TCK")

    def __init__(self, ticks: Callable[[], dict[int, int]], core: Callable[[], int]) -> None:
        self._ticks_now, self._core_now = ticks, core
        self._ticks, self._core = ticks(), core()

    def since(self) -> float:
        """Milliseconds since the last call, in whole ticks."""
        ticks, core = self._ticks_now(), self._core_now()
        stolen = sum(ticks[each] - self._ticks[each] for each in {core, self._core})
        self._ticks, self._core = ticks, core
        return stolen * self.TICK_MS


def serve(model: Model, order: Order, handle: Any) -> dict[str, Any]:
    """Steps until the time is over, and times to first token. A step has the fields of `COLUMNS`."""
    scheduler = Scheduler(arrivals(order.seed, order.rate))
    steps: list[list[Any]] = []
    counted, stolen = Counted(), Stolen(stolen_ticks, ctypes.CDLL(None).sched_getcpu)
    # As engines do after their start: what lives on is no longer looked at by the garbage collector.
    gc.collect()
    gc.freeze()
    begun = time.perf_counter()
    while (now := time.perf_counter() - begun) < order.seconds:
        scheduler.admit(now)
        step = scheduler.next_step()
        if step is None:
            time.sleep(max(0.0, min(scheduler.next_arrival, order.seconds) - now))
            continue
        before = counted.now()
        worked, all_worked = time.thread_time(), time.process_time()
        if handle is not None:
            called = time.perf_counter()
            handle.on_schedule(batch_of(step))
            counted.ours += time.perf_counter() - called
        if step.kind == "suspend":
            model.suspend(len(step.decodes), len(step.leaving))
        else:
            model.forward(step.lengths, len(step.decodes))
        ended = time.perf_counter() - begun
        scheduler.ended(step, ended)
        worked, all_worked = time.thread_time() - worked, time.process_time() - all_worked
        more = (after - since for after, since in zip(counted.now(), before, strict=True))
        seconds = (ended - now, worked, all_worked - worked, model.launched - begun - now, *more)
        times = [round(each * 1e3, 2) for each in seconds]
        of_core = round(pace(), 3), stolen.since()
        steps.append([round(now, 3), step.kind, times[0], step.tokens, *times[1:], *of_core])
    over = time.perf_counter() - begun
    # Also those who came while the last step ran.
    scheduler.admit(over)
    # Whoever still waits at the end waited at least that long.
    first = [
        round((over if one.first_token is None else one.first_token) - one.arrival.at, 4)
        for one in scheduler.sequences
    ]
    waiting = sum(one.first_token is None for one in scheduler.sequences)
    return {"steps": steps, "columns": COLUMNS, "ttft_s": first, "still_waiting": waiting}


def main(path: str) -> None:
    order = msgspec.json.decode(Path(path).read_bytes(), type=Order)
    if order.attach:
        import triton  # noqa: F401  attached before it, the first hello would not describe its cache
    handle = attach(order.attach, engine="bench", max_tokens=BUDGET) if order.attach else None
    model = Model()
    moments = {"loaded": time.time()}
    if order.warm_up:
        model.warm_up()
    before = len(model.benchmarks), len(model.compiles)
    moments["serving"] = time.time()
    served = serve(model, order, handle)
    moments["ended"] = time.time()
    if handle is not None:
        handle.close()
    found = {"device": model.device, "versions": {"torch": model.torch.__version__}, "moments": moments}
    found |= {
        "benchmarks": len(model.benchmarks) - before[0],
        "compiles": model.compiles[before[1] :],
        **served,
    }
    Path(order.result).write_text(json.dumps(found | {"reason": handle.reason if handle else ""}))


if __name__ == "__main__":
    main(sys.argv[1])
