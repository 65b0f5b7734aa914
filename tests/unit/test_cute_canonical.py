"""The canonical form of keys: the same text in every process, and back again; anything else has none."""

from __future__ import annotations

import enum
import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.cute.canonical import MAX_DEPTH, Unkeyable, decode, encode, text_of

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40)
keys = st.recursive(plain, lambda inner: st.lists(inner, max_size=5).map(tuple), max_leaves=20)


@given(keys)
def test_a_key_comes_back_as_it_was(key: Any) -> None:
    assert decode(encode(key)) == key


@given(keys, keys)
def test_different_keys_have_different_texts(one: Any, other: Any) -> None:
    same = text_of(encode(one)) == text_of(encode(other))

    assert same == (repr(one) == repr(other))


def test_one_and_true_are_not_the_same_key() -> None:
    assert text_of(encode((1,))) != text_of(encode((True,))) != text_of(encode((1.0,)))


def test_a_device_has_no_number_where_the_site_says_it_is_one() -> None:
    first, second = (text_of(encode((32, True, device), devices_at=(2,))) for device in (0, 5))

    assert first == second
    assert text_of(encode((32, True, 5))) != first


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("value", [object(), [1], {1: 2}, Colour.RED, lambda: None, b"bytes"])
def test_what_has_no_form_is_refused_with_its_type(value: object) -> None:
    with pytest.raises(Unkeyable, match="no form"):
        encode((1, value))


def test_deep_and_large_keys_are_refused() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = (deep,)

    for key in (deep, tuple(range(5000)), "x" * 5000):
        with pytest.raises(Unkeyable):
            encode(key)


@pytest.mark.parametrize(
    "node",
    [
        [],
        ["x", 1],
        ["i", 5],
        ["i", "five"],
        ["t", "os:system"],
        ["t", "builtins:exec"],
        ["t", "cutlass:../../etc"],
        "text",
        [["s"], "a"],
        ["d", "dtype"],
    ],
)
def test_forms_of_strangers_reach_no_object(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.dtype = type("dtype", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)

    with pytest.raises(Unkeyable):
        decode(node)
