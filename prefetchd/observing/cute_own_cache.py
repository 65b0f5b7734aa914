"""What it takes to see the builds of a library that keeps its CuTe kernels on disk itself.

The library is patched when it has been imported, and left as it was by `remove`. The subtle rule: the compile
inside such a build is the build's own and must not be told a second time, so whoever patches a library says
when a thread enters a build of its and when it leaves it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from prefetchd import post_import

if TYPE_CHECKING:
    from prefetchd.observer import Observer


log = logging.getLogger("prefetchd")


class LibraryBuilds(ABC):
    """One installation for one library. `building` says whether this thread is inside a build of its."""

    # The library's module that holds what is patched.
    module: ClassVar[str]

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
        module = sys.modules.get(self.module)
        if module is not None:
            self._patch_active(module)
        else:
            post_import.install({self.module: self._patch_active})

    def remove(self) -> None:
        """Puts back what is the library's own, where it is still ours that stands there."""
        self._active = False
        while self._undo:
            self._undo.pop()()

    @abstractmethod
    def patch(self, module: ModuleType) -> None:
        """Puts ours in place with `put`; a library that has not got what is expected is left alone."""

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces an attribute by what `make` makes of it, until `remove`."""
        before = getattr(owner, name)
        ours = make(before)
        setattr(owner, name, ours)

        def undo() -> None:
            if getattr(owner, name) is ours:
                setattr(owner, name, before)

        self._undo.append(undo)

    def enter(self) -> None:
        """This thread begins a build."""
        self._inside.depth = getattr(self._inside, "depth", 0) + 1

    def leave(self) -> None:
        """It has ended."""
        self._inside.depth -= 1

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Both, round a build that is one call."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def _patch_active(self, module: ModuleType) -> None:
        if not self._active:
            return
        try:
            self.patch(module)
        except Exception as error:
            # Within the engine's own import of the library, which must not fail by us.
            self.remove()
            log.warning("prefetchd: the builds of %s are not observed: %s", self.module, error)
