"""A loaded kernel is called as the compiled one: by the same names, with the same defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from prefetchd.cute.signatures import MAKER, MODULE, Signature, Uncallable, callable_as, noted, signature_of


def make(target: Callable[..., Any], **known: Any) -> Callable[..., Any]:
    """As tvm_ffi's: a function with names in front of one without."""
    names, defaults = known["arg_names"], known.get("arg_defaults", ())

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        given |= dict(zip(names, args, strict=False)) | kwargs
        return target(*(given[name] for name in names))

    return wrapper


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType(MODULE)
    setattr(module, MAKER, make)
    monkeypatch.setitem(sys.modules, "tvm_ffi", ModuleType("tvm_ffi"))
    monkeypatch.setitem(sys.modules, "tvm_ffi.utils", ModuleType("tvm_ffi.utils"))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def positional(*args: Any) -> Any:
    return args


def test_function_that_was_a_file_for_a_while_is_called_by_name_and_with_defaults(library: Any) -> None:
    with noted() as told:
        compiled = library.make_kwargs_wrapper(positional, arg_names=["x", "scale"], arg_defaults=(1.5,))
    signature = signature_of(compiled, told)
    stored = msgspec.json.decode(msgspec.json.encode(signature), type=Signature)

    loaded = callable_as(positional, stored)

    assert loaded(7) == compiled(7) == (7, 1.5)
    assert loaded(scale=2.0, x=7) == (7, 2.0)
    assert library.make_kwargs_wrapper is make


def test_function_without_names_is_loaded_as_it_is(library: Any) -> None:
    with noted() as told:
        pass

    assert callable_as(positional, signature_of(positional, told)) is positional


@pytest.mark.parametrize(
    ("compiled", "known"),
    [
        (
            SimpleNamespace(execution_args=SimpleNamespace(has_pointer_address_arg_specs=True)),
            {"arg_names": []},
        ),
        (None, {"arg_names": ["p"], "map_dataclass_to_tuple": ["p"]}),
        (None, {"arg_names": ["p"], "arg_defaults": (object(),)}),
    ],
)
def test_what_the_dsl_converts_at_each_call_is_not_kept(compiled: Any, known: dict[str, Any]) -> None:
    with pytest.raises(Uncallable):
        signature_of(compiled, [known])
