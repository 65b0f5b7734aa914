"""Tables of whole engines on the null device, by the runs that `make test-vllm` stores."""

from __future__ import annotations

from typing import Any

from tables.markdown import seconds, table
from tables.rows import Stored

RESULTS = "vllm"
MODELS = {
    "kimi-linear": "Kimi-Linear",
    "deepseek-v3-fp8": "DeepSeek-V3, FP8",
    "nemotron-h": "Nemotron-H",
    "qwen3-next": "Qwen3-Next",
}
COMPILERS = {
    "triton": "Triton",
    "deep_jit": "DeepGEMM",
    "cute_dsl": "CuTe DSL",
    "flashinfer_cute": "FlashInfer's CuTe",
    "flashinfer_modules": "FlashInfer",
}
NO_RUN = "-"


def vllm_starts(stored: Stored) -> str:
    """Cold, after a replay and after a bake: the start, the first prompt, and what the engine compiled."""
    rows = []
    for model, name in MODELS.items():
        replay = stored.latest_on_null(RESULTS, part="replay", model=model, target="h200")
        bake = stored.latest_on_null(RESULTS, part="bake", model=model, target="h200")
        if replay is not None or bake is not None:
            starts = (replay and replay["cold"], replay and replay["replayed"], bake and bake["start"])
            rows.append([name, *map(_start, starts)])
    return table(("model on h200", "cold", "after `prefetchd replay`", "after `prefetchd bake`"), rows)


def vllm_bakes(stored: Stored) -> str:
    """What was made ahead for each target, and how long each part took."""
    rows = []
    for model, name in MODELS.items():
        for target in ("h200", "b200"):
            run = stored.latest_on_null(RESULTS, part="bake", model=model, target=target)
            if run is not None:
                took = (seconds(run["seconds"][part]) for part in ("capture", "compile", "prove"))
                rows.append([f"{name}, {target}", _by_compiler(run["variants"]), ", ".join(took)])
    return table(
        ("baked, and proved by a start that may not compile", "variants", "named, compiled, proved"), rows
    )


def vllm_scheduler(stored: Stored) -> str:
    """What following the scheduler takes of its thread."""
    run = stored.latest_on_null(RESULTS, part="scheduler")
    if run is None:
        return NO_RUN
    figures = run["figures"]
    return (
        f"Following the real scheduler takes {figures['on_schedule_us']['p50']:.0f} us of its thread a step "
        f"at {figures['running']} running requests (p99 {figures['on_schedule_us']['p99']:.0f} us),\n"
        f"{figures['share']:.1%} of its own loop without any model (bar: 1 %).\n"
    )


def _start(start: dict[str, Any] | None) -> str:
    if start is None:
        return NO_RUN
    times = f"{seconds(start['up_s'])} + {seconds(start['first_prompt_s'])}"
    return f"{times}; {_by_compiler(start['compiles']) or 'nothing'} compiled"


def _by_compiler(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {COMPILERS.get(name, name)}" for name, count in sorted(counts.items()))
