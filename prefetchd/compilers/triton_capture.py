"""Listening in while Triton looks a kernel up: which variant, under which key, and what happens then.

Inside `intercept` every look-up of the library goes its own way up to the point where it would open the cache
directory of the key it has just computed. There the caller is asked, with the complete key and what is needed
to rebuild the variant elsewhere. So the key is the library's own to the last byte, in every version, and
nothing is compiled unless the caller lets it. No kernel is launched or kept in memory inside, and everything
is as before when the block ends, hooks of others included: they are called on the way.

The subtle rule: a timing taken without a device is a lie, and Triton persists timings. So an autotuner inside
runs its own code up to its look-up of persisted results, visits the candidates `Winners` names instead of
benchmarking, and forgets its choice; no result file is read or written, whatever `cache_results` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Protocol
from unittest import mock

import msgspec

from prefetchd.compilers.triton_cache import key_of
from prefetchd.compilers.triton_cost import predicted_seconds
from prefetchd.compilers.triton_keys import KeyParts, key_parts

# Records of variants are read from files that anyone may have written.
Name = Annotated[str, msgspec.Meta(max_length=512)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """What rebuilds one variant: the kernel's function, its specialization, and what its key is made of."""

    module: Name
    name: Name
    # The library's own JSON, as `JITFunction.preload` takes it.
    specialization: str
    # Expected CPU seconds of its compile.
    seconds: Seconds
    parts: KeyParts


class Tuner(msgspec.Struct, frozen=True):
    """Which autotuner asks: the kernel's module and name, the digest of its source, and the tuner itself."""

    module: str
    name: str
    source: str
    # Whether the kernel's author asks for results to be kept, whatever this process does.
    kept: bool
    library_object: Any


class Winners(Protocol):
    """Which candidates of an autotuner an engine will use."""

    def choose(self, tuner: Tuner, key: tuple[Any, ...], candidates: Sequence[Any]) -> Sequence[Any]:
        """The configurations to visit, at least one of `candidates` (already pruned, in their order).

        `key` is the library's tuning key. Nothing known means all of them.
        """
        ...


class Unknown:
    """No winner is known: the engine will benchmark every candidate, so every one is needed."""

    def choose(self, tuner: Tuner, key: tuple[Any, ...], candidates: Sequence[Any]) -> Sequence[Any]:
        """See `Winners`."""
        return candidates


class Miss(Exception):
    """Raised by a `meet` that forbids compiling; a tuner goes on to its next candidate, then passes it on."""


# Gets the key's directory name, the variant and the library's own object for it. None ends the look-up there;
# a cache manager of the library lets it go on with that; an exception passes through the library's call.
Meet = Callable[[str, Variant, Any], Any]


class _Stopped(Exception):
    """Ends a look-up inside the library; never leaves `_do_compile`."""


@contextlib.contextmanager
def intercept(meet: Meet, winners: Winners | None = None) -> Iterator[None]:
    """See the module. One at a time in a process, and the process uses the library from one thread."""
    from triton import knobs
    from triton.compiler import compiler
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    listener = _Listener(meet)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.object(compiler, "get_cache_key", listener.key_computer(compiler.get_cache_key)))
        patch(mock.patch.object(compiler, "get_cache_manager", listener.open_cache))
        patch(mock.patch.object(JITFunction, "_do_compile", listener.compiler(JITFunction._do_compile)))
        patch(mock.patch.object(Autotuner, "run", _visitor(Autotuner.run, winners or Unknown())))
        patch(_setting(knobs.runtime, "jit_cache_hook", listener.hook(knobs.runtime.jit_cache_hook)))
        if getattr(knobs, "autotuning", None) is not None and hasattr(knobs.autotuning, "listener"):
            patch(_setting(knobs.autotuning, "listener", None))
        yield


class _Listener:
    """Gathers what three places of one look-up know, which the library passes through in this order."""

    def __init__(self, meet: Meet) -> None:
        self._meet = meet
        self._specialization = ""
        self._function: Any = None
        self._source: Any = None
        self._parts: KeyParts

    def hook(self, previous: Callable[..., bool | None] | None) -> Callable[..., bool | None]:
        def jit_cache_hook(**known: Any) -> bool | None:
            self._function = known["fn"].jit_function
            self._specialization = known["compile"]["specialization_data"]
            # True means that the hook's owner cancels the compile, here as in an engine.
            return previous(**known) if previous is not None else None

        return jit_cache_hook

    def key_computer(self, original: Callable[..., str]) -> Callable[..., str]:
        def get_cache_key(source: Any, backend: Any, options: Any, env_vars: dict[str, str]) -> str:
            self._source = source
            self._parts = key_parts(source, backend, options, env_vars)
            return original(source, backend, options, env_vars)

        return get_cache_key

    def open_cache(self, digest: str) -> Any:
        function = self._function.fn
        manager = self._meet(
            key_of(digest),
            Variant(
                module=function.__module__,
                name=function.__qualname__,
                specialization=self._specialization,
                seconds=predicted_seconds(self._function.src, int(self._parts.options["num_warps"])),
                parts=self._parts,
            ),
            self._source,
        )
        if manager is None:
            raise _Stopped
        return manager

    def compiler(self, original: Callable[..., Any]) -> Callable[..., None]:
        def _do_compile(
            function: Any, key: Any, signature: Any, device: Any, *rest: Any, **named: Any
        ) -> None:
            with contextlib.suppress(_Stopped):
                original(function, key, signature, device, *rest, **named)
                # In memory it would be launched by the next call and hidden from the next look-up.
                function.device_caches[device][0].pop(key, None)

        return _do_compile


def _visitor(original: Callable[..., Any], winners: Winners) -> Callable[..., Any]:
    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        def visit(key: tuple[Any, ...], candidates: Sequence[Any], _benchmark: Callable[[], None]) -> bool:
            chosen = winners.choose(_identity(tuner, bool(before.get("cache_results"))), key, candidates)
            missed: Miss | None = None
            for config in chosen:
                try:
                    tuner._bench(*args, config=config, **kwargs)
                except Miss as miss:
                    missed = missed or miss
            if missed is not None:
                raise missed
            tuner.cache[key] = chosen[0]
            return True

        chosen_before = set(tuner.cache)
        # On the instance, where they hide the class's; `do_bench` is a cached property of the class.
        instead = {"check_disk_cache": visit, "cache_results": True, "do_bench": _call_once}
        before = {name: vars(tuner)[name] for name in instead if name in vars(tuner)}
        vars(tuner).update(instead)
        try:
            return original(tuner, *args, **kwargs)
        finally:
            for name in instead:
                del vars(tuner)[name]
            vars(tuner).update(before)
            for key in set(tuner.cache) - chosen_before:
                del tuner.cache[key]

    return run


def _call_once(kernel_call: Callable[[], Any], quantiles: Any = None) -> list[float]:
    """In place of a benchmark. Its numbers go nowhere: the caller of `_bench` drops them."""
    kernel_call()
    return [0.0, 0.0, 0.0]


def _identity(tuner: Any, kept: bool) -> Tuner:
    function = jit_function(tuner)
    return Tuner(function.fn.__module__, function.fn.__qualname__, function.cache_key, kept, tuner)


def jit_function(kernel: Any) -> Any:
    """The `JITFunction` under whatever decorators a module's attribute wears."""
    from triton.runtime.jit import JITFunction

    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    return kernel


@contextlib.contextmanager
def _setting(knobs: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(knobs, name)
    setattr(knobs, name, value)
    try:
        yield
    finally:
        setattr(knobs, name, before)
