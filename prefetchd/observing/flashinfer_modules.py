"""Observes the modules that FlashInfer builds with ninja: each build, and each that ninja found ready.

The library has ninja look at every first use of a module, so a call of its `build` is no compile yet. The
subtle rule: whether it was one is told by the library's file. Where there is none before, a compile begins;
where there is one and it is another afterwards, it has been built again, and only the end tells that.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from prefetchd.observing.call_site import call_site, outside
from prefetchd.observing.cute_own_cache import LibraryBuilds

if TYPE_CHECKING:
    from prefetchd.compilers.flashinfer_calls import Module
    from prefetchd.observer import Observer

log = logging.getLogger("prefetchd")

COMPILER = "flashinfer_modules"
# Between the engine's call and the build.
BETWEEN = ("flashinfer", "prefetchd")


class FlashInferAdaptor:
    """The engine side of FlashInfer's modules, for one observer at a time."""

    name = COMPILER

    def __init__(self) -> None:
        self._builds: ModuleBuilds | None = None

    def install(self, observer: Observer) -> None:
        """Begins to tell."""
        self.remove()
        self._builds = ModuleBuilds(observer)
        self._builds.install()

    def remove(self) -> None:
        """Tells no more."""
        if self._builds is not None:
            self._builds.remove()
            self._builds = None


class ModuleBuilds(LibraryBuilds):
    """The library's class that describes a module: where one is made, and its method that builds."""

    module = "flashinfer.jit.core"

    def patch(self, module: ModuleType) -> None:
        """See `LibraryBuilds`."""
        from prefetchd.compilers.flashinfer_specs import CLASS, remember_call

        owner = getattr(module, CLASS, None)
        if owner is not None:
            self.put(owner, "__init__", remember_call)
            self.put(owner, "build", self._build)

    def _build(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def build(spec: Any, *args: Any, **known: Any) -> Any:
            window = self._begun(spec, sys._getframe(1))
            ok = False
            try:
                built = before(spec, *args, **known)
                ok = True
            finally:
                if window is not None:
                    window.close(ok=ok)
            self._observer.enforce()
            return built

        return build

    def _begun(self, spec: Any, frame: FrameType) -> _Window | None:
        try:
            return _Window(self._observer, spec, call_site(outside(frame, BETWEEN)))
        except Exception as error:
            log.info("prefetchd: a build of FlashInfer's is not observed: %s", error)
            return None


class _Window:
    """One call of `build`. Closing it raises nothing."""

    def __init__(self, observer: Observer, spec: Any, site: str) -> None:
        self._observer, self._site = observer, site
        self._module = _described(spec)
        self._name = str(getattr(spec, "name", ""))
        self._library = Path(str(getattr(spec, "jit_library_path", "")))
        self._before = _written(self._library)
        self._token: int | None = None
        if self._before is None:
            self._token = observer.started(COMPILER, key=self._key, site=site)
        self._at, self._begun = time.time(), time.perf_counter()

    def close(self, *, ok: bool) -> None:
        """The library has built, or found the module ready."""
        seconds = time.perf_counter() - self._begun
        if self._token is None:
            if ok and _written(self._library) == self._before:
                self._observer.hit(COMPILER, self._key)
                return
            self._token = self._observer.started(
                COMPILER, key=self._key, site=self._site, at=self._at, over=True
            )
        self._observer.ended(
            self._token, seconds=seconds, ok=ok, rebuild=_rebuild(self._module), parts={"kernel": self._name}
        )

    @property
    def _key(self) -> str:
        return self._module.key if self._module is not None else ""


def _described(spec: Any) -> Module | None:
    try:
        from prefetchd.compilers.flashinfer_specs import module_of

        return module_of(spec)
    except Exception as error:
        log.info("prefetchd: a module of FlashInfer's has no key here: %s", error)
        return None


def _rebuild(module: Module | None) -> dict[str, Any] | None:
    if module is None:
        return None
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(module)
    return fields


def _written(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except (OSError, ValueError):
        return None
