"""The call that fills a library's dict: of its own module, or of its package where that module only keeps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefetchd.compilers.base import NotRebuildable
from prefetchd.compilers.cute_dsl_modes import Left, Miss, Recorder, Refuser, StandIn
from prefetchd.compilers.cute_dsl_records import recorded, variant_of
from prefetchd.cute.calls import Call, Plain
from prefetchd.cute.fillers import filling_call, may_fill
from prefetchd.cute.homes import Site
from prefetchd.cute.hooks import Place
from prefetchd.shapelog import Record

PACKAGE = "filled_library"
FILES = {
    "__init__": "",
    "cache": """
kept = {}

def cached_compile(compile_, key, *args, **options):
    if key not in kept:
        kept[key] = compile_()
    return kept[key]
""",
    "kernels": """
if False:
    import cutlass
from .cache import cached_compile

def outer(compile_, size, fast=True):
    return inner(compile_, size, object())

def inner(compile_, size, stream):
    return cached_compile(compile_, size, stream)

def unkeepable(compile_, stream):
    return cached_compile(compile_, 1, stream)
""",
    "own": """
kept = {}

def step(compile_, size):
    return fill(compile_, size)

def fill(compile_, size):
    if size not in kept:
        kept[size] = compile_()
    return kept[size]
""",
    "tools": """
def run(compile_, command):
    from .kernels import unkeepable
    return unkeepable(compile_, object())
""",
}
CACHE = Site("dict", f"{PACKAGE}.cache", "kept", (PACKAGE,))
OWN = Site("dict", f"{PACKAGE}.own", "kept", (PACKAGE,))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / PACKAGE).mkdir()
    for name, text in FILES.items():
        (tmp_path / PACKAGE / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("kernels", "own", "tools"):
        __import__(f"{PACKAGE}.{name}")
    yield sys.modules[PACKAGE]
    for name in [each for each in sys.modules if each.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


class Compile:
    """What a library calls to compile: notes which call would fill the site. Without a form in arguments."""

    def __init__(self, site: Site) -> None:
        self.site, self.calls = site, list[Call | None]()

    def __call__(self) -> str:
        self.calls.append(filling_call(self.site, sys._getframe()))
        return "compiled"


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile_` has a form here, so that the libraries stay small."""
    from prefetchd.cute import calls

    before = calls.encode
    monkeypatch.setattr(calls, "encode", lambda value: ["n"] if callable(value) else before(value))


@pytest.mark.usefixtures("described")
def test_dict_that_a_module_keeps_for_others_is_filled_by_the_outermost_call_that_has_a_form(
    library: Any,
) -> None:
    compile_ = Compile(CACHE)

    library.kernels.outer(compile_, 8)

    (call,) = compile_.calls
    assert call is not None
    assert (call.module, call.function) == (f"{PACKAGE}.kernels", "outer")
    assert {name: value for name, value in call.arguments.items() if name != "compile_"} == {
        "size": Plain(["i", "8"]),
        "fast": Plain(["b", True]),
    }


@pytest.mark.usefixtures("described")
def test_dict_of_a_module_that_fills_it_itself_is_filled_by_its_own_outermost_call(library: Any) -> None:
    compile_ = Compile(OWN)

    library.own.step(compile_, 3)

    (call,) = compile_.calls
    assert call is not None
    assert (call.module, call.function) == (f"{PACKAGE}.own", "step")


@pytest.mark.usefixtures("described")
def test_neither_a_call_without_a_form_nor_a_module_without_the_dsl_is_told(library: Any) -> None:
    compile_ = Compile(CACHE)

    library.tools.run(compile_, "rm")

    assert compile_.calls == [None]


def test_modules_that_may_fill_are_the_dicts_own_and_those_of_its_package_that_use_the_dsl(
    library: Any,
) -> None:
    named = ("cache", "kernels", "own", "tools")

    assert [may_fill(CACHE, f"{PACKAGE}.{name}") for name in named] == [True, True, False, False]
    assert not may_fill(CACHE, "subprocess")


PLACE = Place(CACHE, ["i", "8"])
NAME = "filled_library_cache-" + "a" * 40


@pytest.mark.parametrize("module", [f"{PACKAGE}.kernels", f"{PACKAGE}.cache"])
def test_record_of_a_call_of_the_dicts_package_is_taken(module: str) -> None:
    rebuild = recorded(PLACE, NAME, "sm_90a", Call(module=module, function="outer", arguments={}))
    record = Record(compiler="cute_dsl", key=NAME, fingerprint="f", rebuild=rebuild)

    assert variant_of(record, "sm_90a", {CACHE.namespace: CACHE}).call is not None


@pytest.mark.parametrize("module", ["subprocess", f"{PACKAGE}s.kernels"])
def test_record_of_a_call_of_elsewhere_is_refused(module: str) -> None:
    rebuild = recorded(PLACE, NAME, "sm_90a", Call(module=module, function="outer", arguments={}))
    record = Record(compiler="cute_dsl", key=NAME, fingerprint="f", rebuild=rebuild)

    with pytest.raises(NotRebuildable, match="of the dict's own package"):
        variant_of(record, "sm_90a", {CACHE.namespace: CACHE})


def serve(mode: Any, library: Any, function: str) -> None:
    """An engine's call, as the hooks would tell the mode of it."""

    def compile_() -> Any:
        return mode.compile(None, "kernel", lambda: "compiled")

    mode.look_up(PLACE)
    getattr(library.kernels, function)(compile_, *([8] if function == "outer" else [object()]))
    mode.assigned(PLACE, next(iter(library.cache.kept.values())))


@pytest.fixture
def left() -> Left:
    return Left()


@pytest.fixture
def recorder(tmp_path: Path, left: Left) -> Recorder:
    return Recorder(tmp_path / "variants", "sm_90a", lambda place: NAME, left)


@pytest.mark.usefixtures("described")
def test_bake_makes_kernels_of_a_dict_whose_call_has_a_form_and_proves_them(
    library: Any, tmp_path: Path, recorder: Recorder, left: Left
) -> None:
    serve(recorder, library, "outer")

    (variant,) = recorder.variants.values()
    assert (variant.namespace, variant.call.function if variant.call else "") == (CACHE.namespace, "outer")
    assert isinstance(library.cache.kept[8], StandIn)
    library.cache.kept.clear()
    with pytest.raises(Miss, match=CACHE.namespace):
        serve(Refuser(tmp_path, recorder, left), library, "outer")
    assert left.subjects == set()


@pytest.mark.usefixtures("described")
def test_bake_leaves_kernels_of_a_dict_whose_call_has_no_form_to_the_engine(
    library: Any, tmp_path: Path, recorder: Recorder, left: Left
) -> None:
    for mode in (recorder, Refuser(tmp_path, recorder, left)):
        serve(mode, library, "unkeepable")
        assert library.cache.kept == {1: "compiled"}
        library.cache.kept.clear()

    assert recorder.variants == {}
    assert left.subjects == {"builtins.str"}
