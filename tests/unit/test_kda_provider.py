"""Universe and plan of KDA and the gated delta rule: few requests, and a batch names what was warmed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.profiles import KernelSite, Profile, profile_from_config, read_profile
from prefetchd.protocol import Batch, Request, op_of
from prefetchd.provider import Limits, Provider
from prefetchd.targets import load_target
from prefetchd_providers.gdn import GdnProvider
from prefetchd_providers.kda import KdaProvider

MODELS = Path(__file__).parents[2] / "examples/models"
MAX_TOKENS = 8192
LIMITS = Limits(max_tokens=MAX_TOKENS, target=load_target("h200"))
KIMI = MODELS / "kimi-linear-48b-a3b.json"
QWEN = MODELS / "qwen3-next-80b-a3b.json"


def with_flags(profile: Profile, flags: Mapping[str, Any], ops: tuple[str, ...] = ()) -> Profile:
    kernels = tuple(
        msgspec.structs.replace(site, flags=dict(flags))
        for site in profile.kernels
        if not ops or site.op in ops
    )
    return msgspec.structs.replace(profile, kernels=kernels)


def universe(provider: Provider, profile: Profile) -> list[Request]:
    return list(provider.universe(profile, LIMITS))


def tokens_by_op(requests: list[Request]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for request in requests:
        found.setdefault(op_of(request), []).append(request.tokens)  # type: ignore[attr-defined]
    return found


def test_kimi_linear_needs_a_dozen_requests() -> None:
    assert tokens_by_op(universe(KdaProvider(), profile_from_config(KIMI))) == {
        "chunk_kda": [128, 2049, 4097, 6145],
        "fused_recurrent_kda": [1],
        "fused_kda_gate": [1],
        "kda_short_conv": [1, 2, 16, 1],
        "kda_gated_norm": [128, 2049, 4097, 6145],
    }


def test_qwen3_next_buckets_keys_and_values_by_their_own_heads() -> None:
    found = tokens_by_op(universe(GdnProvider(), profile_from_config(QWEN)))

    assert found["chunk_gated_delta_rule"] == [128, 4097]
    assert found["gdn_gated_norm"] == [128, 2049, 4097, 6145]


def test_families_leave_each_other_alone() -> None:
    assert universe(GdnProvider(), profile_from_config(KIMI)) == []
    assert universe(KdaProvider(), profile_from_config(QWEN)) == []


def test_fla_layer_plans_with_and_without_a_state_and_packed_or_dense() -> None:
    profile = with_flags(profile_from_config(KIMI, tp=8), {"set": "fla-layer"}, ("chunk_kda",))

    found: list[Any] = universe(KdaProvider(), profile)

    assert {(request.initial_state, request.varlen) for request in found} == {
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    }


def test_convolution_is_split_or_joined_as_the_caller_does() -> None:
    profile = profile_from_config(QWEN)
    joined: list[Any] = universe(GdnProvider(), with_flags(profile, {"set": "vllm"}, ("gdn_short_conv",)))
    split: list[Any] = universe(GdnProvider(), with_flags(profile, {"split": True}, ("gdn_short_conv",)))

    assert {request.channels for request in joined} == {2 * 2048 + 4096}
    assert {request.channels for request in split} == {2048, 4096}


def test_lengths_are_rounded_to_chunks_where_they_must_be_aligned() -> None:
    profile = with_flags(profile_from_config(KIMI), {"lengths": ("aligned", "ragged")}, ("chunk_kda",))

    found: list[Any] = universe(KdaProvider(), profile)

    assert [r.tokens for r in found if r.lengths == "aligned"] == [128, 2112, 4160, 6208]
    assert [r.tokens for r in found if r.lengths == "ragged"] == [128, 2049, 4097, 6145]


def test_another_home_gets_the_finest_classes() -> None:
    profile = profile_from_config(KIMI, tp=8)
    kernels = tuple(
        msgspec.structs.replace(site, home="vllm") for site in profile.kernels if site.op == "chunk_kda"
    )

    found = tokens_by_op(universe(KdaProvider(), msgspec.structs.replace(profile, kernels=kernels)))

    assert found == {"chunk_kda": [1, 2, 16, 17, 32, 33, 48]}


@pytest.mark.parametrize("flag_set", ["vllm", "fla-layer", "sglang"])
@given(
    prefill=st.lists(st.integers(1, 2000), max_size=4),
    decodes=st.integers(0, 190),
)
def test_every_batch_plans_only_what_was_warmed(flag_set: str, prefill: list[int], decodes: int) -> None:
    ops = ("chunk_kda", "kda_short_conv", "kda_gated_norm")
    profile = with_flags(profile_from_config(KIMI), {"set": flag_set}, ops)
    batch = Batch(tokens=sum(prefill) + decodes, prefill_lengths=tuple(prefill), decodes=decodes)
    provider = KdaProvider()

    planned = set(provider.plan(batch, profile))

    assert planned <= set(universe(provider, profile))
    assert bool(planned) == bool(batch.tokens)


def test_drafts_plan_their_verification_and_decode_alone_does_not() -> None:
    profile = with_flags(
        profile_from_config(KIMI), {"set": ("vllm", "vllm-verify")}, ("fused_recurrent_kda",)
    )
    provider = KdaProvider()

    decode: list[Any] = list(provider.plan(Batch(tokens=8, decodes=8), profile))
    verify: list[Any] = list(provider.plan(Batch(tokens=32, decodes=8, speculative_tokens=3), profile))

    assert [request.per_sequence for request in decode] == [1]
    assert {request.per_sequence for request in verify} == {1, 2, 4}
    assert all(request.tokens % request.per_sequence == 0 for request in verify)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"flags": {"set": "vlm"}}, "no flag set 'vlm'"),
        ({"flags": {"qk_norm": True}}, "has no flag 'qk_norm'"),
        ({"flags": {"g_dtype": "fp8"}}, "g_dtype"),
        ({"sizes": {"heads": 4, "key_dim": 128, "width": 8}}, "has no size 'width'"),
        ({"sizes": {"heads": 4, "key_dim": 128}}, "value_dim"),
        ({"op": "kda_short_conv", "sizes": {"key_channels": 8, "conv": 4}}, "'value_channels' is missing"),
        ({"op": "kda_short_conv", "sizes": {"channels": 8}}, "unknown size 'channels'"),
    ],
)
def test_wrong_site_is_named_and_plans_nothing(change: dict[str, Any], words: str) -> None:
    site = KernelSite(
        name="mine", op="chunk_kda", sizes={"heads": 4, "key_dim": 128, "value_dim": 128}, flags={}
    )
    profile = msgspec.structs.replace(
        profile_from_config(KIMI), kernels=(msgspec.structs.replace(site, **change),)
    )
    provider = KdaProvider()

    with pytest.raises(ValueError, match=words) as caught:
        universe(provider, profile)
    assert "'mine'" in str(caught.value)
    assert list(provider.plan(Batch(tokens=8, prefill_lengths=(8,)), profile)) == []


@pytest.mark.parametrize(
    ("name", "heads"), [("kimi-k3-kda.profile.toml", 12), ("glm-5.3-flash-kda.profile.toml", 64)]
)
def test_example_profiles_of_kda_layers_alone(name: str, heads: int) -> None:
    found: list[Any] = universe(KdaProvider(), read_profile(MODELS / name))

    assert {request.heads for request in found if hasattr(request, "heads")} == {heads}


def test_planning_imports_no_torch() -> None:
    code = "import sys, prefetchd_providers.kda, prefetchd_providers.gdn; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
