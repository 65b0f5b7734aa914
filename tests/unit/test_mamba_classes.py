from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd_providers.mamba_classes import (
    all_scan_classes,
    class_of,
    count_class,
    count_classes,
    natural_chunks,
    possible_chunks,
    scan_classes,
)

CHUNKS = st.sampled_from([16, 64, 128, 256])
LIMITS = st.integers(1, 20_000)
# Rows of 16, 8 and odd multiples: with many ranks a row is no multiple of 16 elements.
ROWS = st.sampled_from([16, 18_560, 9_288, 2_321])


@given(st.data(), CHUNKS, LIMITS, ROWS, st.booleans())
def test_every_token_count_within_the_limit_has_its_class_listed(
    data: st.DataObject, chunk: int, limit: int, row: int, cut: bool
) -> None:
    tokens = data.draw(st.integers(1, limit))
    least = natural_chunks(tokens, chunk)
    chunks = data.draw(st.integers(least, tokens)) if cut else least
    assert class_of(tokens, chunk, chunks, row) in scan_classes(chunk, limit, row, cut=cut)


@given(CHUNKS, LIMITS, ROWS, st.booleans())
def test_nothing_listed_is_redundant_or_beyond_the_limit(chunk: int, limit: int, row: int, cut: bool) -> None:
    listed = list(scan_classes(chunk, limit, row, cut=cut).values())
    assert len({class_of(tokens, chunk, chunks, row) for tokens, chunks in listed}) == len(listed)
    assert all(1 <= tokens <= limit for tokens, _ in listed)
    assert all(natural_chunks(tokens, chunk) <= chunks <= tokens for tokens, chunks in listed)


@given(CHUNKS, st.integers(1, 10**6), ROWS)
def test_a_planner_without_a_limit_knows_every_class(chunk: int, tokens: int, row: int) -> None:
    assert class_of(tokens, chunk, natural_chunks(tokens, chunk), row) in all_scan_classes(chunk, row)


@given(CHUNKS, LIMITS, st.booleans())
def test_representatives_stay_the_same_under_a_larger_limit_unless_they_were_out_of_reach(
    chunk: int, limit: int, cut: bool
) -> None:
    everything = all_scan_classes(chunk, cut=cut)
    for found, member in scan_classes(chunk, limit, cut=cut).items():
        assert everything[found] == member or everything[found][0] > limit


def test_the_measured_list_of_chunk_256_is_reproduced() -> None:
    listed = {tokens for tokens, _ in scan_classes(256, 8192).values()}
    assert listed == {272, 300, 256, 100, 1, 4096, 3940}


@pytest.mark.parametrize(("limit", "classes"), [(1, 1), (15, 2), (16, 3), (256, 3), (257, 4), (8192, 7)])
def test_classes_out_of_reach_are_not_listed(limit: int, classes: int) -> None:
    assert len(scan_classes(256, limit)) == classes


def test_a_row_that_is_no_multiple_of_16_tells_more_token_counts_apart() -> None:
    assert len(scan_classes(256, 8192, 9_288)) > len(scan_classes(256, 8192, 18_560))


def test_sequences_that_end_their_chunks_reach_sixteen_of_them_with_few_tokens() -> None:
    assert class_of(17, 256, 16) in scan_classes(256, 17, cut=True)
    assert class_of(17, 256, 16) not in scan_classes(256, 17)


@given(st.integers(1, 10**6))
def test_every_count_is_represented_by_one_of_its_class(count: int) -> None:
    member = count_class(count)
    assert (member == 1, member % 16 == 0) == (count == 1, count % 16 == 0)
    assert member in count_classes(count)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=20), st.sampled_from([128, 256]))
def test_chunks_of_a_batch_include_those_of_sequences_that_begin_inside_one(
    lengths: list[int], chunk: int
) -> None:
    possible = possible_chunks(tuple(lengths), chunk, cut=True)
    # Every sequence continues one token before a chunk's end.
    continued = sum(1 + natural_chunks(length - 1, chunk) for length in lengths)
    assert sum(natural_chunks(length, chunk) for length in lengths) in possible
    # Cut at whole chunks of the batch as well as at sequences.
    ends = list(accumulate(lengths))
    assert len({*ends, *range(chunk, ends[-1], chunk)}) in possible
    assert continued in possible
