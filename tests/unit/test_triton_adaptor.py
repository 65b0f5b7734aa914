"""Triton's adaptor on libraries that have less than the installed one: nothing breaks, all is undone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prefetchd.compilers.triton_cache import key_of
from prefetchd.guard import Guard
from prefetchd.observing.triton import TritonAdaptor

DIGEST = "ab" * 32
KEY = key_of(DIGEST)


class Told:
    """An observer that keeps what it is told, without times; `failing`, it raises instead."""

    def __init__(self, *, failing: bool = False) -> None:
        self.guard = Guard()
        self.events: list[tuple[Any, ...]] = []
        self._failing = failing

    def _note(self, *event: Any) -> None:
        if self._failing:
            raise OSError("an observer that fails")
        self.events.append(event)

    def started(self, compiler: str, *, key: str = "", digest: str = "", site: str = "") -> int:
        self._note("started", key)
        return len(self.events)

    def ended(self, token: int, *, ok: bool = True, key: str = "", **_: Any) -> None:
        self._note("ended", key, ok)

    def hit(self, compiler: str, key: str) -> None:
        self._note("hit", key)

    def loaded(self, compiler: str, key: str, seconds: float) -> None:
        self._note("loaded", key)

    def benchmarked(self, compiler: str, name: str, seconds: float, winner: object = None) -> None:
        self._note("benchmarked", name, winner)

    def enforce(self) -> None:
        if self._failing:
            raise RuntimeError("forbidden")


class Chain:
    """As the library has it for the loads of modules."""

    def __init__(self) -> None:
        self.calls: list[Callable[..., None]] = []

    def add(self, hook: Callable[..., None]) -> None:
        self.calls.append(hook)

    def remove(self, hook: Callable[..., None]) -> None:
        self.calls.remove(hook)

    def __call__(self, *args: Any) -> None:
        for call in self.calls:
            call(*args)


def library(**knobs: Any) -> ModuleType:
    """A Triton with these knobs and nothing inside that we know."""
    module = ModuleType("triton")
    vars(module).update(__version__="3.4.0", **knobs)
    return module


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], Any]:
    """Makes a library the installed one; what lies inside it cannot be imported."""

    def make(module: ModuleType) -> Any:
        for name in list(sys.modules):
            if name == "triton" or name.startswith("triton."):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "triton", module)
        if hasattr(module, "knobs"):
            monkeypatch.setitem(sys.modules, "triton.knobs", module.knobs)
        return getattr(module, "knobs", None)

    return make


def few_knobs(**runtime: Any) -> Any:
    return SimpleNamespace(
        runtime=SimpleNamespace(jit_cache_hook=None, **runtime), compilation=SimpleNamespace(listener=None)
    )


def compile_once(knobs: Any, *, cache_hit: bool = False) -> Any:
    """What the library does with its hooks at a variant it has not in memory."""
    signature = {"x": "*fp32"}
    answer = None
    if knobs.runtime.jit_cache_hook:
        answer = knobs.runtime.jit_cache_hook(
            fn=SimpleNamespace(jit_function=None), compile={"signature": signature}, news="of a later version"
        )
    if knobs.compilation.listener:
        knobs.compilation.listener(
            src=SimpleNamespace(signature=signature), metadata={"hash": DIGEST}, cache_hit=cache_hit, news=1
        )
    return answer


def load_once(knobs: Any) -> None:
    knobs.runtime.kernel_load_start_hook(None, None, "kernel", {}, DIGEST)
    knobs.runtime.kernel_load_end_hook(1, 2, "kernel", {}, DIGEST)


def snapshot(knobs: Any) -> list[dict[str, Any]]:
    return [dict(vars(part)) for part in vars(knobs).values()]


@pytest.mark.parametrize(
    "knobs", [{}, {"knobs": SimpleNamespace()}, {"knobs": SimpleNamespace(runtime=SimpleNamespace())}]
)
def test_library_without_hooks_is_refused_with_its_version_and_left_alone(
    put: Callable[[ModuleType], Any], knobs: dict[str, Any]
) -> None:
    put(library(**knobs))
    before = repr(knobs)

    with pytest.raises(RuntimeError, match=r"Triton 3\.4\.0 has no hooks .* 3\.6 and later have them"):
        TritonAdaptor().install(Told())

    assert repr(knobs) == before


def test_without_triton_there_is_nothing_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)

    with pytest.raises(ImportError):
        TritonAdaptor().install(Told())


def test_importing_it_imports_neither_torch_nor_triton() -> None:
    heavy = {"torch", "triton", "zmq"}
    code = f"import sys, prefetchd.observing.triton; sys.exit(bool({heavy} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_two_hooks_are_enough_to_tell_a_compile_from_a_hit(put: Callable[[ModuleType], Any]) -> None:
    knobs = put(library(knobs=few_knobs()))
    before = snapshot(knobs)
    told, adaptor = Told(), TritonAdaptor()

    adaptor.install(told)
    compile_once(knobs)
    compile_once(knobs, cache_hit=True)
    adaptor.remove()
    adaptor.remove()
    compile_once(knobs)

    assert told.events == [("started", KEY), ("ended", KEY, True), ("hit", KEY)]
    assert told.guard.errors == 0
    assert snapshot(knobs) == before


def test_installed_twice_it_reports_once(put: Callable[[ModuleType], Any]) -> None:
    knobs = put(library(knobs=few_knobs()))
    told, adaptor = Told(), TritonAdaptor()

    adaptor.install(Told())
    adaptor.install(told)
    compile_once(knobs)

    assert told.events == [("started", KEY), ("ended", KEY, True)]


def test_loads_are_told_by_the_librarys_chain(put: Callable[[ModuleType], Any]) -> None:
    start, end = Chain(), Chain()
    knobs = put(library(knobs=few_knobs(kernel_load_start_hook=start, kernel_load_end_hook=end)))
    told, adaptor = Told(), TritonAdaptor()

    adaptor.install(told)
    load_once(knobs)
    adaptor.remove()

    assert told.events == [("loaded", KEY)]
    assert start.calls == end.calls == []


def test_loads_are_told_where_a_plain_hook_has_taken_the_chains_place(
    put: Callable[[ModuleType], Any],
) -> None:
    others: list[str] = []

    def end(*_: Any) -> None:
        others.append("end")

    knobs = put(library(knobs=few_knobs(kernel_load_start_hook=None, kernel_load_end_hook=end)))
    told, adaptor = Told(), TritonAdaptor()

    adaptor.install(told)
    load_once(knobs)
    adaptor.remove()

    assert (told.events, others) == ([("loaded", KEY)], ["end"])
    assert (knobs.runtime.kernel_load_start_hook, knobs.runtime.kernel_load_end_hook) == (None, end)


def test_hook_before_ours_keeps_its_answer_and_its_exception(put: Callable[[ModuleType], Any]) -> None:
    knobs = put(library(knobs=few_knobs()))
    knobs.runtime.jit_cache_hook = lambda **_: True

    def listener(**_: Any) -> None:
        raise KeyError("theirs")

    knobs.compilation.listener = listener
    told = Told()
    TritonAdaptor().install(told)

    with pytest.raises(KeyError, match="theirs"):
        compile_once(knobs)

    knobs.compilation.listener = None
    assert compile_once(knobs) is True
    assert told.events == [("started", KEY), ("ended", KEY, True)]


def test_hook_set_after_ours_stays_when_ours_is_removed(put: Callable[[ModuleType], Any]) -> None:
    knobs = put(library(knobs=few_knobs()))
    told, adaptor = Told(), TritonAdaptor()
    adaptor.install(told)
    ours, heard = knobs.compilation.listener, []

    def theirs(**known: Any) -> None:
        heard.append(known["cache_hit"])
        ours(**known)

    knobs.compilation.listener = theirs
    adaptor.remove()
    compile_once(knobs)

    assert knobs.compilation.listener is theirs
    assert (heard, told.events) == ([False], [])
    assert knobs.runtime.jit_cache_hook is None


def test_observer_that_fails_costs_the_engine_nothing(put: Callable[[ModuleType], Any]) -> None:
    knobs = put(library(knobs=few_knobs(kernel_load_start_hook=Chain(), kernel_load_end_hook=Chain())))
    told = Told(failing=True)
    told.enforce = lambda: None  # type: ignore[method-assign]
    TritonAdaptor().install(told)

    compile_once(knobs)
    load_once(knobs)

    assert told.guard.errors == 2


def test_only_what_fail_fast_asks_for_is_raised(put: Callable[[ModuleType], Any]) -> None:
    knobs = put(library(knobs=few_knobs()))
    TritonAdaptor().install(Told(failing=True))

    with pytest.raises(RuntimeError, match="forbidden"):
        compile_once(knobs)


def test_tuner_that_has_a_listener_tells_benchmarks_and_no_result_of_a_file(
    put: Callable[[ModuleType], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The device is asked by torch, which takes seconds to import.
    monkeypatch.setitem(sys.modules, "torch", None)
    knobs = few_knobs()
    knobs.autotuning = SimpleNamespace(listener=None)
    put(library(knobs=knobs))
    told = Told()
    TritonAdaptor().install(told)
    function = SimpleNamespace(fn=compile_once)

    for hit in (True, False):
        # What a winner needs is missing: the benchmark is told all the same.
        knobs.autotuning.listener(fn=function, key=(1,), duration=None if hit else 0.5, cache_hit=hit)

    assert told.events == [("benchmarked", f"{__name__}.compile_once", None)]
    assert told.guard.errors == 1
