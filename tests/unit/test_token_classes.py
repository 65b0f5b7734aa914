"""Classes of token counts: none is forgotten, and a batch names the one that was warmed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.profiles.token_classes import Rule, representative, representatives

rules = st.sampled_from(["any", "buckets", "divisible", "blocks"])


@given(tokens=st.integers(1, 20000), spare=st.integers(0, 5000), rows=st.integers(1, 300), rule=rules)
def test_every_count_up_to_the_largest_is_stood_for(tokens: int, spare: int, rows: int, rule: Rule) -> None:
    assert representative(tokens, rows, rule) in representatives(tokens + spare, rows, rule)


@pytest.mark.parametrize(
    ("rows", "rule", "counts"),
    [
        (32, "any", (1,)),
        (32, "buckets", (128, 2049, 4097, 6145)),
        (4, "buckets", (128,)),
        (32, "divisible", (1, 2, 16, 2049, 2064, 4097, 4112, 6145, 6160)),
        (1, "blocks", (1, 2, 16, 17, 32, 33, 48)),
    ],
)
def test_what_stands_for_batches_up_to_8192_tokens(rows: int, rule: Rule, counts: tuple[int, ...]) -> None:
    assert representatives(8192, rows, rule) == counts


def test_a_small_limit_still_has_its_bucket() -> None:
    assert representatives(5, 32, "buckets") == (128,)
    assert representatives(5, 32, "divisible") == (1, 2)


def test_more_rows_a_token_than_a_bucket_holds() -> None:
    assert representatives(3, 100_000, "buckets") == (1, 2, 3)
