"""What is told of FlashInfer's builds: what compiled, what ninja found ready, and how it is made again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_flashinfer import install
from told_sink import Told

from prefetchd.compilers.flashinfer_calls import Module
from prefetchd.observer import EngineCompiled, Observer
from prefetchd.observing.flashinfer_modules import FlashInferAdaptor

NAME = "gelu"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch, tmp_path / "cache")


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def observer(told: Told) -> Observer:
    return Observer(told)


@pytest.fixture(autouse=True)
def installed(library: Any, observer: Observer) -> Iterator[FlashInferAdaptor]:
    adaptor = FlashInferAdaptor()
    adaptor.install(observer)
    yield adaptor
    adaptor.remove()


def compiling(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text("library")
    os.utime(path, ns=(before + 10**9, before + 10**9))


def failing(path: Path) -> None:
    raise RuntimeError("Ninja build failed.")


def test_a_first_build_is_a_compile_with_its_key_and_its_generator(
    library: Any, told: Told, observer: Observer
) -> None:
    library.gen_act_module(NAME).build(compiling)

    assert [started.key for started in told.begun] == [told.records[0].key]
    (record,) = told.records
    assert record.key.startswith(f"0.7.4/90a/cached_ops/{NAME}@")
    module = msgspec.convert(record.rebuild, Module)
    assert module.call is not None
    assert module.call.function == "gen_act_module"
    assert (record.ok, observer.figures()["flashinfer_modules.compiles"]) == (True, 1)
    assert "test_observing_flashinfer" in record.site


def test_where_ninja_finds_nothing_to_do_it_is_a_hit(library: Any, told: Told, observer: Observer) -> None:
    spec = library.gen_act_module(NAME)
    spec.build(compiling)
    spec.build()

    assert len(told.records) == 1
    assert observer.figures()["flashinfer_modules.hits"] == 1


def test_a_library_that_was_built_again_is_a_compile(library: Any, told: Told, observer: Observer) -> None:
    spec = library.gen_act_module(NAME)
    spec.build(compiling)
    spec.build(compiling)

    assert observer.figures()["flashinfer_modules.compiles"] == 2


@pytest.mark.parametrize("before", [False, True])
def test_a_build_that_fails_is_told_and_fails_as_ever(library: Any, told: Told, before: bool) -> None:
    spec = library.gen_act_module(NAME)
    if before:
        compiling(spec.jit_library_path)

    with pytest.raises(RuntimeError, match="Ninja build failed"):
        spec.build(failing)

    assert [record.ok for record in told.records] == [False]


def test_a_description_that_is_not_understood_costs_only_the_name(
    library: Any, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**known: Any) -> str:
        raise TypeError("another version")

    monkeypatch.setattr(library.core, "generate_ninja_build_for_op", broken)

    library.gen_act_module(NAME).build(compiling)

    (record,) = told.records
    assert (record.key, record.rebuild, record.ok) == ("", None, True)


def test_a_forbidden_compile_reaches_the_engine(library: Any, observer: Observer) -> None:
    observer.on_compile = "error"

    with pytest.raises(EngineCompiled, match="flashinfer_modules"):
        library.gen_act_module(NAME).build(compiling)


def test_removed_the_library_is_as_it_was(
    library: Any, told: Told, installed: FlashInferAdaptor, observer: Observer
) -> None:
    methods: Callable[[], Any] = lambda: (  # noqa: E731
        library.core.JitSpecNvcc.__init__,
        library.core.JitSpecNvcc.build,
    )
    ours = methods()
    installed.remove()
    assert all(one is not other for one, other in zip(methods(), ours, strict=True))

    library.gen_act_module(NAME).build(compiling)

    assert told.records == []


def test_a_description_that_takes_no_attribute_of_ours_is_made_all_the_same(library: Any) -> None:
    owner = library.core.JitSpecNvcc
    made_before = owner.__setattr__

    def refuse(spec: Any, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise AttributeError(f"cannot assign to field {name!r}")
        made_before(spec, name, value)

    owner.__setattr__ = refuse

    library.gen_act_module(NAME).build(compiling)


def test_a_library_whose_place_cannot_be_told_is_built_all_the_same(library: Any, told: Told) -> None:
    def place(spec: Any) -> Path:
        raise RuntimeError("no place before the build")

    built: list[str] = []
    library.core.JitSpecNvcc.jit_library_path = property(place)

    with pytest.raises(RuntimeError, match="no place"):
        library.gen_act_module(NAME).build(lambda path: built.append(str(path)))
    library.core.JitSpecNvcc.jit_library_path = property(lambda spec: Path("/nul\0/x.so"))
    library.gen_act_module(NAME).build(lambda path: built.append(str(path)))

    assert built == ["/nul\0/x.so"]


def test_a_class_without_a_build_is_left_alone_and_can_be_imported(
    library: Any, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    made = vars(library.core.JitSpecNvcc)["__init__"]
    owner = type("JitSpecNvcc", (), {"__init__": made})
    library.core.JitSpecNvcc = owner
    adaptor = FlashInferAdaptor()

    adaptor.install(observer)

    assert vars(owner)["__init__"] is made
    assert "has no attribute 'build'" in caplog.text
    adaptor.remove()
