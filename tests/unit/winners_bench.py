"""Winners and tunings of one imagined kernel, for the tests of winners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefetchd.compilers.triton_cache import key_of
from prefetchd.compilers.triton_results import result_path
from prefetchd.targets import load_target
from prefetchd.winners import Configuration, Tuning, Winner

H200, H100 = load_target("h200"), load_target("h100")

DIGEST = key_of("ab" * 32)


def candidate(block: int, **fields: Any) -> dict[str, Any]:
    """As Triton's own tuner describes it in a file."""
    return {
        "kwargs": {"BLOCK": block},
        "num_warps": 4,
        "num_ctas": 1,
        "num_stages": 3,
        "maxnreg": None,
        "pre_hook": None,
        "ir_override": None,
        **fields,
    }


CANDIDATES = [candidate(32), candidate(64), candidate(64, num_warps=8)]


def winner(block: int = 64, **fields: Any) -> Winner:
    values: dict[str, Any] = {
        "gpu": H200.name,
        "sm_count": H200.sm_count,
        "triton": "3.8.0",
        "module": "ops.scale",
        "kernel": "scale",
        "source": "digest",
        "key": [64, True, "torch.bfloat16"],
        "config": Configuration(kwargs={"BLOCK": block}),
        "timing_ms": [0.25, 0.24, 0.26],
    }
    return Winner(**{**values, **fields})


def tuning(**fields: Any) -> Tuning:
    values: dict[str, Any] = {
        "triton": "3.8.0",
        "module": "ops.scale",
        "kernel": "scale",
        "source": "digest",
        "key": [64, True, "torch.bfloat16"],
        "candidates": CANDIDATES,
        "entry": f"{DIGEST}/scale.autotune.json",
        "kept": True,
    }
    return Tuning(**{**values, **fields})


def write_result(root: Path, asked: Tuning, *timings: tuple[dict[str, Any], list[float]]) -> Path:
    path = result_path(root, asked)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"key": asked.key, "configs_timings": list(timings)}))
    return path
