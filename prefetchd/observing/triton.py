"""What Triton compiles in this engine: real compiles, disk hits, benchmarks and module loads, told apart.

Everything hangs on the library's own hooks and on functions that it calls only for a variant it does not have
in memory; nothing here runs at a launch. What the hooks are told meets in `triton_lookups.py`; here they are
put in place and taken away. Any of them may be missing, in another version or because somebody has put a hook
of his own in its place: then an event comes later or says less, and that is all.

The subtle rule: what was there before ours is called after ours, with what it answers and what it raises; and
what was put there after ours is not taken away. A hook that cannot be removed because another calls it by now
goes on as a mere passage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from prefetchd.observing.triton_lookups import NAME, LookUps

if TYPE_CHECKING:
    from prefetchd.observer import Observer

Make = Callable[[Any], Callable[..., Any]]


class TritonAdaptor:
    """Observes the installed Triton for one observer at a time."""

    name = NAME

    def __init__(self) -> None:
        self._hooks: _Hooks | None = None

    def install(self, observer: Observer) -> None:
        """Imports Triton. Raises with a text for people where there is none or it has no such hooks."""
        self.remove()
        hooks = _Hooks(observer)
        try:
            hooks.install()
        except BaseException:
            hooks.remove()
            raise
        self._hooks = hooks

    def remove(self) -> None:
        """Restores what is still ours; the rest becomes a passage."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def forget_parent(self) -> None:
        """In a forked child: what the parent's threads were in the middle of is not ours to end."""
        if self._hooks is not None:
            self._hooks.forget_parent()


class _Hooks:
    """One installation: what it has put where, and how to take it back."""

    def __init__(self, observer: Observer) -> None:
        self._look_ups = LookUps(observer)
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Raises where the library has not even the two hooks that tell a compile from a hit."""
        import triton

        knobs = getattr(triton, "knobs", None)
        runtime, compilation = getattr(knobs, "runtime", None), getattr(knobs, "compilation", None)
        if not hasattr(runtime, "jit_cache_hook") or not hasattr(compilation, "listener"):
            raise RuntimeError(
                f"Triton {getattr(triton, '__version__', '?')} has no hooks by which its compiles are seen: "
                "they are not observed; 3.6 and later have them"
            )
        self._put(compilation, "listener", self._listener)
        self._put(runtime, "jit_cache_hook", self._jit_hook(self._look_ups.ask))
        self._put_load_hook(runtime, "kernel_load_start_hook", self._look_ups.load_begins)
        self._put_load_hook(runtime, "kernel_load_end_hook", self._look_ups.loaded)
        self._put_inside("triton.compiler.compiler", "", "get_cache_key", self._key_computer)
        self._put_inside("triton.compiler.compiler", "", "get_cache_manager", self._cache_opener)
        if not self._put_inside("triton.runtime.jit", "JITFunction", "_do_compile", self._compile):
            # Says less (nothing of a failure), and costs the library another specialization to write down.
            self._put(runtime, "jit_post_compile_hook", self._jit_hook(self._look_ups.answered))
        self._put_inside("triton.runtime.jit", "", "serialize_specialization_data", _serializer)
        autotuning = getattr(knobs, "autotuning", None)
        if hasattr(autotuning, "listener"):
            self._put(autotuning, "listener", self._tuning_listener)
        else:
            self._put_inside("triton.runtime.autotuner", "Autotuner", "check_disk_cache", self._tuner_look_up)

    def remove(self) -> None:
        """See `TritonAdaptor`."""
        self._look_ups.active = False
        while self._undo:
            self._undo.pop()()

    def forget_parent(self) -> None:
        """See `TritonAdaptor`."""
        self._look_ups.forget_parent()

    def _put_inside(self, module: str, class_: str, name: str, make: Make) -> bool:
        """The same in a module that is the library's own affair: it may be gone in the next version."""
        with contextlib.suppress(ImportError, AttributeError):
            found = import_module(module)
            return self._put(getattr(found, class_) if class_ else found, name, make)
        return False

    def _put(self, owner: Any, name: str, make: Make) -> bool:
        """Replaces an attribute by what `make` makes of the one before, if there is such an attribute."""
        if not hasattr(owner, name):
            return False
        previous = getattr(owner, name)
        ours = make(previous)
        setattr(owner, name, ours)

        def undo() -> None:
            if getattr(owner, name, None) is ours:
                setattr(owner, name, previous)

        self._undo.append(undo)
        return True

    def _put_load_hook(self, runtime: Any, name: str, hook: Callable[..., None]) -> None:
        """Into the library's chain where it has one; around what lies there otherwise."""
        chain: Any = getattr(runtime, name, None)
        if hasattr(chain, "add") and hasattr(chain, "remove"):
            chain.add(hook)
            self._undo.append(lambda: chain.remove(hook))
        else:
            self._put(runtime, name, lambda previous: _before(hook, previous))

    # What is put in place. Each calls the one before, whatever happens in ours.

    def _jit_hook(self, ours: Callable[[Mapping[str, Any]], None]) -> Make:
        def make(previous: Any) -> Callable[..., Any]:
            def hook(*args: Any, **known: Any) -> Any:
                ours(known)
                # True means that its owner cancels the compile.
                return previous(*args, **known) if previous else None

            return hook

        return make

    def _listener(self, previous: Any) -> Callable[..., Any]:
        def listener(*args: Any, **known: Any) -> Any:
            self._look_ups.told(known)
            answer = previous(*args, **known) if previous else None
            self._look_ups.enforce()
            return answer

        return listener

    def _key_computer(self, previous: Callable[..., str]) -> Callable[..., str]:
        def get_cache_key(*args: Any, **named: Any) -> str:
            self._look_ups.begins(args, named)
            return previous(*args, **named)

        return get_cache_key

    def _cache_opener(self, previous: Callable[..., Any]) -> Callable[..., Any]:
        def get_cache_manager(*args: Any, **named: Any) -> Any:
            manager = previous(*args, **named)
            self._look_ups.opened(manager, *args)
            return manager

        return get_cache_manager

    def _compile(self, previous: Callable[..., Any]) -> Callable[..., Any]:
        def _do_compile(function: Any, key: Any, signature: Any, *rest: Any, **named: Any) -> Any:
            try:
                kernel = previous(function, key, signature, *rest, **named)
            except BaseException:
                self._look_ups.over(signature, failed=True)
                self._look_ups.enforce()
                raise
            self._look_ups.over(signature, failed=False, cancelled=kernel is None)
            self._look_ups.enforce()
            return kernel

        return _do_compile

    def _tuning_listener(self, previous: Any) -> Callable[..., Any]:
        def listener(*args: Any, **known: Any) -> Any:
            self._look_ups.tuned(known)
            return previous(*args, **known) if previous else None

        return listener

    def _tuner_look_up(self, previous: Callable[..., bool]) -> Callable[..., bool]:
        """In versions without a listener: called once for a tuning key whose result is to be kept."""

        def check_disk_cache(tuner: Any, key: Any, *rest: Any, **named: Any) -> bool:
            found = previous(tuner, key, *rest, **named)
            if not found:
                self._look_ups.tuned_by(tuner, key)
            return found

        return check_disk_cache


def _serializer(previous: Callable[..., str]) -> Callable[..., str]:
    """The library writes a specialization down where a hook is set, and fails on some: not because of us."""

    def serialize_specialization_data(*args: Any, **named: Any) -> str:
        try:
            return previous(*args, **named)
        except TypeError:
            return ""

    return serialize_specialization_data


def _before(hook: Callable[..., None], previous: Any) -> Callable[..., Any]:
    def both(*args: Any, **known: Any) -> Any:
        hook(*args, **known)
        return previous(*args, **known) if previous else None

    return both
