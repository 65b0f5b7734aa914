"""vLLM under `prefetchd bake`: dummy weights, kernels named and not compiled, a few batches, the end.

The subtle rule: nothing that a null device computes means anything. It hands back zeros, by which no request
would ever end, so the scheduler is given a token for each request that a real engine would have sampled for;
which those are is known when a step is scheduled and forgotten soon after, so it is noted then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from prefetchd.baking.order import Answer, Order, write_answer
from prefetchd.baking.session import Session
from prefetchd.engines.hooks import when_imported, wrap
from prefetchd.parent_death import end_with_parent

log = logging.getLogger("prefetchd")

# In range of every vocabulary, and no model's end-of-sequence.
TOKEN = 5
# A batch that has not ended after so many times its steps hangs in the scheduler.
PATIENCE = 50
# Sampling a token takes kernels of its own, others for each of these.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.8, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5},
)


class Stuck(RuntimeError):
    """The engine's scheduler does not bring a batch to its end; the text names the batch."""


def install(directory: Path, order: Order) -> None:
    """Hooks this process of vLLM; whatever fails afterwards ends the engine, since a bake is no service."""
    # A bake that is killed leaves no engine; one that asks it to end is told what this process has counted.
    end_with_parent(os.getppid())
    if (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    session = Session(directory, order)

    def hook_worker(module: ModuleType) -> None:
        def around_device(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
            worker.vllm_config.load_config.load_format = "dummy"
            session.enter()
            return original(worker, *args, **kwargs)

        def finish_bake(worker: Any) -> None:
            session.answer(worker.rank, done=True)

        wrap(module.Worker, "init_device", around_device)
        # Called by name in each worker, whichever process that is.
        module.Worker.prefetchd_finish_bake = finish_bake

    def hook_core(module: ModuleType) -> None:
        def around_core(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> None:
            original(core, *args, **kwargs)
            supply_tokens(core.scheduler)
            batches, steps = 0, 0
            for batch in order.batches:
                steps += drive(core, batch, order.steps)
                batches += 1
            core.model_executor.collective_rpc("prefetchd_finish_bake")
            write_answer(
                directory,
                "core",
                Answer(
                    pid=os.getpid(),
                    schedulers=core.vllm_config.parallel_config.data_parallel_size,
                    batches=batches,
                    scheduler_steps=steps,
                    done=True,
                ),
            )
            log.info("prefetchd: %d batches served in %d steps; this engine may be ended", batches, steps)

        wrap(module.EngineCore, "__init__", around_core)

    when_imported({"vllm.v1.worker.gpu_worker": hook_worker, "vllm.v1.engine.core": hook_core})


def supply_tokens(scheduler: Any) -> None:
    """Each finished prefill and each decode gets one token, whatever came back from the device."""
    sampled: dict[int, set[str]] = {}

    def around_schedule(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        requests = scheduler.requests
        sampled[id(output)] = {
            name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk
        }
        return output

    def around_update(original: Callable[..., Any], output: Any, brought: Any, *args: Any) -> Any:
        names = sampled.pop(id(output), set())
        brought.sampled_token_ids = [[TOKEN] if name in names else [] for name in brought.req_ids]
        return original(output, brought, *args)

    wrap(scheduler, "schedule", around_schedule)
    wrap(scheduler, "update_from_output", around_update)


def drive(core: Any, batch: tuple[int, ...], steps: int) -> int:
    """Serves one batch of prompts to its end, within the engine's own loop; how many steps that took.

    Raises `Stuck`, and whatever the engine raises.
    """
    # A prompt that this engine would refuse is served as the longest that it takes.
    longest = max(int(core.vllm_config.model_config.max_model_len) - steps, 1)
    for number, length in enumerate(batch):
        request = _request(core, f"bake-{number}-{length}", min(length, longest), steps, number)
        core.scheduler.add_request(request)
    most = PATIENCE * (
        steps + sum(batch) // int(core.vllm_config.scheduler_config.max_num_batched_tokens) + 1
    )
    for count, _ in enumerate(_steps(core), 1):
        if not core.scheduler.has_requests():
            return count
        if count >= most:
            break
    raise Stuck(f"batch {','.join(map(str, batch))}: not at its end after {most} steps")


def _steps(core: Any) -> Iterator[None]:
    while True:
        _, executed = core.step_fn()
        core.post_step(executed)
        yield


def _request(core: Any, name: str, length: int, steps: int, number: int) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=steps, ignore_eos=True, **SAMPLINGS[number % len(SAMPLINGS)])
    with contextlib.suppress(AttributeError):
        # Sets what `max_tokens` alone leaves to the front end.
        sampling.update_from_generation_config({}, None)
    prompt = [TOKEN + index % 64 for index in range(length)]
    return Request(name, prompt, sampling, None, block_hasher=core.request_block_hasher)
