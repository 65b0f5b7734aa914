from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.profiles import Profile
from prefetchd.profiles.sites import Flag, KernelSite
from prefetchd.protocol import (
    Batch,
    MalformedRequest,
    Request,
    decode_request,
    encode_request,
    request_from_fields,
)
from prefetchd.provider import Limits
from prefetchd.requests.mamba import CausalConv1d, GatedNorm, Mamba2, Mamba2Decode, Mamba2Prefill
from prefetchd.targets import load_target
from prefetchd_providers.mamba import MambaProvider
from prefetchd_providers.mamba_classes import class_of, count_class, natural_chunks

# mamba2-codestral-7b on one rank.
SIZES = {"heads": 128, "head_dim": 64, "groups": 8, "state": 128, "chunk": 256, "conv": 4}
# On 32 ranks a row of the projected buffer is 772 elements: every other row is not aligned to 16 bytes.
NARROW = {**SIZES, "heads": 4, "groups": 1}
OPS = ("mamba2_prefill", "mamba2_decode", "causal_conv1d", "gated_norm")


def site(
    op: str, home: str = "mamba_ssm", sizes: dict[str, int] = SIZES, **flags: Flag | tuple[Flag, ...]
) -> KernelSite:
    return KernelSite(name=op, op=op, home=home, sizes=sizes, flags=flags)


def profile(*sites: KernelSite) -> Profile:
    return Profile(
        model="test",
        architecture="test",
        tp=1,
        ep=1,
        dp=1,
        quantization="none",
        context_tokens=4096,
        kernels=sites,
    )


def universe(*sites: KernelSite, max_tokens: int = 8192) -> list[Request]:
    limits = Limits(max_tokens=max_tokens, target=load_target("h200"))
    return list(MambaProvider().universe(profile(*sites), limits))


def of(kind: type[Mamba2], requests: Iterable[Request]) -> list[Mamba2]:
    return [request for request in requests if isinstance(request, kind)]


class TestUniverse:
    def test_a_prefill_site_asks_for_the_seven_classes_of_token_counts(self) -> None:
        tokens = [r.tokens for r in universe(site("mamba2_prefill")) if isinstance(r, Mamba2Prefill)]
        assert sorted(tokens) == [1, 100, 256, 272, 300, 3940, 4096]

    def test_sizes_of_the_site_reach_the_request(self) -> None:
        (first, *_) = universe(site("mamba2_prefill"))
        assert isinstance(first, Mamba2Prefill)
        assert (first.heads, first.head_dim, first.groups, first.state, first.chunk) == (128, 64, 8, 128, 256)

    def test_a_list_of_values_for_a_flag_asks_for_each(self) -> None:
        both = universe(site("mamba2_prefill", initial_states=(True, False)))
        assert len(both) == 2 * len(universe(site("mamba2_prefill")))

    def test_a_convolution_is_asked_for_both_as_prefill_and_as_update(self) -> None:
        found = [r.decode for r in universe(site("causal_conv1d")) if isinstance(r, CausalConv1d)]
        assert sorted(set(found)) == [False, True]

    def test_a_convolution_site_can_be_for_one_of_them(self) -> None:
        found = [
            r.decode for r in universe(site("causal_conv1d", decode=True)) if isinstance(r, CausalConv1d)
        ]
        assert set(found) == {True}

    def test_counts_stay_within_the_limit(self) -> None:
        found = universe(*(site(op) for op in OPS), max_tokens=9)
        assert max(getattr(request, request.sweep_field or "") for request in found) <= 9

    def test_slot_numbers_behind_those_of_decodes_are_asked_for_unaligned(self) -> None:
        found = of(CausalConv1d, universe(site("causal_conv1d", home="vllm")))
        assert {request.unaligned for request in found} == {(), ("indices",)}

    def test_rows_whose_pitch_breaks_the_alignment_are_asked_for_both_ways(self) -> None:
        wide, narrow = (universe(site("mamba2_prefill", "vllm", sizes)) for sizes in (SIZES, NARROW))
        assert {request.unaligned for request in of(Mamba2, wide)} == {()}
        assert {request.unaligned for request in of(Mamba2, narrow)} == {(), ("dt",)}

    def test_the_library_itself_never_slices_a_batch(self) -> None:
        found = universe(*(site(op, sizes=NARROW) for op in OPS))
        assert {request.unaligned for request in of(Mamba2, found)} == {()}

    def test_a_site_that_names_its_unaligned_tensors_is_left_as_it_is(self) -> None:
        found = universe(site("mamba2_prefill", "vllm", NARROW, unaligned=("x", "dt")))
        assert {request.unaligned for request in of(Mamba2, found)} == {("x", "dt")}

    def test_nothing_is_asked_for_twice(self) -> None:
        found = universe(*(site(op, home, NARROW) for op in OPS for home in ("vllm",)))
        assert len(set(found)) == len(found)

    def test_sites_of_other_families_are_left_alone(self) -> None:
        assert universe(site("chunk_kda")) == []

    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            ({"softplus": True}, "site 'mamba2_prefill': mamba2_prefill has no flag 'softplus'"),
            ({"dt_dtype": "int8"}, "dt_dtype"),
            ({"unaligned": ("w",)}, "unaligned"),
        ],
    )
    def test_a_site_it_cannot_serve_is_named_with_its_flag(self, flags: dict[str, Flag], text: str) -> None:
        broken = msgspec.structs.replace(site("mamba2_prefill"), flags=flags)
        with pytest.raises(ValueError, match="site 'mamba2_prefill'") as caught:
            universe(broken)
        assert text in str(caught.value)

    def test_a_site_without_a_size_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"site 'mamba2_prefill'.*head_dim"):
            universe(site("mamba2_prefill", sizes={"heads": 8, "groups": 1, "state": 128, "chunk": 256}))


class TestPlan:
    def plan(self, batch: Batch, *sites: KernelSite) -> set[Request]:
        return set(MambaProvider().plan(batch, profile(*sites)))

    @given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(0, 100))
    def test_what_a_batch_needs_is_part_of_the_universe(self, lengths: list[int], decodes: int) -> None:
        sites = [site(op, home, sizes) for op in OPS for home, sizes in (("vllm", NARROW),)]
        batch = Batch(tokens=sum(lengths) + decodes, prefill_lengths=tuple(lengths), decodes=decodes)
        assert self.plan(batch, *sites) <= set(universe(*sites, max_tokens=1 << 16))

    @given(st.lists(st.integers(1, 3000), min_size=1, max_size=8))
    def test_a_prefill_is_planned_as_its_class(self, lengths: list[int]) -> None:
        tokens = sum(lengths)
        (found,) = self.plan(Batch(tokens=tokens, prefill_lengths=tuple(lengths)), site("mamba2_prefill"))
        assert isinstance(found, Mamba2Prefill)
        wanted = class_of(tokens, 256, natural_chunks(tokens, 256), found.row)
        assert class_of(found.tokens, 256, natural_chunks(found.tokens, 256), found.row) == wanted

    def test_decodes_ask_for_the_update_and_for_its_padded_size(self) -> None:
        found = self.plan(Batch(tokens=7, decodes=7), site("mamba2_decode"))
        assert {request.batch for request in found if isinstance(request, Mamba2Decode)} == {
            count_class(7),
            16,
        }

    def test_a_batch_of_decodes_asks_for_no_prefill(self) -> None:
        sites = (site("mamba2_prefill"), site("causal_conv1d"))
        found = self.plan(Batch(tokens=7, decodes=7), *sites)
        assert [request for request in found if not getattr(request, "decode", False)] == []

    def test_the_norm_runs_over_prefill_and_decodes_together(self) -> None:
        found = self.plan(Batch(tokens=17, prefill_lengths=(16,), decodes=1), site("gated_norm"))
        assert {request.tokens for request in found if isinstance(request, GatedNorm)} == {2, 16}

    def test_a_broken_site_asks_for_nothing_and_raises_nothing(self) -> None:
        assert self.plan(Batch(tokens=7, decodes=7), site("mamba2_decode", nonsense=1)) == set()


class TestRequests:
    def test_requests_survive_the_wire(self) -> None:
        for request in universe(*(site(op, "vllm", NARROW) for op in OPS)):
            assert decode_request(encode_request(request)) == request

    def test_a_role_that_does_not_exist_is_refused_by_name(self) -> None:
        fields = {"op": "gated_norm", "heads": 1, "head_dim": 64, "groups": 1, "state": 64, "tokens": 1}
        with pytest.raises(MalformedRequest, match="unaligned"):
            request_from_fields({**fields, "unaligned": ["q"]})

    def test_a_row_of_the_projected_buffer_holds_z_x_b_c_and_dt(self) -> None:
        request = GatedNorm(heads=128, head_dim=64, groups=8, state=128, tokens=1)
        assert (request.row, request.channels) == (2 * 8192 + 2 * 1024 + 128, 8192 + 2 * 1024)
