"""One Triton look-up after another, put together from what several hooks know of it.

The jit hook knows the specialization, the computing of the key its ingredients, the opening of the cache
whether it is a hit, the listener the library's times. They come in this order, all in the compiling thread
but the first, which may be another one. This is where they meet: each method takes what one hook is told,
none raises, and the observer hears of a look-up once.

The subtle rule: any of them may never come. A look-up of which the listener has not told is over when the jit
hook's second half or the compile itself says so; one that was compiled without the jit hook is reported
without what rebuilds it; one that failed and told nobody ends when the thread begins the next.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from prefetchd.compilers.triton_cache import key_of
from prefetchd.compilers.triton_capture import Variant, jit_function
from prefetchd.compilers.triton_cost import predicted_seconds
from prefetchd.compilers.triton_keys import key_parts
from prefetchd.compilers.triton_records import named_parts, recorded
from prefetchd.compilers.triton_winners import heard
from prefetchd.config import NULL_VARIABLE
from prefetchd.guard import guarded

if TYPE_CHECKING:
    from prefetchd.observer import Observer
    from prefetchd.winners import Winner

NAME = "triton"
# Look-ups that have begun and were never answered: cancelled, or begun in a thread that died.
MAX_ASKED = 1024
# Compiles between two benchmarks; a tuner with more candidates than this would take an hour.
MAX_COMPILES = 4096


class Description(NamedTuple):
    """What a record says of a variant beside its key."""

    rebuild: dict[str, Any] | None = None
    parts: Mapping[str, str] = {}


UNKNOWN = Description()
NO_WINNER: Winner | None = None


class _LookUp:
    """One run of the library's compile, from the moment its key is computed."""

    def __init__(self, source: Any, *ingredients: Any) -> None:
        self.source = source
        # Backend, options and environment, as the library puts them into the key.
        self.ingredients = ingredients
        self.key = ""
        self.token = 0
        self.begun = 0.0


class _Here(threading.local):
    """What this thread is in the middle of."""

    def __init__(self) -> None:
        self.look_up: _LookUp | None = None
        self.load_begun = 0.0
        # When each compile ended and what it took, since the last benchmark.
        self.compiles: deque[tuple[float, float]] = deque(maxlen=MAX_COMPILES)


class LookUps:
    """See the module. `active` is cleared when the hooks are taken away; then nothing is reported."""

    def __init__(self, observer: Observer) -> None:
        self.guard = observer.guard
        self.active = True
        self._observer = observer
        # What the jit hook was told, by the identity of the signature that the library passes on unchanged.
        self._asked: OrderedDict[int, tuple[Any, Mapping[str, Any]]] = OrderedDict()
        self._here = _Here()

    def forget_parent(self) -> None:
        """In a forked child: every look-up in progress is the parent's."""
        self._asked, self._here = OrderedDict(), _Here()

    @guarded(None)
    def ask(self, known: Mapping[str, Any]) -> None:
        """The jit hook, before a variant is looked for."""
        if self.active:
            compile = known["compile"]
            self._asked[id(compile["signature"])] = (known["fn"].jit_function, compile)
            if len(self._asked) > MAX_ASKED:
                self._asked.popitem(last=False)

    @guarded(None)
    def begins(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Its key is about to be computed, from these."""
        left = self._here.look_up
        self._here.look_up = None
        if left is not None and left.token:
            # Compiled by `triton.compile` itself, which tells nobody that it has failed.
            self._end(left, ok=False)
        if self.active:
            # By position or by name, as the version has it; in this order.
            look_up = self._here.look_up = _LookUp(*args, *named.values())
            # Asked by the library at once, and by us if it compiles: computed once.
            look_up.source.hash = cache(look_up.source.hash)

    @guarded(None)
    def opened(self, manager: Any, digest: str) -> None:
        """The library holds what reads the cache under its key."""
        look_up = self._here.look_up
        if not self.active or look_up is None or look_up.key:
            return
        look_up.key = key_of(digest)
        get_group = manager.get_group

        def tell(filename: str) -> Any:
            group = get_group(filename)
            self._looked_up(look_up, group, filename)
            return group

        # On this object alone, which the library makes anew for each look-up.
        manager.get_group = tell

    @guarded(None)
    def _looked_up(self, look_up: _LookUp, group: Any, filename: str) -> None:
        from triton import knobs

        if look_up.begun or (group and filename in group and not knobs.compilation.always_compile):
            return
        look_up.begun = time.perf_counter()
        look_up.token = self._observer.started(NAME, key=look_up.key)

    @guarded(None)
    def told(self, known: Mapping[str, Any]) -> None:
        """The listener, after a compile or a hit."""
        if not self.active:
            return
        look_up = self._here.look_up
        if look_up is None or look_up.source is not known["src"]:
            look_up = _LookUp(known["src"])
        look_up.key = look_up.key or key_of(known["metadata"]["hash"])
        if known.get("cache_hit"):
            self._forget(look_up)
            self._observer.hit(NAME, look_up.key)
            return
        look_up.token = look_up.token or self._observer.started(NAME, key=look_up.key)
        times = known.get("times")
        self._end(look_up, seconds=None if times is None else times.total / 1e6)

    @guarded(None)
    def answered(self, known: Mapping[str, Any]) -> None:
        """After a compile or a hit: what the listener has not told, because somebody has replaced it."""
        self.over(known["compile"]["signature"], failed=False)

    @guarded(None)
    def over(self, signature: Any, *, failed: bool, cancelled: bool = False) -> None:
        """The library's own function for a variant returns, or raises."""
        look_up = self._here.look_up
        if look_up is not None and getattr(look_up.source, "signature", None) is signature:
            if look_up.token:
                self._end(look_up, ok=not failed)
            elif look_up.key and not failed and self.active:
                self._forget(look_up)
                self._observer.hit(NAME, look_up.key)
        if failed or cancelled:
            self._asked.pop(id(signature), None)

    def _end(self, look_up: _LookUp, *, ok: bool = True, seconds: float | None = None) -> None:
        now = time.perf_counter()
        if seconds is None:
            seconds = now - look_up.begun if look_up.begun else 0.0
        token, look_up.token = look_up.token, 0
        described = self._describe(look_up)
        self._forget(look_up)
        self._here.compiles.append((now, seconds))
        self._observer.ended(
            token,
            seconds=seconds,
            ok=ok,
            key=look_up.key,
            rebuild=described.rebuild,
            parts=described.parts,
        )

    def _forget(self, look_up: _LookUp) -> None:
        self._asked.pop(id(getattr(look_up.source, "signature", None)), None)
        if self._here.look_up is look_up:
            self._here.look_up = None

    @guarded(UNKNOWN)
    def _describe(self, look_up: _LookUp) -> Description:
        """Nothing of what no kernel of a module asked for, or whose hook is somebody else's by now."""
        asked = self._asked.get(id(getattr(look_up.source, "signature", None)))
        if asked is None or len(look_up.ingredients) < 3:
            return UNKNOWN
        function, compile = asked
        parts = key_parts(look_up.source, *look_up.ingredients[:3])
        variant = Variant(
            module=function.fn.__module__,
            name=function.fn.__qualname__,
            specialization=compile["specialization_data"],
            seconds=predicted_seconds(function.src, int(parts.options["num_warps"])),
            parts=parts,
        )
        return Description(recorded(variant), named_parts(variant, look_up.source))

    @guarded(None)
    def load_begins(self, *_: Any, **__: Any) -> None:
        """A module is about to be loaded."""
        self._here.load_begun = time.perf_counter()

    @guarded(None)
    def loaded(self, *args: Any, **known: Any) -> None:
        """It is loaded: module, function, name, files and digest, by position so far."""
        begun, self._here.load_begun = self._here.load_begun, 0.0
        if self.active and begun:
            digest = known["hash"] if "hash" in known else args[4]
            self._observer.loaded(NAME, key_of(digest), time.perf_counter() - begun)

    @guarded(None)
    def tuned_by(self, tuner: Any, key: Any) -> None:
        """A tuner has measured, in a version that tells nobody."""
        self.tuned(
            {
                "fn": jit_function(tuner),
                "key": key,
                "best_config": tuner.cache[key],
                "configs_timings": tuner.configs_timings,
                "duration": tuner.bench_time,
            }
        )

    @guarded(None)
    def tuned(self, known: Mapping[str, Any]) -> None:
        """The listener of tuners; a result from a file is no benchmark."""
        if not self.active or known.get("cache_hit"):
            return
        function = known["fn"].fn
        seconds = self._without_compiles(known.get("duration") or 0.0)
        self._observer.benchmarked(
            NAME, f"{function.__module__}.{function.__qualname__}", seconds, self._winner(known)
        )

    def _without_compiles(self, duration: float) -> float:
        """A tuner compiles its candidates while it measures them; those were told already."""
        begun = time.perf_counter() - duration
        compiled = sum(seconds for ended, seconds in self._here.compiles if ended >= begun)
        self._here.compiles.clear()
        return max(duration - compiled, 0.0)

    @guarded(NO_WINNER)
    def _winner(self, known: Mapping[str, Any]) -> Winner | None:
        """What is measured on the null device is made up, and no file may hold it."""
        return None if os.environ.get(NULL_VARIABLE) == "1" else heard(known)

    def enforce(self) -> None:
        """In fail-fast mode this raises into the engine, as was asked for."""
        if self.active:
            self._observer.enforce()
