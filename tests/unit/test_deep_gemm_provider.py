from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest

from prefetchd.profiles import GemmSite, Profile
from prefetchd.protocol import Batch, Request, Sweep, UnknownRequest, op_of, request_from_fields
from prefetchd.provider import Limits, Unavailable
from prefetchd.targets import load_target
from prefetchd_providers.deep_gemm import OPS, DeepGemmProvider, template

DENSE = GemmSite(name="qkv", op="fp8_gemm_nt", n=2112, k=7168, m="tokens")
ROUTED = GemmSite(
    name="experts", op="m_grouped_fp8_gemm_nt_contiguous", n=4096, k=7168, groups=32, m="routed"
)
MASKED = GemmSite(name="decode", op="m_grouped_fp8_gemm_nt_masked", n=4096, k=2048, groups=32, m="expected")
PLAIN = GemmSite(name="router", op="bf16_gemm_nt", n=256, k=7168, m="tokens")
INDEXER = GemmSite(
    name="indexer", op="fp8_fp4_mqa_logits", n=1, k=1, m="tokens", options={"heads": 64, "fp4": True}
)


def profile(*sites: GemmSite, alignment: int = 128) -> Profile:
    return Profile(
        model="test",
        architecture="test",
        tp=1,
        ep=1,
        dp=1,
        quantization="fp8",
        top_k=8,
        alignment=alignment,
        context_tokens=4096,
        gemms=sites,
    )


def universe(subject: Profile, max_tokens: int = 64, target: str = "h200") -> list[Sweep]:
    limits = Limits(max_tokens=max_tokens, target=load_target(target))
    return list(DeepGemmProvider().universe_sweeps(subject, limits))


def field(request: Request, name: str) -> Any:
    return getattr(request, name)


class TestUniverse:
    def test_dense_sites_take_every_row_count(self) -> None:
        (sweep, _) = universe(profile(DENSE))
        assert sweep.label() == "fp8_gemm_nt n=2112 k=7168 m=1..64"

    def test_contiguous_experts_take_every_multiple_of_the_alignment(self) -> None:
        (sweep, _) = universe(profile(ROUTED))
        assert [field(request, "m") % 128 for request in sweep.expand()] == [0] * len(sweep)
        assert sweep.values[0][:1] == (128,)

    def test_masked_experts_sweep_the_expected_rows(self) -> None:
        (sweep, _) = universe(profile(MASKED))
        assert [field(request, "expected_m") for request in sweep.expand()] == list(range(1, 65))

    def test_sites_without_shapes_of_their_own_take_theirs_from_options(self) -> None:
        (sweep,) = universe(profile(INDEXER))
        assert sweep.label() == "fp8_fp4_mqa_logits heads=64 fp4=True tokens=1..64"

    def test_other_scale_layouts_cost_one_request_for_each_k(self) -> None:
        subject = profile(DENSE, msgspec.structs.replace(DENSE, name="other", n=576), MASKED, PLAIN)
        extra = [sweep.request for sweep in universe(subject) if not sweep.values]
        assert [(field(r, "k"), field(r, "scale_layout")) for r in extra] == [(7168, "rows"), (2048, "rows")]

    def test_blackwell_adds_the_one_packing_kernel(self) -> None:
        hopper, blackwell = (universe(profile(DENSE), target=name) for name in ("h200", "b200"))
        (extra,) = blackwell[len(hopper) :]
        assert blackwell[: len(hopper)] == hopper
        assert extra.label() == "fp8_gemm_nt m=128 n=2112 k=7168 scales=float32 scale_layout=columns"

    def test_layouts_stated_by_the_site_are_not_second_guessed(self) -> None:
        stated = msgspec.structs.replace(DENSE, options={"scale_layout": "rows", "scales": "float32"})
        assert len(universe(profile(stated))) == 1

    def test_another_alignment_reaches_the_library(self) -> None:
        (sweep, _) = universe(profile(ROUTED, alignment=64))
        assert field(sweep.request, "alignment") == 64

    def test_requests_are_the_sweeps_expanded(self) -> None:
        subject = profile(DENSE, ROUTED)
        limits = Limits(max_tokens=64, target=load_target("h200"))
        asked = list(DeepGemmProvider().universe(subject, limits))
        assert len(asked) == sum(len(sweep) for sweep in universe(subject))

    def test_unknown_ops_stay_in_it_and_are_reported_when_run(self) -> None:
        site = msgspec.structs.replace(DENSE, op="fp7_gemm_nt")
        (sweep,) = universe(profile(site))
        assert isinstance(sweep.request, UnknownRequest)
        assert op_of(sweep.request) == "fp7_gemm_nt"
        with pytest.raises(Unavailable, match="fp7_gemm_nt"):
            DeepGemmProvider().run(sweep.request)


class TestOptions:
    def test_set_any_field_of_the_op(self) -> None:
        site = msgspec.structs.replace(DENSE, options={"output": "float32", "accumulate": True})
        assert template(site) == request_from_fields(
            {"op": "fp8_gemm_nt", "m": 1, "n": 2112, "k": 7168, "output": "float32", "accumulate": True}
        )

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"scale": "ue8m0"}, "has no option 'scale'"),
            ({"scales": "ue9m0"}, "scales"),
            ({"n": 64}, "has no option 'n'"),
            ({"m": 64}, "has no option 'm'"),
            ({"weight_block": 64}, "weight_block"),
        ],
    )
    def test_bad_ones_are_an_error_that_names_the_site(self, options: dict[str, Any], said: str) -> None:
        subject = profile(msgspec.structs.replace(DENSE, options=options))
        with pytest.raises(ValueError, match=f"site 'qkv'.*{said}"):
            universe(subject)


class TestPlan:
    def test_is_part_of_the_universe(self) -> None:
        subject = profile(DENSE, ROUTED, MASKED, PLAIN, INDEXER)
        whole = set(DeepGemmProvider().universe(subject, Limits(max_tokens=64, target=load_target("h200"))))
        for tokens in (1, 7, 63, 64):
            plan = set(DeepGemmProvider().plan(Batch(tokens=tokens, decodes=tokens), subject))
            assert plan
            assert plan <= whole

    def test_raises_nothing_for_a_profile_it_cannot_serve(self) -> None:
        subject = profile(msgspec.structs.replace(DENSE, options={"nonsense": 1}))
        assert list(DeepGemmProvider().plan(Batch(tokens=4), subject)) == []

    def test_follows_a_change_of_profile(self) -> None:
        provider = DeepGemmProvider()
        for n in (64, 128):
            (request, _) = provider.plan(Batch(tokens=4), profile(msgspec.structs.replace(DENSE, n=n)))
            assert field(request, "n") == n

    def test_of_a_batch_takes_microseconds(self) -> None:
        sites = [msgspec.structs.replace(DENSE, name=f"site{i}", n=64 * (i + 1)) for i in range(16)]
        subject, provider = profile(*sites), DeepGemmProvider()
        taken = []
        for _ in range(200):
            batch = Batch(tokens=256, decodes=256)
            begun = time.perf_counter_ns()
            list(provider.plan(batch, subject))
            taken.append(time.perf_counter_ns() - begun)
        assert statistics.median(taken) < 200_000


def test_every_request_type_of_the_family_is_an_op() -> None:
    assert len(OPS) == len(set(OPS.values())) > 30


def test_planning_imports_neither_torch_nor_the_library() -> None:
    code = (
        "import sys; from prefetchd_providers.deep_gemm import DeepGemmProvider; DeepGemmProvider();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'deep_gemm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
