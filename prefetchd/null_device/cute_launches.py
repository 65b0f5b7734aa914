"""Kernels of the CuTe DSL are compiled on the null device as anywhere, and launching one does nothing.

Such a kernel launches through a library with a CUDA runtime of its own, which wants more of a driver than the
null device answers. Compiling needs none of it. So what a compile or a load gives is wrapped: called, it does
nothing, as every kernel here; anything else (exporting it, asking for its name) is the library's own.

Loaded by its file in interpreters that lack prefetchd, so it imports nothing.
"""

from __future__ import annotations

# As `typing` has it, without importing that.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


class Unlaunched:
    """A compiled function that is not called."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """In place of the launch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Loaded:
    """A loaded object file whose functions are not called."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return _unlaunched(getattr(self.inner, name))

    def __getitem__(self, name: Any) -> Any:
        return _unlaunched(self.inner[name])


def _unlaunched(found: Any) -> Any:
    return Unlaunched(found) if callable(found) else found


def on_compiler(module: ModuleType) -> None:
    """After the import of the DSL's compiler: wraps on the class, of which `cute.compile` is an instance."""
    original = module.CompileCallable.__call__

    def compile_unlaunched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _unlaunched(original(self, *args, **kwargs))

    module.CompileCallable.__call__ = compile_unlaunched


def on_runtime(module: ModuleType) -> None:
    """After the import of the DSL's runtime: what object files hold is not launched either."""
    original = getattr(module, "load_module", None)
    if original is not None:
        module.load_module = lambda *args, **kwargs: Loaded(original(*args, **kwargs))  # type: ignore[attr-defined]
