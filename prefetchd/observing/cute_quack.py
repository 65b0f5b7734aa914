"""Observes the CuTe kernels that quack keeps on disk itself: what it finds there, and what it compiles.

Every look-up of quack's decorator takes the kernel's lock file, shared to load and exclusive to compile, and
its name is the kernel's. So the class of that lock is where both are seen. The subtle rule: who waited for
another process's compile finds the file under the exclusive lock, and that is no compile.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from prefetchd.observing.call_site import call_site, outside
from prefetchd.observing.cute_own_cache import LibraryBuilds

log = logging.getLogger("prefetchd")

COMPILER = "quack_cute"
# Between the engine's call and the lock.
BETWEEN = ("quack", "prefetchd")


class QuackBuilds(LibraryBuilds):
    """quack's: the class of its lock."""

    module = "quack.cache.jit"

    def patch(self, module: ModuleType) -> None:
        """See `LibraryBuilds`."""
        if getattr(module, "FileLock", None) is not None:
            self.put(module, "FileLock", lambda before: self._observed(before, module))

    def _observed(self, before: Any, module: ModuleType) -> type:
        builds = self

        class ObservedLock(before):  # type: ignore[misc]
            """The library's lock; what happens while it is held is told."""

            def __enter__(self) -> Any:
                entered = super().__enter__()
                self._window = builds._begin(Path(self.lock_path), sys._getframe(1))
                return entered

            def __exit__(self, *exc: Any) -> Any:
                # First what is told: the file is ours to look at as long as the lock is held.
                builds._end(self._window, module)
                return super().__exit__(*exc)

        return ObservedLock

    def _begin(self, lock: Path, frame: FrameType) -> _Window | None:
        try:
            path = lock.with_suffix(".o")
            window = _Window(path, f"{path.parent.name}/{path.stem}", frame.f_locals)
            if not path.exists():
                site = call_site(outside(frame, BETWEEN))
                window.token = self._observer.started(COMPILER, key=window.key, site=site)
                self.enter()
            return window
        except Exception as error:
            log.info("prefetchd: a kernel of quack's is not told: %s", error)
            return None

    def _end(self, window: _Window | None, module: ModuleType) -> None:
        if window is None:
            return
        try:
            seconds = time.perf_counter() - window.begun
            if window.token is None:
                if not window.path.exists():
                    # It was damaged, and the library has removed it: the compile follows.
                    return
                self._observer.hit(COMPILER, window.key)
                self._observer.loaded(COMPILER, window.key, seconds)
                return
            self.leave()
            kernel = _rebuild(module, window)
            parts = {"kernel": f"{window.function.__module__}.{window.function.__qualname__}"}
            parts |= {f"[{index}]": str(value)[:256] for index, value in enumerate(window.args)}
            self._observer.ended(
                window.token,
                seconds=seconds,
                ok=window.path.exists(),
                key=window.key,
                rebuild=kernel,
                parts=parts,
            )
        except Exception as error:
            log.info("prefetchd: a kernel of quack's is not told: %s", error)


class _Window:
    """One lock's time: the kernel, and the call of the decorated function as the decorator's frame has it."""

    def __init__(self, path: Path, key: str, names: Any) -> None:
        self.path, self.key = path, key
        self.token: int | None = None
        self.function, self.args, self.named = names["fn"], names["args"], names["kwargs"]
        self.begun = time.perf_counter()


def _rebuild(module: ModuleType, window: _Window) -> dict[str, Any] | None:
    import msgspec

    from prefetchd.compilers.cute_dsl_quack import kernel_of

    kernel = kernel_of(module, window.function, window.args, window.named)
    if kernel is None or kernel.key != window.key:
        return None
    fields: dict[str, Any] = msgspec.to_builtins(kernel)
    return fields
