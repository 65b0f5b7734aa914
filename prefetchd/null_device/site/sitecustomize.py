"""Runs at the start of every Python on the null device; found first on PYTHONPATH, it runs the one it hides
too.

It imports nothing heavy. When the program itself imports a library, a hook acts right after. With torch
comes the check that this process has not lost the null device on its way here, and the small integer
operators if they were asked for. The autotuners of Triton and Inductor lose their disk caches, because a
timing taken here is made up and a real engine would believe it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent


def keep_no_triton_timings(autotuner: ModuleType) -> None:
    """Triton's autotuner measures, and neither reads nor writes results, whatever `cache_results` says."""

    def check_disk_cache(_self: Any, _key: Any, _configs: Any, benchmark: Callable[[], None]) -> bool:
        benchmark()
        return False

    autotuner.Autotuner.check_disk_cache = check_disk_cache


def keep_no_best_configurations(config: ModuleType) -> None:
    """Inductor keeps the best configuration of a kernel beside its code; this setting has no variable."""
    config.autotune_local_cache = False  # type: ignore[attr-defined]


def keep_no_benchmarks(codecache: ModuleType) -> None:
    """Inductor's own benchmarks of matrix products and paddings stay in memory."""
    codecache.CacheBase.update_local_cache = lambda _self, _benchmarks: None


def on_torch(_torch: ModuleType) -> None:
    """Raises out of `import torch` when CUDA calls would not reach the null device."""
    neighbour("guard").require_null_device()
    if os.environ.get("PREFETCHD_NULL_INTEGER_OPS") == "1":
        neighbour("integer_ops").install()


def neighbour(name: str, folder: Path = HERE.parent) -> ModuleType:
    """A module of prefetchd by its file: prefetchd need not be installed for this interpreter."""
    full_name = f"prefetchd_null_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, folder / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder}/{name}.py cannot be loaded; reinstall prefetchd")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


post_import = neighbour("post_import", HERE.parent.parent)
if os.environ.get("PREFETCHD_NULL") == "1":
    hooks: dict[str, Callable[[ModuleType], None]] = {
        "cutlass.base_dsl.compiler": neighbour("cute_launches").on_compiler,
        "cutlass.cute.runtime": neighbour("cute_launches").on_runtime,
        "torch": on_torch,
        "torch._inductor.codecache": keep_no_benchmarks,
        "torch._inductor.config": keep_no_best_configurations,
        "triton.runtime.autotuner": keep_no_triton_timings,
    }
    post_import.install(hooks)

post_import.run_hidden_sitecustomize(str(HERE))
