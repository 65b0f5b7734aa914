"""Observes the CuTe kernels that FlashInfer keeps on disk itself: what it finds there, and what it compiles.

The library names such a kernel before it looks for it, so both are told under that name. The subtle rule: the
compile inside a build is the build's own and is not told a second time as one without a name.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from prefetchd.cute.calls import Undescribable, describe
from prefetchd.observing.call_site import call_site, outside
from prefetchd.observing.cute_own_cache import LibraryBuilds

if TYPE_CHECKING:
    from prefetchd.observer import Observer

log = logging.getLogger("prefetchd")

COMPILER = "flashinfer_cute"
# Between the engine's call and the build.
BETWEEN = ("flashinfer", "prefetchd")


class FlashInferBuilds(LibraryBuilds):
    """FlashInfer's: its method that builds a kernel, and the one that looks for it on disk."""

    module = "flashinfer.jit.cute_dsl_core"

    def __init__(self, observer: Observer, environment: Mapping[str, str]) -> None:
        super().__init__(observer)
        base = environment.get("FLASHINFER_WORKSPACE_BASE") or str(Path.home())
        self._root = Path(base) / ".cache" / "flashinfer"

    def patch(self, module: ModuleType) -> None:
        """See `LibraryBuilds`."""
        owner = getattr(module, "JitSpecCuteDsl", None)
        if owner is not None:
            self.put(owner, "build", self._build)
            self.put(owner, "_load_from_disk", self._load)

    def _build(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def build(spec: Any, *args: Any, **known: Any) -> Any:
            key = self._key(spec)
            site = call_site(outside(sys._getframe(1), BETWEEN))
            token = self._observer.started(COMPILER, key=key, site=site)
            begun, ok = time.perf_counter(), False
            try:
                with self.inside():
                    built = before(spec, *args, **known)
                ok = True
                return built
            finally:
                seconds = time.perf_counter() - begun
                rebuild = _rebuild(key, sys._getframe(1)) if key else None
                parts = {"kernel": str(spec.module_name), "variant": str(spec.kernel_name)}
                self._observer.ended(token, seconds=seconds, ok=ok, key=key, rebuild=rebuild, parts=parts)

        return build

    def _load(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def load(spec: Any, *args: Any, **known: Any) -> Any:
            begun = time.perf_counter()
            found = before(spec, *args, **known)
            key = self._key(spec)
            if key and spec._compiled_kernel is None:
                self._observer.hit(COMPILER, key)
                self._observer.loaded(COMPILER, key, time.perf_counter() - begun)
            return found

        return load

    def _key(self, spec: Any) -> str:
        try:
            from prefetchd.compilers.cute_dsl_flashinfer import key_of

            return key_of(spec, self._root)
        except Exception as error:
            log.info("prefetchd: a kernel of FlashInfer's has no key here: %s", error)
            return ""


def _leads_to(function: Any, code: CodeType) -> bool:
    """Whether a function, or what its decorators are wrapped around, is this code."""
    return callable(function) and getattr(inspect.unwrap(function), "__code__", None) is code


def _rebuild(key: str, frame: FrameType | None) -> dict[str, Any] | None:
    """The outermost running call of a function that engines call, as data with the kernel's key."""
    try:
        import msgspec

        from prefetchd.compilers.cute_dsl_flashinfer import ENTRY_MODULES, Kernel

        found: FrameType | None = None
        while frame is not None:
            code, names = frame.f_code, frame.f_globals
            if names.get("__name__") in ENTRY_MODULES and _leads_to(names.get(code.co_name), code):
                found = frame
            frame = frame.f_back
        if found is None:
            return None
        code = found.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        arguments = {name: found.f_locals[name] for name in code.co_varnames[:count]}
        call = describe(str(found.f_globals["__name__"]), code.co_name, arguments)
        fields: dict[str, Any] = msgspec.to_builtins(Kernel(key=key, call=call))
        return fields
    except Undescribable as error:
        log.info("prefetchd: a call of FlashInfer's is not kept: %s", error)
        return None
    except Exception as error:
        log.info("prefetchd: a kernel of FlashInfer's is recorded without its call: %s", error)
        return None
