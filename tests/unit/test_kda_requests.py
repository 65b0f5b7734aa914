"""Requests of KDA and the gated delta rule on the wire, and how their tokens fall into sequences."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.protocol import MalformedRequest, decode_request, encode_request, request_from_fields, sweeps
from prefetchd.requests.delta import sequence_lengths
from prefetchd.requests.gdn import ChunkGatedDeltaRule
from prefetchd.requests.kda import ChunkKda, FusedRecurrentKda, KdaShortConvolution

SIZES: dict[str, Any] = {"heads": 4, "key_dim": 128, "value_dim": 128}


def chunk(**changes: Any) -> ChunkKda:
    return ChunkKda(**{"tokens": 128, **SIZES, **changes})


@pytest.mark.parametrize(
    "request_",
    [
        chunk(lower_bound=-5, unaligned=("q", "beta"), lengths="ragged"),
        ChunkGatedDeltaRule(tokens=1, value_heads=8, **SIZES),
        FusedRecurrentKda(tokens=6, per_sequence=3, accepted_tokens=True, **SIZES),
        KdaShortConvolution(tokens=7, channels=64, conv=4, decode=True),
    ],
)
def test_request_comes_back_equal(request_: Any) -> None:
    assert decode_request(encode_request(request_)) == request_


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"g_dtype": "fp8"}, "g_dtype"),
        ({"lower_bound": -6}, "lower_bound"),
        ({"index_dtype": "int16"}, "index_dtype"),
        ({"tokens": 0}, "tokens"),
        ({"state_indices": "slots"}, "state_indices"),
    ],
)
def test_value_no_library_takes_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MalformedRequest, match=rf"'chunk_kda'.*{words}"):
        request_from_fields({"op": "chunk_kda", "tokens": 128, **SIZES, **change})


def test_token_counts_of_one_site_are_one_sweep() -> None:
    (sweep,) = sweeps([chunk(tokens=tokens) for tokens in (128, 2049, 4097, 6145)])

    assert sweep.label() == "chunk_kda heads=4 key_dim=128 value_dim=128 tokens=128,2049..6145/2048"


@pytest.mark.parametrize(
    ("request_", "lengths"),
    [
        (chunk(), [128]),
        (chunk(sequences=3), [42, 42, 44]),
        (chunk(lengths="aligned", sequences=2, tokens=192), [64, 128]),
        (chunk(lengths="aligned", chunk_size=32, tokens=96, sequences=3), [32, 32, 32]),
        (chunk(lengths="ragged"), [127, 1]),
        (chunk(lengths="ragged", tokens=100), [100]),
        (FusedRecurrentKda(tokens=6, per_sequence=3, **SIZES), [3, 3]),
        (KdaShortConvolution(tokens=3, channels=64, conv=4, decode=True), [1, 1, 1]),
        (KdaShortConvolution(tokens=8, channels=64, conv=4, sequences=2), [4, 4]),
    ],
)
def test_tokens_fall_into_sequences(request_: Any, lengths: list[int]) -> None:
    assert sequence_lengths(request_) == lengths


@given(tokens=st.integers(2, 5000), sequences=st.integers(1, 40), lengths=st.sampled_from(["any", "ragged"]))
def test_lengths_add_up_and_ragged_is_ragged(tokens: int, sequences: int, lengths: Any) -> None:
    if sequences >= tokens:
        sequences = 1
    found = sequence_lengths(chunk(tokens=tokens, sequences=sequences, lengths=lengths))

    assert sum(found) == tokens
    assert min(found) >= 1
    assert lengths == "any" or any(length % 64 for length in found)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (chunk(lengths="aligned", tokens=100), "multiple of 64"),
        (chunk(sequences=129), "129 sequences"),
        (FusedRecurrentKda(tokens=7, per_sequence=3, **SIZES), "no multiple of per_sequence = 3"),
    ],
)
def test_lengths_that_cannot_be_are_refused(request_: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sequence_lengths(request_)
