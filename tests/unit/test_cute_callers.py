"""Compiles that nothing of ours names: told by what is compiled, reached again by their caller."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from prefetchd.cute.callers import compiles_kernels
from prefetchd.cute.calls import Call, Fields, Global, Plain, Undescribable, perform
from prefetchd.cute.canonical import Unkeyable
from prefetchd.cute.homes import Site
from prefetchd.cute.hooks import COMPILER_MODULE, Hooks, Place
from prefetchd.cute.subjects import digest_of

COMPILER = """
class CompileCallable:
    def __init__(self, **options):
        self.options = options

    def __call__(self, function, *args, **kwargs):
        return self._compile(function, *args, **kwargs)

    def _compile(self, function, *args, **kwargs):
        return "compiled", function, args
"""
LIBRARY = """
import functools
from dataclasses import dataclass

@dataclass(frozen=True)
class Key:
    size: int
    fast: bool = True

class Kernel:
    def __init__(self, key, *held):
        self.size, self.fast, self.held = key.size, key.fast, held

class Owner:
    def __init__(self):
        self.compiled = {}

    def compile(self, key):
        self.compiled[key] = compile_(Kernel(key), key.size)

    def anything(self, *held):
        return compile_(Kernel(Key(1), *held))

owner = Owner()

def nothing(path):
    return open(path)

def in_passing():
    import cutlass

class Holder:
    @functools.cache
    @staticmethod
    def compile(size):
        return compile_(Kernel(Key(size), object()))

def twice(sizes):
    return [compile_(Kernel(Key(size))) for size in (1, 2)]

def by_way_of(other, size):
    return other(size)
"""
PACKAGES = ("owning_library",)


class Kept:
    """A mode that keeps the places, and compiles."""

    def __init__(self) -> None:
        self.places: list[Place | None] = []
        self.odd: list[str] = []

    def look_up(self, place: Place) -> Any | None:
        return None

    def assigned(self, place: Place, value: Any) -> None:
        pass

    def compile(self, place: Place | None, subject: Any, run: Callable[[], Any]) -> Any:
        self.places.append(place)
        return run()

    def unkeyable(self, site: Site, reason: str) -> None:
        self.odd.append(reason)

    def installed(self, site: Site) -> None:
        pass


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    compiler = ModuleType(COMPILER_MODULE)
    # So that its frames are this module's.
    exec(COMPILER, compiler.__dict__)
    monkeypatch.setitem(sys.modules, COMPILER_MODULE, compiler)
    (tmp_path / "owning_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "owning_library", raising=False)
    made: Any = __import__("owning_library")
    made.compile_ = compiler.CompileCallable()  # type: ignore[attr-defined]
    made.with_options = compiler.CompileCallable  # type: ignore[attr-defined]
    yield made
    sys.modules.pop("owning_library", None)


@pytest.fixture
def kept(library: Any) -> Iterator[Kept]:
    mode = Kept()
    hooks = Hooks(mode, (), PACKAGES)
    hooks.install()
    yield mode
    hooks.remove()


def test_compile_of_an_object_is_named_by_its_method_and_told_with_the_arguments(
    library: Any, kept: Kept
) -> None:
    library.owner.compile(library.Key(8))

    (place,) = kept.places
    assert place is not None
    assert (place.site.kind, place.site.namespace) == ("call", "owning_library:Owner.compile")
    assert place.site.sources[0] == "owning_library"
    fields = {"size": Plain(["i", "8"]), "fast": Plain(["b", True])}
    assert place.call == Call(
        module="owning_library",
        function="Owner.compile",
        arguments={
            "self": Global(module="owning_library", name="owner"),
            "key": Fields(module="owning_library", kind="Key", values=fields),
        },
    )


def test_call_that_was_a_strangers_data_for_a_while_has_the_same_key(library: Any, kept: Kept) -> None:
    library.owner.compile(library.Key(8))
    library.owner.compile(library.Key(9))
    call = kept.places[0].call if kept.places[0] is not None else None
    assert call is not None
    library.owner.compiled.clear()

    perform(msgspec.json.decode(msgspec.json.encode(call), type=Call), PACKAGES)

    first, second, again = (place.key for place in kept.places if place is not None)
    assert first == again != second
    assert library.Key(8) in library.owner.compiled


def test_options_of_the_compiler_are_part_of_the_key(library: Any, kept: Kept) -> None:
    library.owner.compile(library.Key(8))
    library.compile_ = library.with_options(level=3)
    library.owner.compile(library.Key(8))

    assert len({place.key for place in kept.places if place is not None}) == 2


def test_cached_function_is_told_by_its_arguments_whatever_it_compiles(library: Any, kept: Kept) -> None:
    for size in (4, 5, 4):
        library.Holder.compile(size)

    keys = [place.key for place in kept.places if place is not None]
    assert len(keys) == len(set(keys)) == 2
    assert kept.odd == []


def test_caller_that_cannot_be_called_again_gives_no_name(library: Any, kept: Kept) -> None:
    # Of a method with any number of arguments their names are not known; a second owner has no name.
    library.owner.anything(1)
    library.Owner().compile(library.Key(8))

    assert kept.places == [None, None]
    assert kept.odd == []


def test_object_without_a_form_makes_the_kernel_unkeyable(library: Any, kept: Kept) -> None:
    library.owner.compile(library.Key(8))
    library.Kernel.__init__ = lambda self, key: setattr(self, "held", object())
    library.owner.compile(library.Key(8))

    assert [place is None for place in kept.places] == [False, True]
    assert "builtins:object" in kept.odd[0]


def test_a_library_in_between_that_nobody_allowed_keeps_its_kernel(library: Any, kept: Kept) -> None:
    library.by_way_of(lambda size: library.compile_(library.Kernel(library.Key(size))), 3)

    assert kept.places == [None]


def test_module_with_a_known_dict_is_left_to_that_dict(library: Any) -> None:
    mode = Kept()
    hooks = Hooks(mode, [Site("dict", "owning_library", "absent", PACKAGES)], PACKAGES)
    hooks.install()
    library.owner.compile(library.Key(8))
    hooks.remove()

    assert mode.places == [None]


def test_known_dict_elsewhere_in_the_package_takes_no_other_modules_compiles(library: Any) -> None:
    mode = Kept()
    package = Site("dict", "owning_library.elsewhere", "kept", PACKAGES)
    hooks = Hooks(mode, [package], PACKAGES)
    hooks.install()
    library.owner.compile(library.Key(8))
    hooks.remove()

    assert [place.site.kind for place in mode.places if place is not None] == ["call"]


@pytest.mark.parametrize(
    "argument",
    [
        Global(module="os", name="environ"),
        Fields(module="subprocess", kind="Popen", values={"args": Plain(["s", "true"])}),
        Global(module="owning_library", name="functools"),
        Fields(module="owning_library", kind="Owner", values={}),
        Fields(module="owning_library", kind="functools.partial", values={}),
        Fields(module="owning_library", kind="Key", values={"other": Plain(["i", "1"])}),
    ],
)
def test_no_object_is_made_or_found_outside_of_what_the_library_makes_of_fields(
    library: Any, argument: Any
) -> None:
    call = Call(module="owning_library", function="twice", arguments={"sizes": argument})

    with pytest.raises(Undescribable):
        perform(call, PACKAGES)


def test_library_objects_are_refused_where_no_package_is_allowed(library: Any) -> None:
    held = Global(module="owning_library", name="owner")
    call = Call(module="owning_library", function="twice", arguments={"sizes": held})

    with pytest.raises(Undescribable, match="replay_packages"):
        perform(call)


def test_only_functions_that_have_something_compiled_are_callers(library: Any) -> None:
    # An allowed package has others, which would do for a stranger what he likes.
    assert not compiles_kernels(library.nothing, "owning_library")
    assert compiles_kernels(library.Owner.compile, "owning_library")
    assert compiles_kernels(library.Holder.compile, "owning_library")
    # Of a module that never uses the DSL.
    assert not compiles_kernels(re.compile, "re")
    assert not compiles_kernels(len, "builtins")


class Size:
    """As the DSL's symbolic sizes: without a value of its own."""

    def __init__(self, divisible: int = 1) -> None:
        self.divisible = divisible


class CUstream:
    """As the driver's streams."""


def digest(*subject: Any) -> str:
    return digest_of(subject, (__name__,))


def test_two_sizes_that_are_one_object_are_not_two_sizes() -> None:
    one, two = Size(), Size()

    assert digest(one, two) == digest(Size(), Size()) != digest(one, one)
    assert digest(Size(8)) != digest(Size(4))


def test_streams_are_alike_and_order_of_a_dict_or_set_is_none() -> None:
    assert digest(CUstream()) == digest(CUstream())
    assert digest({"a": 1, "b": 2}, {3, 1}) == digest({"b": 2, "a": 1}, {1, 3})
    assert digest([1, 2]) != digest([2, 1])


def test_closures_are_told_by_what_they_hold() -> None:
    def host(factor: int) -> Callable[[], int]:
        return lambda: factor

    assert digest(host(1)) == digest(host(1)) != digest(host(2))


@pytest.mark.parametrize("value", [object(), 1j, iter(()), {Size()}, Path.home, pytest.raises])
def test_what_processes_do_not_agree_on_has_no_digest(value: Any) -> None:
    with pytest.raises(Unkeyable):
        digest(value)


def test_what_holds_itself_or_is_endless_is_described_or_refused() -> None:
    ring = Size()
    ring.divisible = ring  # type: ignore[assignment]
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]

    assert digest(ring)
    with pytest.raises(Unkeyable, match="too many parts"):
        digest(deep)
    with pytest.raises(Unkeyable, match="too many parts"):
        digest(list(range(1 << 15)))
