"""The engine's mode: what the store holds is loaded, anything else is compiled as ever and reported.

The engine never waits for us and never fails by us. Whatever goes wrong with a stored kernel - it is
corrupt, of another user, does not load - ends in the compile that would have happened without us. The subtle
rule: a compile whose key is a dict's has no name until the library puts the result into its dict, so its end
is reported then.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from prefetchd.cute.artifacts import Found, Unloadable, entry_name, find, mark_used, names
from prefetchd.cute.fingerprint import (
    architecture_of,
    digest,
    dsl_settings,
    environment_fingerprint,
    source_fingerprint,
)
from prefetchd.cute.homes import Site
from prefetchd.cute.hooks import Hooks, Place, unwrapped
from prefetchd.cute.loading import load
from prefetchd.targets import Target

log = logging.getLogger("prefetchd")

COMPILER = "cute_dsl"


class _Compiled(NamedTuple):
    """A compile that has ended and is not told yet, because a dict may name it."""

    function: Any
    token: int
    seconds: float


class _Unnamed(threading.local):
    """Of this thread: whether a dict lacked a key, and what was compiled since."""

    def __init__(self) -> None:
        self.missed = False
        self.compiled: list[_Compiled] = []


class Listener(Protocol):
    """Who hears what happened. Called on the engine's thread."""

    def began(self, place: Place | None, name: str, subject: Any) -> int:
        """The engine compiles; the answer is handed to `over`."""
        ...

    def over(self, token: int, place: Place | None, name: str, seconds: float, ok: bool) -> None:
        """That compile has ended."""
        ...

    def loaded(self, place: Place, name: str, seconds: float) -> None:
        """The store had it."""
        ...


class Silent:
    """Nobody listens."""

    def began(self, place: Place | None, name: str, subject: Any) -> int:
        """See `Listener`."""
        return 0

    def over(self, token: int, place: Place | None, name: str, seconds: float, ok: bool) -> None:
        """See `Listener`."""

    def loaded(self, place: Place, name: str, seconds: float) -> None:
        """See `Listener`."""


class EngineMode:
    """See the module. `environment` is this process's; `device` says what it is, asked when first needed."""

    def __init__(
        self,
        root: Path,
        device: Callable[[], Target],
        environment: Mapping[str, str],
        listener: Listener | None = None,
    ) -> None:
        self.root = root
        self._target = lru_cache(maxsize=1)(device)
        self._environment = dict(environment)
        self._listener: Listener = listener or Silent()
        self._prints: dict[tuple[str, ...], tuple[str, str]] = {}
        # Loaded ahead by `preload_all`, by entry name.
        self._ready: dict[str, Any] = {}
        self._unnamed = _Unnamed()
        # By what ended: hit, miss, unkeyable, refused, failed. Read by tests, metrics and people.
        self.counts: dict[str, int] = {}
        self.seconds: dict[str, list[float]] = {"load": [], "compile": []}

    def look_up(self, place: Place) -> Any | None:
        """See `Mode`."""
        self._tell_unnamed()
        found = self._find(place)
        self._unnamed.missed = found is None
        return found

    def assigned(self, place: Place, value: Any) -> None:
        """See `Mode`: now the compile has its name."""
        function = unwrapped(value)
        for compiled in self._unnamed.compiled:
            if compiled.function is function:
                self._unnamed.compiled.remove(compiled)
                self._listener.over(compiled.token, place, self.name_of(place), compiled.seconds, True)
                break
        self._unnamed.missed = False
        self._tell_unnamed()

    def compile(self, place: Place | None, subject: Any, run: Callable[[], Any]) -> Any:
        """See `Mode`."""
        found = self._find(place) if place is not None else None
        if found is not None:
            return found
        name = self.name_of(place) if place is not None else ""
        token = self._listener.began(place, name, subject)
        begun = time.perf_counter()
        try:
            compiled = run()
        except BaseException:
            self._listener.over(token, place, name, time.perf_counter() - begun, False)
            raise
        seconds = time.perf_counter() - begun
        self.seconds["compile"].append(seconds)
        self._count("compiled")
        if place is None and self._unnamed.missed:
            self._unnamed.compiled.append(_Compiled(compiled, token, seconds))
        else:
            self._listener.over(token, place, name, seconds, True)
        return compiled

    def unkeyable(self, site: Site, reason: str) -> None:
        """See `Mode`."""
        if not self._count("unkeyable"):
            log.warning("prefetchd: a key of %s cannot be kept: %s", site.namespace, reason)

    def installed(self, site: Site) -> None:
        """See `Mode`: reads the kernels' sources now, as their module is imported, not with a request."""
        try:
            source_fingerprint(site.sources)
        except Exception as error:
            log.info("prefetchd: %s has no source here: %s", site.namespace, error)

    def name_of(self, place: Place) -> str:
        """The entry under which a helper publishes this compile; empty when that cannot be said."""
        try:
            environment, source = self._fingerprints(place.site.sources)
        except Exception as error:
            log.warning("prefetchd: %s has no fingerprint here: %s", place.site.namespace, error)
            return ""
        return entry_name(place.site.namespace, place.key, environment, source)

    def preload_all(self, stop: threading.Event | None = None) -> int:
        """Loads everything of this environment that the store holds; for a thread beside the engine.

        Each load holds the interpreter for some milliseconds, so this is the caller's choice.
        """
        count = 0
        for name in names(self.root):
            if stop is not None and stop.is_set():
                break
            try:
                found = find(self.root, name)
                if found is not None and found.artifact.architecture == self.architecture():
                    self._ready[name] = load(found.path, found.artifact)
                    count += 1
            except Exception as error:
                log.info("prefetchd: %s is not loaded ahead: %s", name, error)
        return count

    def _find(self, place: Place) -> Any | None:
        begun = time.perf_counter()
        name = self.name_of(place)
        try:
            function = self._ready.pop(name, None) if name else None
            found = find(self.root, name) if name and function is None else None
            if found is not None:
                function = self._load(found, place)
        except Exception as error:
            # Unloadable, StoreRefused, and anything a DSL, a file system or a driver can think of.
            if not self._count("refused"):
                log.warning("prefetchd: a stored kernel is not used and compiled as ever: %s", error)
            return None
        if function is None:
            self._count("miss")
            return None
        seconds = time.perf_counter() - begun
        self.seconds["load"].append(seconds)
        self._count("hit")
        self._listener.loaded(place, name, seconds)
        return function

    def _tell_unnamed(self) -> None:
        """What no dict was given has ended without a name."""
        while self._unnamed.compiled:
            compiled = self._unnamed.compiled.pop(0)
            self._listener.over(compiled.token, None, "", compiled.seconds, True)

    def _load(self, found: Found, place: Place) -> Any:
        artifact = found.artifact
        if (artifact.namespace, artifact.key) != (place.site.namespace, place.key):
            raise Unloadable(f"{found.path}: it is {artifact.namespace} {artifact.key}")
        if artifact.architecture != (own := self.architecture()):
            raise Unloadable(f"{found.path}: for {artifact.architecture}, and this engine is {own}")
        function = load(found.path, artifact)
        mark_used(found.path.parent)
        return function

    def architecture(self) -> str:
        """What this engine compiles for. Raises what `device` raises."""
        return architecture_of(self._target(), self._environment)

    def _fingerprints(self, sources: tuple[str, ...]) -> tuple[str, str]:
        if sources not in self._prints:
            settings = settings_here(self._environment)
            parts = environment_fingerprint(self._target(), self.architecture(), settings)
            self._prints[sources] = digest(parts), source_fingerprint(sources)
        return self._prints[sources]

    def _count(self, what: str) -> int:
        before = self.counts.get(what, 0)
        self.counts[what] = before + 1
        return before


def settings_here(environment: Mapping[str, str]) -> str:
    """The settings of the DSL that this process has imported."""
    module = sys.modules.get("cutlass.cutlass_dsl")
    manager = module.CuTeDSL._get_dsl().envar if module is not None else None
    return dsl_settings(manager, environment)


def attach(
    root: Path,
    device: Callable[[], Target],
    environment: Mapping[str, str],
    places: Iterable[Site],
    listener: Listener | None = None,
    packages: tuple[str, ...] = (),
) -> tuple[EngineMode, Hooks]:
    """Installs the engine's mode at these places, and for what functions of these packages have compiled."""
    mode = EngineMode(root, device, environment, listener)
    hooks = Hooks(mode, places, packages)
    hooks.install()
    return mode, hooks
