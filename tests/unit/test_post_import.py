"""The finder that acts after an import: whom it asks, and how often."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from types import ModuleType

import pytest

from prefetchd import post_import
from prefetchd.engine_environment import SITE
from prefetchd.engine_site import sitecustomize

NAME = "prefetchd_test_module"


class Last:
    """Behind all others: knows the module, or does not, and counts how often it is asked for it."""

    def __init__(self, loader: object | None) -> None:
        self.loader = loader
        self.asked = 0

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != NAME:
            return None
        self.asked += 1
        return None if self.loader is None else ModuleSpec(name, self.loader)  # type: ignore[arg-type]


class Empty:
    """Loads a module with nothing in it."""

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: ModuleType) -> None: ...


def copy_of_the_file() -> ModuleType:
    """As both `sitecustomize` modules load it: by its place, with classes of its own."""
    loader = SourceFileLoader("prefetchd_test_copy", post_import.__file__)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What Python asks, for one test; empty at first."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(sys, "meta_path", [])
    return sys.meta_path  # type: ignore[return-value]


def install(count: int, called: list[int]) -> None:
    """Hooks of this many of our kind, each from a copy of the file; they note their numbers."""
    for number in range(count):
        copy_of_the_file().install({NAME: lambda _, number=number: called.append(number)})


def test_each_of_us_costs_one_look_up_for_a_module_that_does_not_exist(finders: list[object]) -> None:
    last = Last(None)
    finders.append(last)
    install(12, [])

    assert find_spec(NAME) is None

    # Each asks those behind it once, then Python itself does.
    assert last.asked == 13


def test_hooks_of_all_of_us_are_called_after_one_look_up(finders: list[object]) -> None:
    last = Last(Empty())
    finders.append(last)
    called: list[int] = []
    install(5, called)

    import_module(NAME)

    assert sorted(called) == [0, 1, 2, 3, 4]
    assert last.asked == 1


def test_strangers_behind_one_of_us_without_a_hook_for_the_module_are_asked(finders: list[object]) -> None:
    finders.append(Last(Empty()))
    called: list[str] = []
    post_import.install({"another": print})
    post_import.install({NAME: lambda module: called.append(module.__name__)})

    import_module(NAME)

    assert called == [NAME]


def test_a_finder_that_answers_to_any_name_is_a_stranger(finders: list[object]) -> None:
    class Any:
        def __getattr__(self, _name: str) -> Any:
            return self

        def __call__(self, *_: object) -> None: ...

    finders += [Any(), Last(Empty())]
    called: list[str] = []
    post_import.install({NAME: lambda module: called.append(module.__name__)})

    import_module(NAME)

    assert called == [NAME]


def test_a_module_with_a_loader_of_the_oldest_kind_is_left_as_it_is(
    finders: list[object],
) -> None:
    class Oldest:
        def load_module(self, name: str) -> None: ...

    loader = Oldest()
    finders.append(Last(loader))
    post_import.install({NAME: print})

    spec = find_spec(NAME)

    assert spec is not None
    assert spec.loader is loader


def test_imported_elsewhere_our_directory_hides_nothing() -> None:
    # As a module of the package, as type checkers and this test do: no path holds the directory.
    assert str(SITE) not in sys.path
    post_import.run_hidden_sitecustomize(sitecustomize.HERE)
