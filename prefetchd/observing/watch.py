"""The observer of this process: made when the first library that compiles is imported, one for all of them.

Both ways into an engine end here: `prefetchd run` by its import hooks, `attach()` directly. The subtle rule:
it needs no daemon. What it sees goes to the shape log from the first compile on, and to a daemon from the
moment there is a client (`use`).

Whatever fails in an adaptor switches that adaptor off with one line, and nothing else. The one exception that
reaches an engine is asked for: `PREFETCHD_ON_ENGINE_COMPILE=error`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from prefetchd.config import Settings, load_settings
from prefetchd.observer import Observer
from prefetchd.observing.call_site import call_site
from prefetchd.observing.recorder import Origin, Recorder
from prefetchd.post_import import OBSERVED
from prefetchd.post_import import install as after_import
from prefetchd.rank import environment_rank, torch_rank
from prefetchd.shapelog import LogUnusable, log_directory

if TYPE_CHECKING:
    from prefetchd.client import Client
    from prefetchd.introduction import Introduction
    from prefetchd.planner import Planner
    from prefetchd.targets import Target

log = logging.getLogger("prefetchd")

# Of a process that would have ended well, but compiled in fail-fast mode. Not a status that shells, Python or
# common tools use.
EXIT_ENGINE_COMPILED = 86
# Behind whatever the engine finalizes, which may compile.
CLOSED_LAST = -1000
# What their records are good for is in their fingerprint; one without it is replayed nowhere.
COMPILERS = ("deep_jit", "triton", "cute_dsl", "flashinfer_cute", "flashinfer_modules", "quack_cute")
# By the library's name: where its adaptor is.
ADAPTORS = {
    "triton": ("prefetchd.observing.triton", "TritonAdaptor"),
    "cutlass": ("prefetchd.observing.cute_dsl", "CuteDslAdaptor"),
    "flashinfer": ("prefetchd.observing.flashinfer_modules", "FlashInferAdaptor"),
}
# They start nvcc for what they build, by variables that may be named in the settings.
STARTS_NVCC = ("flashinfer", "torch.utils.cpp_extension")


class Adaptor(Protocol):
    """What tells an observer of one compile system."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def install(self, observer: Observer) -> None:
        """Begins to tell. May raise: then the adaptor is off."""
        ...

    def remove(self) -> None:
        """Tells no more."""
        ...


class Watch:
    """The observer with its recorder and its adaptors."""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self._settings, self._environment = settings, environment
        self._device, self._rank = 0, -1
        self._target: Target | None = None
        self._introduction: Introduction | None = None
        self._adaptors: dict[str, Adaptor] = {}
        self._lock = threading.RLock()
        self.recorder = Recorder(
            _directory(settings, environment),
            self._origin,
            self._find_rank,
            max_bytes=settings.log_max_mb << 20,
        )
        from_start = settings.on_engine_compile_from == "start"
        self.observer = Observer(
            self.recorder,
            on_compile=settings.on_engine_compile if from_start else "ignore",
            site=call_site,
        )

    def library_imported(self, module: ModuleType) -> None:
        """Observes it from now on."""
        name = module.__name__
        with self._lock:
            if name in ADAPTORS:
                self._adapt(name, lambda: _adaptor(*ADAPTORS[name]))
            elif name.rpartition(".")[2] == "deep_gemm":
                self._observe_deep_gemm(module)
            if name in STARTS_NVCC and self._settings.observe_nvcc:
                self._adapt("nvcc", self._nvcc_adaptor)

    def use(
        self,
        client: Client,
        planner: Callable[[], Planner | None] = lambda: None,
        *,
        device: int = 0,
        rank: int = -1,
        target: Target | None = None,
    ) -> None:
        """From now on the daemon is told, and asked what was to be expected."""
        from prefetchd.observing.client_knowledge import ClientKnowledge

        self._device, self._rank, self._target = device, rank, target
        self._introduction = None
        self.observer.knowledge = ClientKnowledge(client, planner)
        self.recorder.listener = client

    def mark_serving(self) -> None:
        """The engine serves: with `on_engine_compile_from = "serving"` its compiles count from now on."""
        self.observer.on_compile = self._settings.on_engine_compile

    def close(self) -> None:
        """Writes down what waits and takes every hook away."""
        self.recorder.close()
        for adaptor in self._adaptors.values():
            try:
                adaptor.remove()
            except Exception as error:
                self.recorder.guard.caught(f"removing the observer of {adaptor.name}", error)

    def forget_parent(self) -> None:
        """In a forked child: the same adaptors, a thread and a spool of its own."""
        self.close_with_worker()
        self._lock = threading.RLock()
        self.recorder.forget_parent()
        self.observer.forget_parent()
        for adaptor in self._adaptors.values():
            forget = getattr(adaptor, "forget_parent", None)
            if forget is not None:
                forget()

    def close_with_worker(self) -> None:
        """multiprocessing's workers leave without `atexit`; what they compiled last is written as well."""
        util: Any = sys.modules.get("multiprocessing.util")
        process: Any = sys.modules.get("multiprocessing.process")
        if util is None or process is None:
            return

        def finalize(watch: Watch) -> None:
            util.Finalize(None, watch.close, exitpriority=CLOSED_LAST)

        try:
            # A worker begins by dropping all finalizers, and runs these then.
            util.register_after_fork(self, finalize)
            if process.parent_process() is not None:
                # It has begun already.
                finalize(self)
        except Exception as error:
            self.recorder.guard.caught("preparing the end of a worker", error)

    def exit_status(self) -> int:
        """What a process should end with that would have ended well."""
        compiles = self.observer.forbidden
        if not compiles:
            return 0
        log.error(
            "prefetchd: the engine compiled %d variants itself; PREFETCHD_ON_ENGINE_COMPILE=error makes that "
            "exit status %d",
            compiles,
            EXIT_ENGINE_COMPILED,
        )
        return EXIT_ENGINE_COMPILED

    def _observe_deep_gemm(self, module: ModuleType) -> None:
        from prefetchd.observing.nvcc_variables import uses_nvrtc
        from prefetchd.observing.nvrtc import NvrtcAdaptor

        if uses_nvrtc(self._environment):
            self._adapt("nvrtc", lambda: NvrtcAdaptor(self.recorder))
            return
        adaptor = self._adapt("nvcc", self._nvcc_adaptor)
        if adaptor is not None:
            self._guarded(adaptor, lambda: adaptor.wrap(module))

    def _nvcc_adaptor(self) -> Any:
        from prefetchd.observing.nvcc import NvccAdaptor

        return NvccAdaptor(self.recorder)

    def _adapt(self, name: str, make: Callable[[], Any]) -> Any:
        """The adaptor of that name, installed once; None where it is off."""
        if name not in self._adaptors:
            try:
                self._adaptors[name] = made = make()
            except Exception as error:
                _say_off(name, error)
                return None
            self._guarded(made, lambda: made.install(self.observer))
        return self._adaptors.get(name)

    def _guarded(self, adaptor: Adaptor, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            _say_off(adaptor.name, error)
            self._adaptors = {name: one for name, one in self._adaptors.items() if one is not adaptor}
            try:
                adaptor.remove()
            except Exception as second:
                self.recorder.guard.caught(f"removing the observer of {adaptor.name}", second)

    def _origin(self) -> Origin:
        """On the recorder's thread."""
        from prefetchd.compilers.base import fingerprint_id
        from prefetchd.introduction import Introduction

        if self._introduction is None:
            self._introduction = Introduction(
                engine="", compilers=COMPILERS, device=self._device, target=self._target
            )
        hello = self._introduction()
        target = hello.target
        return Origin(
            fingerprints={name: fingerprint_id(found) for name, found in hello.fingerprints.items()},
            gpu=target.name if target else "",
            capability=target.capability if target else 0,
            sm_count=target.sm_count if target else 0,
        )

    def _find_rank(self) -> int:
        if self._rank >= 0:
            return self._rank
        found = torch_rank() or environment_rank(os.environ)
        return found[0] if found else self._device


_lock = threading.Lock()
_of_process: list[Watch | None] = []


def watch(environment: Mapping[str, str] = os.environ) -> Watch | None:
    """This process's, made at the first call; None where observing is switched off or cannot be begun."""
    with _lock:
        if not _of_process:
            _of_process.append(_begin(environment))
        return _of_process[0]


def begin(environment: Mapping[str, str]) -> Watch | None:
    """Observes every library that is imported already, and those that will be."""
    found = watch(environment)
    if found is not None:
        missing = []
        for name in OBSERVED:
            module = sys.modules.get(name)
            if module is not None:
                found.library_imported(module)
            else:
                missing.append(name)
        after_import(dict.fromkeys(missing, library_imported))
    return found


def library_imported(module: ModuleType) -> None:
    """The hook after a library's import; raises nothing."""
    found = watch()
    if found is not None:
        found.library_imported(module)


def status_at_exit() -> int:
    """What this process should end with if it would have ended well; asked after all else has ended."""
    found = _of_process[0] if _of_process else None
    return found.exit_status() if found is not None else 0


def _begin(environment: Mapping[str, str]) -> Watch | None:
    try:
        settings = load_settings(environment)
        if not settings.observe:
            return None
        made = Watch(settings, environment)
    except Exception as error:
        _say_off("every compiler", error)
        return None
    made.close_with_worker()
    os.register_at_fork(after_in_child=made.forget_parent)
    atexit.register(made.close)
    return made


def _directory(settings: Settings, environment: Mapping[str, str]) -> Any:
    try:
        return log_directory(settings.log_dir, environment)
    except LogUnusable as error:
        log.warning("prefetchd: %s. What this engine compiles is not kept for its next start", error)
        return None


def _adaptor(module: str, name: str) -> Any:
    return getattr(import_module(module), name)()


def _say_off(what: str, error: Exception) -> None:
    log.warning(
        "prefetchd: the compiles of %s are not observed in process %d: %s: %s",
        what,
        os.getpid(),
        type(error).__name__,
        error,
    )
