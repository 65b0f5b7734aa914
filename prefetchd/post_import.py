"""What both of our `sitecustomize` modules are made of: run the one that is hidden, act after an import.

They load this file by its place, in interpreters that may know nothing of prefetchd and may never need it. So
it imports nothing that Python has not loaded itself by then, and a process that imports none of the hooked
modules pays a look-up in a dict for each import. The subtle rule: a module that is only looked for
(`find_spec`, as programs do to learn whether it is installed) is not imported yet; its hook waits.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

# As `typing` has it, without the five milliseconds of importing that.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

    Hooks = dict[str, Callable[[ModuleType], None]]

# Libraries whose compiles are observed, under every name that an engine imports them by; the last two start
# nvcc for what they build.
OBSERVED = (
    "deep_gemm",
    "vllm.third_party.deep_gemm",
    "tensorrt_llm.deep_gemm",
    "triton",
    "cutlass",
    "flashinfer",
    "torch.utils.cpp_extension",
)


def run_hidden_sitecustomize(here: str) -> None:
    """Executes the `sitecustomize` that Python would have found without the directory `here`, if any.

    Only what comes after `here` is searched: two of ours on one path run each other once, not for ever.
    """
    ours = os.path.realpath(here)
    places = [os.path.realpath(entry or ".") for entry in sys.path]
    if ours not in places:
        return
    spec = PathFinder.find_spec("sitecustomize", sys.path[places.index(ours) + 1 :])
    if spec is None or spec.loader is None:
        return
    # As `importlib.util` would make it, which takes longer to import than all of this.
    module = type(sys)("sitecustomize")
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class LoadThen:
    """A module's own loader, followed by one call with the module."""

    def __init__(self, inner: Any, hooks: Hooks) -> None:
        self.inner, self.hooks = inner, hooks

    def __getattr__(self, name: str) -> Any:
        # Whoever looks at the spec before the import finds all that the module's own loader has.
        return getattr(self.inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self.inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, leaves no trace of the hook in it, then calls; not if the import fails."""
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        module.__loader__ = self.inner
        self.inner.exec_module(module)
        after = self.hooks.pop(module.__name__, None)
        if after is not None:
            after(module)


class AfterImport:
    """Finds the named modules as the other finders do and calls once after each has been imported."""

    # Tells one of our kind to another, whose class is of another copy of this file.
    asks_those_behind = True

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec with a wrapped loader for a hooked name, else None: the next finder is asked."""
        if name not in self.hooks:
            return None
        # Those in front of us have been asked already; if one is of our kind too, asking it would never end.
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            find = getattr(finder, "find_spec", None)
            asks = _asks_those_behind(finder, name)
            spec = find(name, path, target) if find is not None else None
            if spec is None and asks:
                # Asking them again doubles the look-ups with each of us, where there is no such module.
                return None
            if spec is None:
                continue
            # A loader of the oldest kind has neither method: such a module is left as it is.
            if hasattr(spec.loader, "create_module") and hasattr(spec.loader, "exec_module"):
                spec.loader = LoadThen(spec.loader, self.hooks)
            return spec  # type: ignore[no-any-return]
        return None


def _asks_those_behind(finder: Any, name: str) -> bool:
    # Of the type: an instance that is a stranger's may answer to any name.
    return getattr(type(finder), "asks_those_behind", False) is True and name in finder.hooks


def install(hooks: Hooks) -> None:
    """From now on each of these is called with its module, right after that is imported."""
    sys.meta_path.insert(0, AfterImport(hooks))
