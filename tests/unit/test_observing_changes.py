"""How a variant differs from the nearest known one, and which field of a key never settles."""

from __future__ import annotations

from prefetchd.observing.changes import MAX_FAMILIES, UNBOUNDED_AFTER, Changes


def test_the_nearest_variant_is_the_one_with_the_fewest_differences() -> None:
    changes = Changes()
    changes.add("triton", {"kernel": "f", "D": "64", "T": "1", "w": "4"})
    changes.add("triton", {"kernel": "f", "D": "128", "T": "2", "w": "8"})

    text, _ = changes.add("triton", {"kernel": "f", "D": "64", "T": "2", "w": "4"})

    assert text == "T: 1 -> 2; D, w same"


def test_variants_are_compared_within_their_kernel_and_compiler_only() -> None:
    changes = Changes()
    changes.add("triton", {"kernel": "f", "D": "64"})

    assert changes.add("triton", {"kernel": "g", "D": "64"})[0] == "first variant of g"
    assert changes.add("cute_dsl", {"kernel": "f", "D": "64"})[0] == "first variant of f"


def test_a_field_that_one_of_them_lacks_is_called_absent() -> None:
    changes = Changes()
    changes.add("triton", {"kernel": "f", "D": "64"})

    assert changes.add("triton", {"kernel": "f", "E": "1"})[0] == "E: absent -> 1; D: 64 -> absent"


def test_an_equal_variant_is_told_from_no_field() -> None:
    changes = Changes()
    changes.add("triton", {"kernel": "f", "D": "64"})

    assert "not among them" in changes.add("triton", {"kernel": "f", "D": "64"})[0]


def test_a_text_for_people_stays_short() -> None:
    changes = Changes()
    changes.add("triton", {"kernel": "f", **{f"a{n}": "x" * 500 for n in range(100)}})

    text, _ = changes.add("triton", {"kernel": "f", **{f"a{n}": "y" * 500 for n in range(100)}})

    assert len(text) < 2000
    assert "and 88 more" in text


def warned(values: list[object]) -> list[int]:
    """At which of these values of a field it is called unbounded."""
    changes = Changes()
    found = [changes.add("triton", {"kernel": "f", "T": str(value)})[1] for value in values]
    return [index for index, fields in enumerate(found) if fields]


def test_a_number_that_keeps_changing_is_called_unbounded_once() -> None:
    assert warned(list(range(1001, 1101, 2))) == [UNBOUNDED_AFTER]
    assert warned([value + 1.3 for value in range(20)]) == [UNBOUNDED_AFTER]


def test_powers_of_two_few_values_and_words_are_not() -> None:
    assert warned([2**power for power in range(40)] + [0, -8, 0.25]) == []
    assert warned([3, 5, 7] * 20) == []
    assert warned(["nan", "inf", *(f"fp{n}" for n in range(50))]) == []


def test_families_are_bounded() -> None:
    changes = Changes()
    for number in range(MAX_FAMILIES + 1):
        changes.add("triton", {"kernel": str(number), "D": "1"})

    assert changes.add("triton", {"kernel": "0", "D": "1"})[0] == "first variant of 0"


def test_no_parts_say_nothing() -> None:
    assert Changes().add("triton", {}) == ("", [])
