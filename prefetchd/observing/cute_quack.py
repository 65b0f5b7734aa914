"""Observes the CuTe kernels that quack keeps on disk itself: what it finds there, and what it compiles.

Every look-up of quack's decorator takes the kernel's lock file, shared to load and exclusive to compile, and
its name is the kernel's. So the class of that lock is where both are seen. The subtle rule: who waited for
another process's compile finds the file under the exclusive lock, and that is no compile.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from prefetchd import post_import
from prefetchd.observing.call_site import call_site

if TYPE_CHECKING:
    from prefetchd.observer import Observer

log = logging.getLogger("prefetchd")

COMPILER = "quack_cute"
MODULE = "quack.cache.jit"
MAX_FRAMES = 64


class QuackBuilds:
    """One installation. `building` says whether this thread is inside a compile of the library's."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
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
        """Puts the library's own class back."""
        self._active = False
        while self._undo:
            self._undo.pop()()

    def _patch(self, module: ModuleType) -> None:
        before: Any = getattr(module, "FileLock", None)
        if not self._active or before is None:
            return
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

        owner: Any = module
        owner.FileLock = ObservedLock

        def undo() -> None:
            if owner.FileLock is ObservedLock:
                owner.FileLock = before

        self._undo.append(undo)

    def _begin(self, lock: Path, frame: FrameType) -> _Window | None:
        try:
            path = lock.with_suffix(".o")
            window = _Window(path, f"{path.parent.name}/{path.stem}", frame.f_locals)
            if not path.exists():
                site = call_site(_caller(frame))
                window.token = self._observer.started(COMPILER, key=window.key, site=site)
                self._inside.depth = getattr(self._inside, "depth", 0) + 1
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
            self._inside.depth -= 1
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


def _caller(frame: FrameType | None) -> FrameType | None:
    """The frame that called quack."""
    for _ in range(MAX_FRAMES):
        name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        if frame is None or not name.startswith(("quack", "prefetchd")):
            break
        frame = frame.f_back
    return frame
