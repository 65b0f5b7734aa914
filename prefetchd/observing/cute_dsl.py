"""Serves and observes the CuTe DSL in an engine: what the store holds is loaded, every compile is reported.

The store answers where the library looks for its kernel (`prefetchd/cute/`), so one installation does both. A
compile is told with its namespace, its key by named fields, its duration and its outcome. The subtle rule: a
dict's kernel has no name until the library puts it into its dict; only then is the compile's end told, and
the call it came from read from the frames that are still there.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from prefetchd.config import load_settings
from prefetchd.cute.artifacts import find_root, names
from prefetchd.cute.calls import Call, Fields, Global, Plain
from prefetchd.cute.engine import COMPILER, EngineMode, attach
from prefetchd.cute.fillers import filling_call
from prefetchd.cute.homes import sites
from prefetchd.cute.hooks import Hooks, Place
from prefetchd.cute.loading import preload
from prefetchd.introduction import driver_is_up
from prefetchd.kernel_packages import HOME_PACKAGES
from prefetchd.observing.call_site import call_site, outside
from prefetchd.observing.cute_flashinfer import FlashInferBuilds
from prefetchd.observing.cute_own_cache import LibraryBuilds
from prefetchd.observing.cute_quack import QuackBuilds
from prefetchd.targets import Target, probe_target

if TYPE_CHECKING:
    from prefetchd.observer import Observer

log = logging.getLogger("prefetchd")

# Between the engine's call and the hooks: ours, the DSL's, and the null device's where that is there.
BETWEEN = ("prefetchd", "cutlass")
# As the observer has it: it names no compile.
NO_TOKEN = 0


class CuteDslAdaptor:
    """The engine side of the CuTe DSL, for one observer at a time. `target` where it is known already."""

    name = COMPILER

    def __init__(self, target: Target | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._target = target
        self._environment = dict(os.environ if environment is None else environment)
        self._hooks: Hooks | None = None
        self._builds: tuple[LibraryBuilds, ...] = ()
        self._stop = threading.Event()
        self.mode: EngineMode | None = None
        # What loading the DSL's own libraries took at `install`; empty where that was left for later.
        self.preloaded: dict[str, float] = {}

    def install(self, observer: Observer) -> None:
        """Raises with a text for people where the settings cannot be meant. Imports no DSL that may wait.

        Where this process uses the device already and the store holds something, the DSL's libraries are
        loaded now, before the engine says it is ready; else with the first kernel.
        """
        self.remove()
        settings = load_settings(self._environment)
        root = find_root(self._environment, settings.cute_store)
        places = sites(settings.cute_dicts, settings.cute_functions)
        stored = bool(names(root))
        if stored and driver_is_up():
            # In a process without the device the DSL would take another architecture for its own.
            self.preloaded = preload()
        builds = FlashInferBuilds(observer, self._environment), QuackBuilds(observer)
        self._builds = builds
        for each in builds:
            each.install()

        def told_elsewhere() -> bool:
            return any(each.building() for each in builds)

        reports = _Reports(observer, self._describe_architecture, told_elsewhere)
        packages = (*HOME_PACKAGES, *settings.replay_packages)
        self.mode, self._hooks = attach(root, self._device, self._environment, places, reports, packages)
        if settings.cute_preload and self.preloaded:
            self._stop = threading.Event()
            threading.Thread(
                target=self.mode.preload_all, args=(self._stop,), name="prefetchd-cute", daemon=True
            ).start()

    def remove(self) -> None:
        """Puts the library's own dicts and functions back, with what they hold by now."""
        self._stop.set()
        for each in self._builds:
            each.remove()
        self._builds = ()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def _device(self) -> Target:
        # The driver is up where a kernel is looked for.
        return self._target or probe_target(0)

    def _describe_architecture(self) -> str:
        return self.mode.architecture() if self.mode is not None else ""


class _Reports:
    """What the engine's mode tells, as the observer takes it."""

    def __init__(
        self, observer: Observer, architecture: Callable[[], str], told_elsewhere: Callable[[], bool]
    ) -> None:
        self._observer, self._architecture = observer, architecture
        self._told_elsewhere = told_elsewhere

    def began(self, place: Place | None, name: str, subject: Any) -> int:
        """See `Listener`."""
        if self._told_elsewhere():
            return NO_TOKEN
        site = call_site(outside(sys._getframe(1), BETWEEN))
        return self._observer.started(COMPILER, key=name, site=site)

    def over(self, token: int, place: Place | None, name: str, seconds: float, ok: bool) -> None:
        """See `Listener`."""
        if token == NO_TOKEN:
            return
        parts, rebuild = {}, None
        if place is not None and name:
            parts, rebuild = parts_of(place), self._rebuild(place, name)
        self._observer.ended(token, seconds=seconds, ok=ok, key=name, rebuild=rebuild, parts=parts)
        self._observer.enforce()

    def loaded(self, place: Place, name: str, seconds: float) -> None:
        """See `Listener`."""
        self._observer.hit(COMPILER, name)
        self._observer.loaded(COMPILER, name, seconds)

    def _rebuild(self, place: Place, name: str) -> dict[str, Any] | None:
        try:
            from prefetchd.compilers.cute_dsl_records import recorded

            call = place.call
            if place.site.kind == "dict":
                call = filling_call(place.site, sys._getframe(1))
            return recorded(place, name, self._architecture(), call)
        except Exception as error:
            log.info("prefetchd: %s is recorded without what rebuilds it: %s", place.site.namespace, error)
            return None


def parts_of(place: Place) -> dict[str, str]:
    """A key by named fields: a function's arguments by name, a dict's by position."""
    parts = {"kernel": place.site.namespace, "compile": str(place.number)}
    if place.call is not None:
        return parts | parts_of_call(place.call)
    for index, item in enumerate(place.node[1:] if place.node[0] == "T" else [place.node]):
        named = place.site.kind == "function" and item[0] == "T" and len(item) == 3
        parts[item[1][1] if named else f"[{index}]"] = _shown(item[2] if named else item)
    return parts


def parts_of_call(call: Call) -> dict[str, str]:
    """Its plain arguments by name, those of a library's own class by that class's fields."""
    parts = {}
    for name, value in call.arguments.items():
        if isinstance(value, Plain):
            parts[name] = _shown(value.node)
        elif isinstance(value, Fields):
            parts |= {f"{name}.{field}": _shown(each.node) for field, each in value.values.items()}
        elif isinstance(value, Global):
            parts[name] = value.name
    return parts


def _shown(node: list[Any]) -> str:
    if node[0] == "T":
        return f"({', '.join(_shown(each) for each in node[1:])})"
    if node[0] == "f":
        return str(float.fromhex(node[1]))
    return str(node[1]) if len(node) > 1 else {"n": "None", "D": "device"}[node[0]]
