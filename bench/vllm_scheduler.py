"""What following vLLM's scheduler costs: the real scheduler with 256 running requests, no device.

Each step schedules, is told to the planner, and is brought back with a token for every request, as in the
engine's loop but without any model; so the share is an upper bound of what an engine pays. Needs vLLM, and a
target, since vLLM's configuration asks for a device:

    prefetchd null --target h200 -- python bench/vllm_scheduler.py [--running 256] [--steps 1000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prefetchd.attaching import Handle
from prefetchd.client import Client
from prefetchd.engines.seat import Seat
from prefetchd.engines.vllm_batch import batch_of
from prefetchd.engines.vllm_profile import profile_of_config
from prefetchd.protocol import Hello

MODEL = Path(__file__).parents[1] / "examples/models/deepseek-v3.json"
PROMPT, BLOCK = 128, 16
# Of the scheduler's own loop.
MOST_SHARE = 0.01


def configuration(folder: Path, running: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    (folder / "config.json").write_text(MODEL.read_text())
    return EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    ).create_engine_config()


def scheduler_of(config: Any, running: int) -> Any:
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    blocks = running * 4096 // BLOCK
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    kv = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return Scheduler(config, kv, StructuredOutputManager(config), block_size=BLOCK)


def add_requests(scheduler: Any, count: int) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    for number in range(count):
        sampling = SamplingParams(max_tokens=3900, ignore_eos=True)
        sampling.update_from_generation_config({}, 2)
        scheduler.add_request(Request(str(number), [1 + number] * PROMPT, sampling, None))


def brought_back(scheduler: Any, output: Any) -> Any:
    """What the workers would answer: a token for each request that is through its prompt."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    tokens = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=tokens,
    )


def measure(running: int, steps: int, folder: Path) -> dict[str, Any]:
    config = configuration(folder, running)
    scheduler = scheduler_of(config, running)
    client = Client(f"ipc://{folder}/nowhere", lambda: Hello(engine="bench", pid=0, generation=""))
    handle = Handle(client)
    handle.use_profile(profile_of_config(config), 8192)
    seat = Seat(lambda profile: handle)
    seat.take(None)
    add_requests(scheduler, running)
    ours, loop, clock = [], [], time.perf_counter
    while True:
        begun = clock()
        output = scheduler.schedule()
        scheduled = clock()
        seat.scheduled(batch_of, output)
        told = clock()
        scheduler.update_from_output(output, brought_back(scheduler, output))
        # A step takes milliseconds on a device; meanwhile the client's thread has the interpreter.
        time.sleep(0.0005)
        if len(scheduler.running) == running and output.total_num_scheduled_tokens == running:
            ours.append(told - scheduled)
            loop.append(scheduled - begun + clock() - told - 0.0005)
        if len(ours) == steps:
            break
    client.close()
    ours.sort()
    return {
        "running": running,
        "steps": steps,
        "on_schedule_us": {
            "p50": round(statistics.median(ours) * 1e6, 2),
            "p99": round(ours[int(steps * 0.99)] * 1e6, 2),
        },
        "scheduler_loop_us": round(statistics.median(loop) * 1e6, 1),
        "share": round(statistics.median(ours) / statistics.median(loop), 5),
        "errors": seat.guard.errors,
    }


def main() -> int:
    """Prints the figures as JSON; 1 if the share is too large."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        found = measure(arguments.running, arguments.steps, Path(folder))
    print(json.dumps(found))
    return int(found["share"] > MOST_SHARE or found["errors"] > 0)


if __name__ == "__main__":
    sys.exit(main())
