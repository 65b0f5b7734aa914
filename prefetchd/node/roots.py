"""The cache directories the daemon works in: a staging place and key locks in each, while somebody uses it.

What a killed daemon left in one is removed when the next opens it. The subtle rule: a directory may be lost
under us (unmounted, removed); what fails in it fails that piece of work and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path

from prefetchd.store import KeyLocks, Staging

# How often a key that another process compiles is looked at; a compile takes seconds.
FOREIGN_POLL_S = 0.1


class Root:
    """One open cache directory."""

    def __init__(self, path: Path, variable: str, stack: ExitStack) -> None:
        self.path = path
        self.users = 0
        self._stack = stack
        self._mine: dict[str, asyncio.Lock] = {}
        self.staging = stack.enter_context(Staging(path, variable=variable))
        self._locks = stack.enter_context(closing(KeyLocks(path, variable=variable)))

    @asynccontextmanager
    async def key(self, key: str) -> AsyncIterator[None]:
        """Inside it nobody else of this machine works on the key in this directory."""
        # The kernel's lock is this process's as a whole; among our own tasks another one decides.
        own = self._mine.setdefault(key, asyncio.Lock())
        self.users += 1
        try:
            async with own:
                while not self._locks.try_acquire(key):
                    await asyncio.sleep(FOREIGN_POLL_S)
                try:
                    yield
                finally:
                    self._locks.release(key)
        finally:
            self.users -= 1
            if not own.locked():
                self._mine.pop(key, None)

    def close(self) -> None:
        """Removes the staging place."""
        self._stack.close()


class Roots:
    """The open directories by path."""

    def __init__(self) -> None:
        self._open: dict[str, Root] = {}

    def get(self, path: str, variable: str) -> Root:
        """The directory, opened if need be. Raises `StoreUnwritable`."""
        root = self._open.get(path)
        if root is None:
            with ExitStack() as stack:
                root = Root(Path(path), variable, stack)
                root._stack = stack.pop_all()
            self._open[path] = root
        return root

    def close_unused(self, wanted: frozenset[str]) -> None:
        """Leaves the directories that no attached engine uses and nothing works in."""
        for path in [path for path, root in self._open.items() if path not in wanted and not root.users]:
            self._open.pop(path).close()

    def close(self) -> None:
        """Leaves all of them."""
        for root in self._open.values():
            root.close()
        self._open.clear()
