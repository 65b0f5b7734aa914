"""Runs at the start of every Python on the null device; found first on PYTHONPATH, it runs the one it hides too.

It imports nothing heavy. When the program itself imports torch or Triton's autotuner, a hook acts right after:
torch gets the small integer operators if they were asked for, and the autotuner loses its disk cache, because a
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

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec with a wrapped loader for a hooked name, else None: the next finder is asked."""
        if name not in self.hooks:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = LoadThen(spec.loader, self.hooks.pop(name))
                return spec
        return None


def keep_no_timings(autotuner: ModuleType) -> None:
    """Triton's autotuner measures, and neither reads nor writes results on disk, whatever `cache_results` says."""

    def check_disk_cache(_self: Any, _key: Any, _configs: Any, benchmark: Callable[[], None]) -> bool:
        benchmark()
        return False

    autotuner.Autotuner.check_disk_cache = check_disk_cache  # type: ignore[attr-defined]


def install_integer_ops(_torch: ModuleType) -> None:
    """Loads integer_ops.py by its place: prefetchd need not be installed for this interpreter."""
    spec = importlib.util.spec_from_file_location("prefetchd_null_integer_ops", HERE.parent / "integer_ops.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{HERE.parent}/integer_ops.py cannot be loaded; reinstall prefetchd")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.install()


if os.environ.get("PREFETCHD_NULL") == "1":
    hooks: dict[str, Callable[[ModuleType], None]] = {"triton.runtime.autotuner": keep_no_timings}
    if os.environ.get("PREFETCHD_NULL_INTEGER_OPS") == "1":
        hooks["torch"] = install_integer_ops
    sys.meta_path.insert(0, AfterImport(hooks))

run_hidden_sitecustomize()
