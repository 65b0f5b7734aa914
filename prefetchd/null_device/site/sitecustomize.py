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
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent


def run_hidden_sitecustomize() -> None:
    """Executes the `sitecustomize` that would have been found without this directory, if there is one."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class LoadThen(Loader):
    """A module's own loader, followed by one call with the module."""

    def __init__(self, inner: Loader, after: Callable[[ModuleType], None]) -> None:
        self.inner = inner
        self.after = after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, leaves no trace of the hook in it, then calls."""
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        module.__loader__ = self.inner
        self.inner.exec_module(module)
        self.after(module)


class AfterImport(MetaPathFinder):
    """Finds the named modules as the other finders do and calls once after each has been imported."""

    def __init__(self, hooks: dict[str, Callable[[ModuleType], None]]) -> None:
        self.hooks = hooks

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec with a wrapped loader for a hooked name, else None: the next finder is asked."""
        if name not in self.hooks:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = LoadThen(spec.loader, self.hooks.pop(name))
                return spec
        return None


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


def neighbour(name: str) -> ModuleType:
    """A module of prefetchd.null_device by its file: prefetchd need not be installed for this interpreter."""
    full_name = f"prefetchd_null_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, HERE.parent / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{HERE.parent}/{name}.py cannot be loaded; reinstall prefetchd")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


if os.environ.get("PREFETCHD_NULL") == "1":
    hooks: dict[str, Callable[[ModuleType], None]] = {
        "torch": on_torch,
        "torch._inductor.codecache": keep_no_benchmarks,
        "torch._inductor.config": keep_no_best_configurations,
        "triton.runtime.autotuner": keep_no_triton_timings,
    }
    sys.meta_path.insert(0, AfterImport(hooks))

run_hidden_sitecustomize()
