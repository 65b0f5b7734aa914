"""Imports the modules of one subpackage without running what its parent packages do at import.

Kernel libraries load compiled extensions, whole model zoos or servers in their top `__init__`, and some of
that is absent or slow where only the Triton kernels are wanted. The keys of those kernels depend on the text
of their own modules and nothing else, so the parents may be bare packages that know only where they lie.
The subtle rule: this concerns one process. Nothing is written, and what is already imported stays as it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType


def lean_import(package: str, *modules: str) -> dict[str, ModuleType]:
    """Those of `modules` that `package` has, by name, imported with bare parents where that works.

    Parents whose own `__init__` turns out to be needed are imported in earnest. Raises the `ImportError` of
    the first way when neither works; a package that is not installed is a `ModuleNotFoundError`.
    """
    before = set(sys.modules)
    try:
        _register_bare(package.split(".")[:-1])
        return _import(package, modules)
    except (ImportError, AttributeError) as error:
        _forget(package, before)
        reason = error
    try:
        return _import(package, modules)
    except Exception:
        _forget(package, before)
        if isinstance(reason, ImportError):
            raise reason from None
        raise ImportError(f"{package} does not import: {reason}") from reason


def _import(package: str, modules: Sequence[str]) -> dict[str, ModuleType]:
    importlib.import_module(package)
    names = {name: f"{package}.{name}" for name in modules}
    return {name: importlib.import_module(full) for name, full in names.items() if find_spec(full)}


def _register_bare(parents: Sequence[str]) -> None:
    """Bare packages along a dotted name, outermost first, where nothing is imported yet."""
    for depth in range(1, len(parents) + 1):
        name = ".".join(parents[:depth])
        if name in sys.modules:
            continue
        spec = find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = ModuleType(name)
        module.__path__ = list(spec.submodule_search_locations)
        module.__spec__ = spec
        sys.modules[name] = module
        if depth > 1:
            setattr(sys.modules[name.rpartition(".")[0]], parents[depth - 1], module)


def _forget(package: str, before: set[str]) -> None:
    """Takes back what a failed attempt left of the package's own tree."""
    top = package.partition(".")[0]
    for name in [name for name in sys.modules if name not in before]:
        if name == top or name.startswith(f"{top}."):
            del sys.modules[name]
