"""Observes the CuTe kernels that FlashInfer keeps on disk itself: what it finds there, and what it compiles.

The library names such a kernel before it looks for it, so both are told under that name. The subtle rule: the
compile inside a build is the build's own and is not told a second time as one without a name.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from prefetchd import post_import
from prefetchd.cute.calls import Undescribable, describe
from prefetchd.observing.call_site import call_site

if TYPE_CHECKING:
    from prefetchd.observer import Observer

log = logging.getLogger("prefetchd")

COMPILER = "flashinfer_cute"
MODULE = "flashinfer.jit.cute_dsl_core"
MAX_FRAMES = 64


class FlashInferBuilds:
    """One installation. `building` says whether this thread is inside a build of the library's."""

    def __init__(self, observer: Observer, environment: Mapping[str, str]) -> None:
        self._observer = observer
        base = environment.get("FLASHINFER_WORKSPACE_BASE") or str(Path.home())
        self._root = Path(base) / ".cache" / "flashinfer"
        self._inside = threading.local()
        self._undo: list[Callable[[], None]] = []
        self._active = True

    def building(self) -> bool:
        """See the class."""
        return getattr(self._inside, "depth", 0) > 0

    def install(self) -> None:
        """Patches the library now, or after its import."""
        module = sys.modules.get(MODULE)
        if module is not None:
            self._patch(module)
        else:
            post_import.install({MODULE: self._patch})

    def remove(self) -> None:
        """Puts the library's own methods back."""
        self._active = False
        while self._undo:
            self._undo.pop()()

    def _patch(self, module: ModuleType) -> None:
        owner = getattr(module, "JitSpecCuteDsl", None)
        if self._active and owner is not None:
            self._put(owner, "build", self._build)
            self._put(owner, "_load_from_disk", self._load)

    def _put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        ours = make(before)
        setattr(owner, name, ours)

        def undo() -> None:
            if getattr(owner, name) is ours:
                setattr(owner, name, before)

        self._undo.append(undo)

    def _build(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def build(spec: Any, *args: Any, **known: Any) -> Any:
            key = self._key(spec)
            token = self._observer.started(COMPILER, key=key, site=call_site(_caller(sys._getframe(1))))
            self._inside.depth = getattr(self._inside, "depth", 0) + 1
            begun, ok = time.perf_counter(), False
            try:
                built = before(spec, *args, **known)
                ok = True
                return built
            finally:
                self._inside.depth -= 1
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


def _caller(frame: FrameType | None) -> FrameType | None:
    """The frame that called FlashInfer."""
    for _ in range(MAX_FRAMES):
        name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        if frame is None or not name.startswith(("flashinfer", "prefetchd")):
            break
        frame = frame.f_back
    return frame


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
