"""A vLLM engine on the null device: serves five prompts and says how that went, as JSON on its last line.

    prefetchd run -- prefetchd null --target h200 -- python vllm_engine.py MODEL [NAME=VALUE ...]

Further arguments are vLLM's own, as JSON values, in place of those below. With `PAUSE` in the environment, a
directory, it waits after its second prompt: `paused` appears there, and `go` lets it go on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

# Ragged, one chunk of 64, a single token, aligned, and one that is prefilled in pieces.
PROMPTS = (300, 64, 1, 128, 2500)
STEPS = 4
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 4096,
    # DeepGEMM has layouts for some hundred row counts up to here, and some tests wait for all of them.
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.5,
    "num_gpu_blocks_override": 512,
}


def answered(original: Callable[..., None]) -> Callable[..., None]:
    """The engine's core, which then gets tokens; a forked one too."""

    @wraps(original)
    def init(core: Any, *args: Any, **kwargs: Any) -> None:
        from prefetchd.engines.vllm_bake import supply_tokens

        original(core, *args, **kwargs)
        supply_tokens(core.scheduler)

    return init


def wait_in(directory: Path) -> None:
    """Until somebody lets us go on."""
    (directory / "paused").touch()
    while not (directory / "go").exists():
        time.sleep(0.05)


def main(model: str, *options: str) -> None:
    begun = time.perf_counter()
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.core import EngineCore

    EngineCore.__init__ = answered(EngineCore.__init__)  # type: ignore[method-assign]
    chosen = {name: json.loads(value) for name, _, value in (option.partition("=") for option in options)}
    llm = LLM(model=model, **(SETTINGS | chosen))
    up = time.perf_counter()
    sampling = SamplingParams(max_tokens=STEPS, ignore_eos=True, detokenize=False)
    lengths, seconds = [], []
    for number, length in enumerate(PROMPTS):
        if number == 2 and (pause := os.environ.get("PAUSE")):
            wait_in(Path(pause))
        before = time.perf_counter()
        prompt: Any = {"prompt_token_ids": [5 + index % 500 for index in range(length)]}
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        lengths.append(len(output.outputs[0].token_ids))
        seconds.append(round(time.perf_counter() - before, 2))
    print(json.dumps({"up_s": round(up - begun, 1), "tokens": lengths, "prompt_s": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
