"""The places at which a CuTe compile is met: a library's dict, its cached function, the DSL's compiler.

Nothing here knows what is to happen: a `Mode` does, one for the engine (load, else compile), others for
the helper (record, refuse, compile one). The subtle rules: a dict's key is bound to a compiled function when
it is *assigned*, by the identity of the value, because between the look-up and the compile a library may do
anything; a cached function's arguments are its compiles' key as long as it runs, by their order; a compile
that neither names is named by its caller and by what is compiled (`callers`). The class of `cute.compile` is
patched and never that object, of which libraries hold and make others.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from prefetchd import post_import
from prefetchd.cute.callers import caller_of, node_of
from prefetchd.cute.calls import Call
from prefetchd.cute.canonical import Node, Unkeyable, encode, text_of
from prefetchd.cute.homes import Site, calling

log = logging.getLogger("prefetchd")

COMPILER_MODULE = "cutlass.base_dsl.compiler"


class Place(NamedTuple):
    """Which compile: a site, its key in canonical form, and the compile's number within it."""

    site: Site
    node: Node
    number: int = 0
    # Of a site of kind `call`: how the compile is reached again.
    call: Call | None = None

    @property
    def key(self) -> str:
        """What the store is asked with, beside the namespace."""
        return f"{text_of(self.node)}#{self.number}"


class Mode(Protocol):
    """What happens at each of the three places. Nothing of it may raise but what is meant for the library."""

    def look_up(self, place: Place) -> Any | None:
        """A dict lacks this key: its value, or None when there is none."""
        ...

    def assigned(self, place: Place, value: Any) -> None:
        """A dict was given this value under a key."""
        ...

    def compile(self, place: Place | None, subject: Any, run: Callable[[], Any]) -> Any:
        """The compiler was called; `run` is what it would do. None: no key is known (yet)."""
        ...

    def unkeyable(self, site: Site, reason: str) -> None:
        """A key of this site has no canonical form."""
        ...

    def installed(self, site: Site) -> None:
        """The site's module is there and patched; nothing was asked yet."""
        ...


class StoreDict(dict[Any, Any]):
    """A library's kernel cache that asks the mode for what it lacks, and tells it what it is given.

    A key that it holds costs what it costs in a plain dict; one that is missing is asked for once.
    """

    def __init__(self, site: Site, content: dict[Any, Any], mode: Mode) -> None:
        super().__init__(content)
        self._site = site
        self._mode = mode
        self._asked: set[Any] = set()

    def __missing__(self, key: Any) -> Any:
        if self._fetch(key):
            return dict.__getitem__(self, key)
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._fetch(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As `dict.get`."""
        return dict.__getitem__(self, key) if key in self else default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As `dict.setdefault`."""
        if key not in self:
            self[key] = default
        return dict.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        dict.__setitem__(self, key, value)
        place = self._place(key)
        if place is not None:
            self._mode.assigned(place, value)

    def __delitem__(self, key: Any) -> None:
        dict.__delitem__(self, key)
        self._asked.discard(key)

    def pop(self, key: Any, *default: Any) -> Any:
        """As `dict.pop`; the store may be asked for the key again."""
        self._asked.discard(key)
        return dict.pop(self, key, *default)

    def clear(self) -> None:
        """As `dict.clear`; the store may be asked for every key again."""
        dict.clear(self)
        self._asked.clear()

    def _fetch(self, key: Any) -> bool:
        if key in self._asked:
            return False
        # Once: what was not there a moment ago is being compiled now.
        self._asked.add(key)
        place = self._place(key)
        found = self._mode.look_up(place) if place is not None else None
        if found is not None:
            dict.__setitem__(self, key, found)
        return found is not None

    def _place(self, key: Any) -> Place | None:
        try:
            return Place(self._site, encode(key, devices_at=self._site.devices_at))
        except Unkeyable as error:
            self._mode.unkeyable(self._site, str(error))
            return None


class _Scopes(threading.local):
    """The cached functions that run in this thread, innermost last: site, key, and compiles so far.

    A key of None is one without a canonical form.
    """

    def __init__(self) -> None:
        self.stack: list[list[Any]] = []


class Hooks:
    """One installation of a mode at all sites, those of modules that are imported later included.

    Functions of `packages` may name a compile that no site names.
    """

    def __init__(self, mode: Mode, places: Iterable[Site], packages: tuple[str, ...] = ()) -> None:
        self._mode = mode
        self._sites = tuple(places)
        self._packages = packages
        self._dict_modules = frozenset(site.module for site in self._sites if site.kind == "dict")
        self._scopes = _Scopes()
        self._undo: list[Callable[[], None]] = []
        self._active = True
        # Of modules that were being imported at `install`.
        self.waiting: list[threading.Thread] = []

    def install(self) -> None:
        """Patches what is imported; the rest is patched right after its import."""
        patches: dict[str, list[Callable[[ModuleType], None]]] = {COMPILER_MODULE: [self._patch_compiler]}
        for site in self._sites:
            patches.setdefault(site.module, []).append(functools.partial(self._patch_site, site))
        later: post_import.Hooks = {}
        for name, each in patches.items():
            module = sys.modules.get(name)
            if module is None:
                later[name] = functools.partial(self._patch, each)
            elif getattr(module.__spec__, "_initializing", False):
                # It has come as far as importing the DSL, by which we are here: its dict is yet to be made.
                self._patch_when_imported(name, each)
            else:
                self._patch(each, module)
        post_import.install(later)

    def remove(self) -> None:
        """Puts everything back; a dict keeps what it holds by then."""
        self._active = False
        while self._undo:
            self._undo.pop()()

    def _patch_when_imported(self, name: str, patches: list[Callable[[ModuleType], None]]) -> None:
        def wait() -> None:
            try:
                # Another thread's import of a module waits until the first has finished it.
                self._patch(patches, import_module(name))
            except Exception as error:
                log.info("prefetchd: %s is left alone: %s", name, error)

        self.waiting.append(threading.Thread(target=wait, name="prefetchd-cute-import", daemon=True))
        self.waiting[-1].start()

    def _patch(self, patches: list[Callable[[ModuleType], None]], module: ModuleType) -> None:
        if self._active:
            for patch in patches:
                patch(module)

    def _patch_site(self, site: Site, module: ModuleType) -> None:
        before = getattr(module, site.attribute, None)
        if site.kind == "dict" and isinstance(before, dict):
            ours: Any = StoreDict(site, before, self._mode)
        elif site.kind == "function" and callable(before):
            ours = self._scoped(site, before)
        else:
            log.info("prefetchd: %s is no %s here and is left alone", site.namespace, site.kind)
            return
        setattr(module, site.attribute, ours)
        self._mode.installed(site)

        def undo() -> None:
            if getattr(module, site.attribute, None) is ours:
                if isinstance(before, dict) and isinstance(ours, StoreDict):
                    before.update(ours)
                setattr(module, site.attribute, before)

        self._undo.append(undo)

    def _scoped(self, site: Site, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            with self._scope(site, signature, args, kwargs):
                return function(*args, **kwargs)

        own: Any = function
        if not hasattr(own, "cache_parameters"):
            return scoped
        # In front of the library's own cache, which then answers for what it had compiled before us: a call
        # that was seen before costs what it costs without us.
        cached: Any = functools.lru_cache(maxsize=own.cache_parameters()["maxsize"])(scoped)
        clear = cached.cache_clear

        def cache_clear() -> None:
            clear()
            own.cache_clear()

        cached.cache_clear = cache_clear
        front: Callable[..., Any] = cached
        return front

    @contextmanager
    def _scope(
        self, site: Site, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        node: Node | None = None
        try:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            node = encode(tuple(bound.arguments.items()))
        except Unkeyable as error:
            self._mode.unkeyable(site, str(error))
        except TypeError:
            # The function itself says better what is wrong with the call.
            node = None
        stack = self._scopes.stack
        stack.append([site, node, 0])
        try:
            yield
        finally:
            stack.pop()

    def _next_place(self) -> Place | None:
        stack = self._scopes.stack
        if not stack or stack[-1][1] is None:
            return None
        site, node, number = stack[-1]
        stack[-1][2] += 1
        return Place(site, node, number)

    def _place_of_call(self, subject: tuple[Any, ...]) -> Place | None:
        """Where no function of ours is running: what the frames say of this compile."""
        if self._scopes.stack or not self._packages:
            return None
        # Ours and the compiler's are passed over.
        caller = caller_of(sys._getframe(1), self._packages)
        if caller is None or caller.call.module in self._dict_modules:
            return None
        site = calling(caller.call.module, caller.call.function)
        try:
            return Place(site, node_of(caller, subject, self._packages), call=caller.call)
        except Unkeyable as error:
            self._mode.unkeyable(site, str(error))
        except Exception as error:
            # An object of a library may do anything when it is looked at.
            self._mode.unkeyable(site, f"{type(error).__name__}: {error}")
        return None

    def _patch_compiler(self, module: ModuleType) -> None:
        owner = module.CompileCallable
        before = owner._compile

        @functools.wraps(before)
        def _compile(compiler: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            place = self._next_place()
            if place is None:
                # Of the compiler itself its options, which `cute.compile[...]` sets.
                place = self._place_of_call((func, args, kwargs, vars(compiler)))
            return self._mode.compile(place, func, lambda: before(compiler, func, *args, **kwargs))

        owner._compile = _compile

        def undo() -> None:
            if owner._compile is _compile:
                owner._compile = before

        self._undo.append(undo)


def unwrapped(value: Any) -> Any:
    """What a compile gave, without the wrapping by which nothing is launched on the null device."""
    return value.inner if type(value).__name__ == "Unlaunched" else value
