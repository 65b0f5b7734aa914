"""The rules for M: what they ask for, and that they leave out nothing an engine can launch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.profiles import GemmSite, Profile, ProfileError, m_for_batch, m_ranges
from prefetchd.protocol import Batch


def site(**changes: Any) -> GemmSite:
    values: dict[str, Any] = {"name": "s", "op": "fp8_gemm_nt", "n": 512, "k": 512, "m": "tokens"}
    return GemmSite(**values | changes)


def profile(*gemms: GemmSite, **changes: Any) -> Profile:
    values: dict[str, Any] = dict(
        model="m", architecture="a", tp=1, ep=1, dp=1, quantization="fp8", top_k=8, context_tokens=65536
    )
    return Profile(**values | changes, gemms=gemms)


def numbers(ranges: tuple[range, ...]) -> set[int]:
    return {m for part in ranges for m in part}


@given(st.integers(1, 20000))
def test_tokens_and_expected_are_every_m_up_to_the_limit(limit: int) -> None:
    plain, masked = site(), site(name="e", m="expected", groups=4)

    assert m_ranges(plain, profile(plain), limit) == (range(1, limit + 1),)
    assert m_ranges(masked, profile(masked), limit) == (range(1, limit + 1),)


def test_routed_is_every_multiple_of_the_alignment_up_to_full_padding() -> None:
    routed = site(m="routed", groups=256)

    assert m_ranges(routed, profile(routed), 8192) == (range(128, 8192 * 8 + 256 * 127 + 1, 128),)


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=16),
    top_k=st.integers(1, 8),
    alignment=st.sampled_from([1, 16, 128]),
    ep=st.sampled_from([1, 2]),
)
def test_routed_holds_every_layout_of_the_experts_rows(
    counts: list[int], top_k: int, alignment: int, ep: int
) -> None:
    # Rows of each local expert; with one rank all of a batch's rows are here, otherwise some are elsewhere.
    tokens = -(-sum(counts) // top_k)
    counts = [*counts[:-1], counts[-1] + (tokens * top_k - sum(counts) if ep == 1 else 0)]
    routed = site(m="routed", groups=len(counts))
    of = profile(routed, top_k=top_k, alignment=alignment, ep=ep)
    laid_out = sum(-(-count // alignment) * alignment for count in counts)

    if tokens:
        assert laid_out == 0 or laid_out in m_for_batch(routed, of, Batch(tokens=tokens))
        assert laid_out == 0 or laid_out in numbers(m_ranges(routed, of, tokens))


@given(tokens=st.integers(1, 600), limit=st.integers(600, 9000), groups=st.sampled_from([1, 32, 256]))
def test_buffer_sized_without_counts_is_in_the_universe(tokens: int, limit: int, groups: int) -> None:
    routed = site(m="routed", groups=groups)
    buffer = -(-(limit * 8 + groups * 127) // 128) * 128

    assert buffer in numbers(m_ranges(routed, profile(routed), limit))
    assert set(m_for_batch(routed, profile(routed), Batch(tokens=tokens))) <= numbers(
        m_ranges(routed, profile(routed), limit)
    )


def test_data_parallel_ranks_send_their_tokens_to_the_same_experts() -> None:
    routed = site(m="routed", groups=2)

    assert m_ranges(routed, profile(routed, dp=2, top_k=1), 128) == (range(128, 513, 128),)


@given(limit=st.integers(1, 3000), context=st.integers(1, 5000))
def test_context_meets_every_window_of_sixteen_rows(limit: int, context: int) -> None:
    expand = site(m="context")
    found = m_ranges(expand, profile(expand, context_tokens=context), limit)

    assert set(range(1, limit + 1)) <= numbers(found)
    windows = {(m - 1) // 16 for m in numbers(found)}
    assert windows == {(m - 1) // 16 for m in range(1, max(limit, context) + 1)}
    assert max(numbers(found)) == max(limit, context)
    # Disjoint parts: nothing is traced twice.
    assert sum(len(part) for part in found) == len(numbers(found))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1..4096", (range(1, 4097),)),
        ("64..1024/64, 2048", (range(64, 1025, 64), range(2048, 2049))),
        (" 7 ", (range(7, 8),)),
        ("1 .. 9 / 4,16", (range(1, 10, 4), range(16, 17))),
    ],
)
def test_listed_ranges_stand_whatever_the_limit(text: str, expected: tuple[range, ...]) -> None:
    listed = site(m=text)

    assert m_ranges(listed, profile(listed), 16) == expected


@pytest.mark.parametrize(
    "text", ["", "token", "1..", "9..1", "0..4", "1..9/0", "1,,2", "1.5", "-3", "1..2..3"]
)
def test_bad_rule_names_site_and_text(text: str) -> None:
    with pytest.raises(ProfileError) as caught:
        site(name="attention.o_proj", m=text)

    assert "attention.o_proj" in str(caught.value)
    assert f"m = {text!r}" in str(caught.value)


def test_rows_beyond_what_a_library_can_count_are_refused() -> None:
    one = site(m="routed", groups=2)

    with pytest.raises(ProfileError, match="more than 2147483647 rows"):
        m_ranges(one, msgspec.structs.replace(profile(one), top_k=2**20), 2**20)


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(ProfileError, match="max_tokens = 0"):
        m_ranges(site(), profile(site()), 0)


@pytest.mark.parametrize(
    ("changes", "batch", "expected"),
    [
        ({}, Batch(tokens=300), (300,)),
        ({}, Batch(tokens=0), ()),
        ({"m": "routed", "groups": 4}, Batch(tokens=0), ()),
        ({"m": "context"}, Batch(tokens=300, prefill_lengths=(200, 90), decodes=10), (290, 300)),
        ({"m": "context"}, Batch(tokens=8, decodes=8), (8,)),
        # 16 tokens x 8 in 4 experts: 32 each; or 33; 48 with a margin of a half; 16 as the bound.
        ({"m": "expected", "groups": 4}, Batch(tokens=16), (16, 32, 33, 48)),
        ({"m": "routed", "groups": 2}, Batch(tokens=16), (128, 256, 384)),
        ({"m": "8..64/8, 256"}, Batch(tokens=9), (16,)),
        ({"m": "8..64/8, 256"}, Batch(tokens=65), (256,)),
        ({"m": "8..64/8, 256"}, Batch(tokens=257), ()),
        ({"m": "256, 8..64/8"}, Batch(tokens=1), (8,)),
    ],
)
def test_batch_gives_the_ms_of_its_step(
    changes: dict[str, Any], batch: Batch, expected: tuple[int, ...]
) -> None:
    one = site(**changes)

    assert m_for_batch(one, profile(one), batch) == expected


@given(
    tokens=st.integers(1, 512),
    rule=st.sampled_from(["tokens", "routed", "context", "3..600/7"]),
    prefills=st.lists(st.integers(1, 40), max_size=5),
)
def test_what_a_batch_asks_for_is_in_the_universe(tokens: int, rule: str, prefills: list[int]) -> None:
    one = site(m=rule, groups=8 if rule == "routed" else 0)
    batch = Batch(tokens=max(tokens, sum(prefills)), prefill_lengths=tuple(prefills))

    asked = m_for_batch(one, profile(one), batch)

    assert set(asked) <= numbers(m_ranges(one, profile(one), 512))
    assert list(asked) == sorted(set(asked))
