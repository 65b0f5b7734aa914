"""DeepGEMM with NVRTC compiles inside the engine, where no stand-in sees it: its cache is compared instead.

What appears in the directory since the engine started was compiled, but by whom, when it began, how long it
took and for which call nobody can say; another rank may have been it. So these compiles are told by key
alone, and one line at the start says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prefetchd.compilers.deep_jit import LAYOUTS, DeepJit
from prefetchd.observing.nvcc_variables import NVRTC_VARIABLE

if TYPE_CHECKING:
    from prefetchd.observer import Observer
    from prefetchd.observing.recorder import Recorder

log = logging.getLogger("prefetchd")

# A directory of some hundred entries is read in a millisecond; nobody waits for what it says.
EVERY_TICKS = 5
# What either line leaves in a complete entry.
CUBIN = "kernel.cubin"


class NvrtcAdaptor:
    """Compares DeepGEMM's cache with what it held when this was installed."""

    name = f"{DeepJit.name} (NVRTC)"

    def __init__(self, recorder: Recorder, environment: Mapping[str, str] | None = None) -> None:
        self._recorder = recorder
        self._caches = caches(os.environ if environment is None else environment)
        self._known: set[str] = set()
        self._observer: Observer | None = None
        self._ticks = 0

    def install(self, observer: Observer) -> None:
        """Looks at the cache now, and every few seconds from now on."""
        log.warning(
            "prefetchd: %s is set, so deep_gemm compiles in itself: its compiles are told from what appears "
            "in %s, without times, ops and callers; unset it to have them",
            NVRTC_VARIABLE,
            ", ".join(map(str, self._caches)),
        )
        self._known = {entry.name for entry in self._entries()}
        self._observer = observer
        self._recorder.every_second(self._look)

    def remove(self) -> None:
        """Looks no more."""
        self._observer = None

    def _look(self) -> None:
        self._ticks += 1
        if self._observer is None or (self._ticks % EVERY_TICKS and not self._recorder.closed):
            return
        for entry in self._entries():
            if entry.name in self._known or not (entry / CUBIN).exists():
                continue
            self._known.add(entry.name)
            if not self._observer.knowledge.published(DeepJit.name, entry.name):
                token = self._observer.started(
                    DeepJit.name, key=entry.name, at=entry.stat().st_mtime, over=True
                )
                self._observer.ended(token, seconds=0.0)

    def _entries(self) -> list[Path]:
        return [entry for cache in self._caches if cache.is_dir() for entry in cache.iterdir()]


def caches(environment: Mapping[str, str]) -> list[Path]:
    """The directories that either line of the library may write into."""
    found = []
    for layout in LAYOUTS.values():
        named = next((environment[name] for name in layout.cache_variables if environment.get(name)), "")
        home = Path(environment.get("HOME", "/nowhere")) / layout.default_directory
        found.append((Path(named.partition(":")[0]) if named else home) / "cache")
    return list(dict.fromkeys(found))
