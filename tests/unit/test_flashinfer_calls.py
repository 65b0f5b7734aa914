"""A module of FlashInfer's as data: its key, the generator found for it, and what a record may name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_flashinfer import install, manifest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.compilers.flashinfer_calls import Generator, Module, check, digest_of, generate
from prefetchd.compilers.flashinfer_specs import elsewhere, intercepted, made, module_of
from prefetchd.compilers.flashinfer_standin import StandInModule, stand_in_for
from prefetchd.cute.calls import Undescribable


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch, tmp_path / "cache")


def met_by(call: Any) -> Module:
    """What a capture would keep of the module that is asked for."""
    found: list[Module] = []

    def meet(spec: Any) -> Any:
        found.append(module_of(spec))
        return stand_in_for(spec)

    with intercepted(meet):
        call().build_and_load()
    (module,) = found
    return module


def test_a_module_has_one_key_wherever_the_cache_lies(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    inner = one / ".prefetchd/owner/1"

    assert digest_of(manifest(one), (one,)) == digest_of(manifest(other), (other,))
    assert digest_of(manifest(inner), (inner, one)) == digest_of(manifest(one), (one,))
    assert digest_of(manifest(one, "-O0"), (one,)) != digest_of(manifest(one), (one,))
    assert digest_of(manifest(tmp_path / "one2"), (one,)) != digest_of(manifest(one), (one,))


def test_the_outermost_generator_is_kept_with_its_arguments_and_describes_the_same_again(
    library: Any, tmp_path: Path
) -> None:
    module = met_by(lambda: library.gen_outer_module("gelu"))

    assert module.call is not None
    assert (module.call.module, module.call.function) == ("flashinfer.jit.fake", "gen_outer_module")
    assert module.key.startswith("0.7.4/90a/cached_ops/gelu@")
    again = msgspec.json.decode(msgspec.json.encode(module), type=Module)
    assert again == module
    with elsewhere(tmp_path / "staging"), made() as specs:
        assert again.call is not None
        generate(again.call)
        assert [module_of(spec, tmp_path / "cache").key for spec in specs] == [module.key]


def test_a_generator_that_the_library_keeps_to_itself_is_one(library: Any) -> None:
    call = met_by(lambda: library.public_module("relu")).call

    assert call is not None
    assert call.function == "_gen_private_module"


def test_lists_are_kept_as_tuples_and_defaults_too(library: Any) -> None:
    module = met_by(lambda: library.gen_act_module("relu", [1, "x"]))

    assert module.call is not None
    assert module.call.arguments == {
        "kind": ["s", "relu"],
        "sizes": ["T", ["i", "1"], ["s", "x"]],
        "fast": ["b", True],
    }


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda library: library.make("silu"), "not described by a function gen_"),
        (lambda library: library.gen_silu_module(True), "takes any arguments"),
        (lambda library: library.gen_act_module("x", {}), "arguments of gen_act_module"),
        (lambda library: library.gen_customized_module("struct A { A() { run(); } };"), "neither a number"),
    ],
)
def test_a_module_that_cannot_be_described_again_says_why(library: Any, ask: Any, reason: str) -> None:
    module = met_by(lambda: ask(library))

    assert module.call is None
    assert reason in module.refused


def test_a_module_that_embeds_cubins_is_left_to_the_engine(library: Any) -> None:
    def ask() -> Any:
        spec = library.gen_act_module("x")
        spec.embedded_cubin_factory = dict
        return spec

    assert "embeds cubins" in met_by(ask).refused


def test_what_was_described_before_the_watch_says_so(library: Any) -> None:
    spec = library.gen_act_module("x")

    assert "before prefetchd watched" in met_by(lambda: spec).refused


def test_a_module_that_came_ready_made_is_the_librarys_business(library: Any) -> None:
    spec = library.gen_act_module("x")
    spec.is_aot = True

    with intercepted(lambda spec: pytest.fail(spec.name)):
        assert spec.build_and_load() == "loaded"


def test_the_library_is_left_as_it_was(library: Any) -> None:
    owner = library.core.JitSpecNvcc
    before = owner.__init__, owner.build_and_load

    met_by(lambda: library.gen_act_module("x"))

    assert (owner.__init__, owner.build_and_load) == before


def test_a_library_that_is_imported_later_is_watched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "flashinfer/jit"
    place.mkdir(parents=True)
    for path in (place.parent, place):
        (path / "__init__.py").touch()
    (place / "core.py").write_text(
        "class JitSpecNvcc:\n    is_aot = False\n    def build_and_load(self):\n        return 'built'\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    with intercepted(lambda spec: "met"):
        from flashinfer.jit.core import JitSpecNvcc

        assert JitSpecNvcc().build_and_load() == "met"
    assert JitSpecNvcc().build_and_load() == "built"
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.core"):
        monkeypatch.delitem(sys.modules, name)


def test_a_stand_in_has_every_function_and_the_librarys_wrapping() -> None:
    class Spec:
        name = "m"
        post_load_adapter: Any = None

    module = stand_in_for(Spec())
    assert isinstance(module, StandInModule)
    assert module.run(1, two=2) is None
    assert module["run"]() is None
    assert not hasattr(module, "__array__")
    Spec.post_load_adapter = staticmethod(lambda module: ("wrapped", module.plan()))
    assert stand_in_for(Spec()) == ("wrapped", None)


@pytest.mark.parametrize(
    "fields",
    [
        {"module": "os", "function": "gen_x"},
        {"module": "flashinfer.jit.activation", "function": "system"},
        {"module": "flashinfer.jitters", "function": "gen_x"},
        {"module": "flashinfer.jit.activation\n", "function": "gen_x"},
        {"module": "flashinfer.jit..core", "function": "gen_x"},
        {"module": "flashinfer.jit.a", "function": "gen_x.y"},
        {"module": "flashinfer.jit.a", "function": "gen_x", "arguments": {"a b": ["n"]}},
    ],
)
def test_what_a_record_may_not_name_is_no_generator(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(fields), type=Generator)


@pytest.mark.parametrize(
    ("module", "arguments", "reason"),
    [
        ("flashinfer.jit.core", {"name": ["s", "x"]}, "sources and flags"),
        ("flashinfer.jit.a", {"uri": ["s", "../x"]}, "neither a number nor a name"),
        ("flashinfer.jit.a", {"uri": ["s", "a/b"]}, "neither"),
        ("flashinfer.jit.a", {"flags": ["T", ["s", "-O0"]]}, "neither"),
        ("flashinfer.jit.a", {"kind": ["t", "cutlass:x"]}, "neither"),
        ("flashinfer.jit.a", {"kind": []}, "neither"),
        ("flashinfer.jit.a", {"kind": ["s", 1]}, "neither"),
        ("flashinfer.jit.a", {"kind": ["T", "s"]}, "neither"),
    ],
)
def test_arguments_in_which_code_or_a_path_fits_are_refused(
    module: str, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Undescribable, match=reason):
        generate(Generator(module=module, function="gen_x", arguments=arguments))


@given(st.text(max_size=200))
def test_no_text_that_passes_holds_more_than_a_name(text: str) -> None:
    call = Generator(module="flashinfer.jit.a", function="gen_x", arguments={"a": ["s", text]})
    try:
        check(call)
    except Undescribable:
        return
    assert all(each.isascii() and (each.isalnum() or each in "_.-") for each in text)
    assert not text.startswith((".", "-"))
