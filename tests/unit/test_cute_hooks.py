"""The places at which a CuTe compile is met, on libraries and a compiler made of a few lines."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prefetchd.cute.engine import EngineMode
from prefetchd.cute.homes import Site, SiteError, sites
from prefetchd.cute.hooks import COMPILER_MODULE, Hooks, Place
from prefetchd.targets import load_target

TABLE = Site("dict", "small_library", "cache", ("small_library",), (1,))
FUNCTION = Site("function", "small_library", "build", ("small_library",))


class CompileCallable:
    """As the DSL has it: an instance is called, `_compile` does the work."""

    compiles: list[Any]

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self._compile(function, *args, **kwargs)

    def _compile(self, function: Any, *args: Any) -> Any:
        type(self).compiles.append(args)
        return ("compiled", function, args)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    compiler = ModuleType(COMPILER_MODULE)
    owner = type(
        "CompileCallable", (CompileCallable,), {"compiles": [], "_compile": CompileCallable._compile}
    )
    compiler.CompileCallable = owner  # type: ignore[attr-defined]
    compile_ = owner()

    library = ModuleType("small_library")
    library.cache = {}  # type: ignore[attr-defined]

    def from_table(size: Any, device: int = 0) -> Any:
        key = (size, device)
        if key not in library.cache:
            library.cache[key] = compile_("kernel", size)
        return library.cache[key]

    @functools.cache
    def build(size: Any, fast: bool = True) -> Any:
        return compile_("first", size), compile_("second", fast)

    library.from_table, library.build = from_table, build  # type: ignore[attr-defined]
    library.compile_ = compile_  # type: ignore[attr-defined]
    library.compiles = owner.compiles  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, COMPILER_MODULE, compiler)
    monkeypatch.setitem(sys.modules, "small_library", library)
    return library


class Store:
    """A mode that holds what it is given, by namespace and key."""

    def __init__(self, *held: tuple[Site, str]) -> None:
        self.held = {(site.namespace, key): f"loaded {key}" for site, key in held}
        self.asked: list[Place] = []
        self.named: list[tuple[Place, Any]] = []
        self.odd: list[str] = []

    def look_up(self, place: Place) -> Any | None:
        self.asked.append(place)
        return self.held.get((place.site.namespace, place.key))

    def assigned(self, place: Place, value: Any) -> None:
        self.named.append((place, value))

    def compile(self, place: Place | None, subject: Any, run: Callable[[], Any]) -> Any:
        found = self.look_up(place) if place is not None else None
        return found if found is not None else run()

    def unkeyable(self, site: Site, reason: str) -> None:
        self.odd.append(reason)

    def installed(self, site: Site) -> None:
        pass


def installed(mode: Any) -> Hooks:
    hooks = Hooks(mode, [TABLE, FUNCTION])
    hooks.install()
    return hooks


def key_of(mode: Store, index: int = 0) -> str:
    return mode.asked[index].key


def test_a_missing_key_of_a_dict_is_asked_for_once_and_then_named(library: Any) -> None:
    mode = Store()
    installed(mode)

    compiled = library.from_table(64)
    again = library.from_table(64)

    assert compiled is again
    assert len(mode.asked) == 1
    assert [(place.key, value) for place, value in mode.named] == [(key_of(mode), compiled)]
    assert library.compiles == [(64,)]


def test_a_dict_is_served_from_the_store_without_a_compile(library: Any) -> None:
    first = Store()
    hooks = installed(first)
    library.from_table(64)
    hooks.remove()
    library.cache.clear()
    second = Store((TABLE, key_of(first)))
    installed(second)

    assert library.from_table(64, device=3) == f"loaded {key_of(first)}"
    assert library.compiles == [(64,)]


def test_every_way_of_asking_a_dict_is_answered(library: Any) -> None:
    first = Store()
    installed(first)
    assert (1, 0) not in library.cache
    key = key_of(first)
    installed(Store((TABLE, key)))

    assert library.cache.get((1, 0)) == f"loaded {key}"
    assert library.cache.get((2, 0), "other") == "other"
    assert library.cache.setdefault((3, 0), "mine") == "mine"
    assert library.cache[1, 0] == f"loaded {key}"
    with pytest.raises(KeyError):
        library.cache[4, 0]


def test_each_compile_in_a_function_has_its_number(library: Any) -> None:
    mode = Store()
    installed(mode)

    library.build(64)
    library.build(64)

    assert [place.number for place in mode.asked] == [0, 1]
    assert len({place.key for place in mode.asked}) == 2


def test_arguments_by_name_and_by_default_are_one_key(library: Any) -> None:
    mode = Store()
    installed(mode)

    library.build(64)
    library.build(size=64, fast=True)

    assert mode.asked[0].key == mode.asked[2].key


def test_what_a_library_had_compiled_before_is_not_compiled_again(library: Any) -> None:
    before = library.build(64)
    mode = Store()
    installed(mode)

    assert library.build(64) is before
    assert mode.asked == []


def test_removing_gives_the_library_back_what_is_its_own(library: Any) -> None:
    table, build = library.cache, library.build
    hooks = installed(Store())
    made = library.from_table(64)

    hooks.remove()

    assert (library.cache, library.build) == (table, build)
    assert type(library.cache) is dict
    assert table == {(64, 0): made}


def test_a_key_without_a_form_is_compiled_and_reported(library: Any) -> None:
    mode = Store()
    installed(mode)
    strange = frozenset()

    library.from_table(strange)
    library.build(strange)

    assert len(library.compiles) == 3
    assert mode.asked == []
    assert all("frozenset" in reason for reason in mode.odd)


def test_a_module_that_is_imported_later_is_patched_then(
    library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "late_library.py").write_text("cache = {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mode = Store()
    hooks = Hooks(mode, [Site("dict", "late_library", "cache", ("late_library",))])
    hooks.install()

    late = __import__("late_library")
    assert 5 not in late.cache
    hooks.remove()
    monkeypatch.delitem(sys.modules, "late_library")

    assert len(mode.asked) == 1
    assert type(late.cache) is dict


def test_a_module_that_is_being_imported_is_patched_when_it_is_done(
    library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As a library whose first line imports the DSL, by which we come into the process.
    (tmp_path / "halfway_library.py").write_text("import sys\nsys.come_in()\ncache = {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mode = Store()
    hooks = Hooks(mode, [Site("dict", "halfway_library", "cache", ("halfway_library",))])
    monkeypatch.setattr(sys, "come_in", hooks.install, raising=False)

    halfway = __import__("halfway_library")
    for thread in hooks.waiting:
        thread.join()
    monkeypatch.delitem(sys.modules, "halfway_library")

    assert 5 not in halfway.cache
    assert len(mode.asked) == 1


def test_an_engine_compiles_when_anything_about_the_store_fails(library: Any, tmp_path: Path) -> None:
    def no_device() -> Any:
        raise RuntimeError("no driver")

    mode = EngineMode(tmp_path / "store", no_device, {})
    installed(mode)

    assert library.from_table(64)[0] == "compiled"
    assert library.build(64)[0][0] == "compiled"
    assert mode.counts == {"miss": 3, "compiled": 3}


class Ends:
    """Hears of the engine's compiles: how many have begun, and by which key each ended."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended: list[str] = []

    def began(self, place: Place | None, name: str, subject: Any) -> int:
        self.begun += 1
        return self.begun

    def over(self, token: int, place: Place | None, name: str, seconds: float, ok: bool) -> None:
        self.ended.append(("" if place is None else place.site.attribute) + ("" if ok else " failed"))

    def loaded(self, place: Place, name: str, seconds: float) -> None:
        raise AssertionError("nothing is stored")


def test_every_compile_of_an_engine_ends_with_its_name_or_without(library: Any, tmp_path: Path) -> None:
    ends = Ends()
    mode = EngineMode(tmp_path / "store", lambda: load_target("h200"), {}, ends)
    installed(mode)

    library.from_table(64)
    library.compile_("of nobody's dict", 1)
    library.build(64)
    # A dict that is given something made of what was compiled, which nothing can be loaded as.
    assert (7, 7) not in library.cache
    library.cache[7, 7] = [library.compile_("part", 2)]

    assert ends.ended == ["cache", "", "build", "build", ""]
    assert ends.begun == len(ends.ended)


def test_a_failed_compile_is_told_and_raises(library: Any, tmp_path: Path) -> None:
    ends = Ends()
    installed(EngineMode(tmp_path / "store", lambda: load_target("h200"), {}, ends))

    with pytest.raises(TypeError):
        library.compile_("no arguments", *[1], nonsense=2)

    assert ends.ended == [" failed"]


def test_a_cleared_dict_asks_again(library: Any) -> None:
    mode = Store()
    installed(mode)
    library.from_table(64)

    library.cache.clear()
    library.from_table(64)
    del library.cache[64, 0]
    library.from_table(64)

    assert len(mode.asked) == 3


def test_sites_of_the_settings_are_read_or_refused_with_the_form() -> None:
    (*_, table, function) = sites(["a.b:cache@0+2"], ["c:build"])

    assert (table.namespace, table.devices_at, table.kind) == ("a.b:cache", (0, 2), "dict")
    assert (function.module, function.attribute, function.kind) == ("c", "build", "function")
    for dicts, functions in ((["nocolon"], []), (["a:b@x"], []), ([], ["a:b@1"]), ([], ["a b:c"])):
        with pytest.raises(SiteError, match="module:attribute"):
            sites(dicts, functions)
