"""A profile learned from a log asks for what the log holds, whichever model it was."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.cli import main
from prefetchd.kernel_packages import HOME_PACKAGES
from prefetchd.learned_profile import LEARNED, Deployment, Learner, learn
from prefetchd.profiles import Profile, ProfileError, profile_from_config, read_profile, write_profile
from prefetchd.protocol import Batch, Request, expand, request_to_fields
from prefetchd.provider import Limits, Provider
from prefetchd.requests.deep_gemm import (
    Fp8GemmNt,
    Fp8GroupedContiguousNt,
    Fp8GroupedMaskedNt,
    Fp8PagedMqaLogits,
)
from prefetchd.requests.delta import ShortConvolution
from prefetchd.requests.kda import ChunkKda, FusedRecurrentKda, KdaShortConvolution
from prefetchd.requests.mamba import Mamba2Prefill
from prefetchd.shapelog import Record, encode_record
from prefetchd.targets import load_target
from prefetchd_providers.deep_gemm import DeepGemmProvider
from prefetchd_providers.delta_plan import templates
from prefetchd_providers.gdn import GdnProvider
from prefetchd_providers.kda import KdaProvider
from prefetchd_providers.mamba import MambaProvider

MODELS = Path(__file__).parents[2] / "examples/models"
MAX_TOKENS = 512
LIMITS = Limits(max_tokens=MAX_TOKENS, target=load_target("h200"))
DEPLOYMENT = Deployment(max_tokens=MAX_TOKENS)


def records(requests: Iterable[Request]) -> list[Record]:
    return [
        Record(compiler="c", key=f"k{number}", fingerprint="f", request=request_to_fields(request))
        for number, request in enumerate(requests)
    ]


def learned(requests: Iterable[Request], deployment: Deployment = DEPLOYMENT) -> Profile:
    return learn(records(requests), deployment, HOME_PACKAGES).profile()


def universe(provider: Provider, profile: Profile) -> set[Request]:
    return set(provider.universe(profile, LIMITS))


def gemm(m: int, **fields: Any) -> Fp8GemmNt:
    return Fp8GemmNt(m=m, n=fields.pop("n", 2112), k=fields.pop("k", 7168), **fields)


@pytest.mark.parametrize("model", ["deepseek-v3.json", "kimi-linear-48b-a3b.json", "qwen3-30b-a3b-fp8.json"])
def test_some_of_a_models_products_bring_back_its_profile(model: str, tmp_path: Path) -> None:
    profile = profile_from_config(MODELS / model, tp=8, ep=1, dp=1, quantization="fp8", context_tokens=2048)
    provider, chance = DeepGemmProvider(), random.Random(3)
    every = [chance.choice(list(sweep.expand())) for sweep in provider.universe_sweeps(profile, LIMITS) * 5]

    found = learned(every, Deployment(max_tokens=MAX_TOKENS, top_k=profile.top_k))
    write_profile(found, tmp_path / "learned.profile.toml")

    assert read_profile(tmp_path / "learned.profile.toml") == found
    assert set(every) <= {*universe(provider, found), *windows(provider, found, every)}
    sites = {(site.op, site.n, site.k, site.groups, site.m) for site in found.gemms if not site.options}
    wanted = {(site.op, site.n, site.k, site.groups, site.m) for site in profile.gemms}
    # A site that only ever saw batches looks like one of tokens.
    assert {site[:4] for site in wanted} == {site[:4] for site in sites}
    assert {site for site in wanted if site[4] in ("routed", "expected")} <= sites


def windows(provider: Provider, profile: Profile, requests: Iterable[Request]) -> set[Request]:
    """Those whose window of rows beyond the batch has a representative in the universe."""
    known = universe(provider, profile)
    return {
        request
        for request in requests
        if getattr(request, "m", 0) > MAX_TOKENS
        and msgspec.structs.replace(request, m=-(-request.m // 16) * 16) in known  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        (KdaProvider(), "kimi-linear-48b-a3b.json"),
        (GdnProvider(), "qwen3-next-80b-a3b.json"),
        (MambaProvider(), "mamba2-codestral-7b.json"),
        (MambaProvider(), "nemotron-h-8b.json"),
    ],
)
def test_universe_of_a_models_other_kernels_comes_back(
    provider: Provider, model: str, tmp_path: Path
) -> None:
    profile = profile_from_config(MODELS / model, tp=1, ep=1, dp=1, quantization="bf16")
    every = universe(provider, profile)
    assert every

    found = learned(every)
    write_profile(found, tmp_path / "learned.profile.toml")

    assert read_profile(tmp_path / "learned.profile.toml") == found
    assert every <= universe(provider, found)


@given(st.sets(st.integers(1, MAX_TOKENS), min_size=1, max_size=20))
def test_planning_a_batch_asks_for_what_such_a_batch_launched(values: set[int]) -> None:
    profile = learned(gemm(m, output="float32") for m in values)
    provider = DeepGemmProvider()

    for m in values:
        assert gemm(m, output="float32") in set(provider.plan(Batch(tokens=m), profile))


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [(Fp8GroupedContiguousNt, "m"), (Fp8GroupedMaskedNt, "expected_m"), (Fp8GemmNt, "m")]
            ),
            st.integers(1, 600),
            st.sampled_from([16, 128, 1]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([0, 8]),
)
def test_whatever_was_seen_is_asked_for(calls: list[tuple[Any, int, int]], top_k: int) -> None:
    requests = [
        kind(**{field: value * step}, n=512, k=256, **({"groups": 4} if kind is not Fp8GemmNt else {}))
        for (kind, field), value, step in calls
    ]
    provider = DeepGemmProvider()

    profile = learned(requests, Deployment(max_tokens=MAX_TOKENS, top_k=top_k))

    assert set(requests) <= {*universe(provider, profile), *windows(provider, profile, requests)}


def test_experts_follow_the_tokens_only_where_their_number_is_known() -> None:
    calls = [Fp8GroupedContiguousNt(groups=32, m=m, n=512, k=256) for m in (4096, 8192)]

    (ranges,) = learned(calls).gemms
    (routed,) = learned(calls, Deployment(max_tokens=MAX_TOKENS, top_k=8)).gemms

    assert (ranges.m, routed.m) == ("4096..8192/4096", "routed")
    assert "--top-k" in learned(calls).notes[0]
    assert not learned(calls, Deployment(max_tokens=MAX_TOKENS, top_k=8)).notes


def test_rows_beyond_the_batch_are_cached_context() -> None:
    profile = learned([gemm(100), gemm(9001), gemm(64, n=512)])

    assert [(site.n, site.m) for site in profile.gemms] == [(2112, "context"), (512, "tokens")]
    assert profile.context_tokens == 9008


def test_op_without_rows_and_columns_keeps_its_own_sizes() -> None:
    call = Fp8PagedMqaLogits(batch=7, heads=64, block_kv=128)

    assert call in universe(DeepGemmProvider(), learned([call]))


def test_flags_of_a_caller_are_a_site_and_not_every_combination() -> None:
    shape = {"heads": 4, "key_dim": 128, "value_dim": 128, "g_dtype": "float32"}
    calls = [
        ChunkKda(tokens=300, initial_state=True, qk_l2norm=True, **shape),
        ChunkKda(tokens=300, final_state=True, home="vllm", sequences=3, **shape),
        FusedRecurrentKda(tokens=8, per_sequence=4, accepted_tokens=True, lower_bound=-5, **shape),
        KdaShortConvolution(tokens=40, channels=512, conv=4, unaligned=("x",)),
    ]

    profile = learned(calls)
    kinds = KdaProvider.kinds

    assert len(profile.kernels) == 4
    planned = {template.request for template in templates(profile, kinds)}
    for call in calls:
        changes = {"tokens": 1} | ({"sequences": 1} if hasattr(call, "sequences") else {})
        assert msgspec.structs.replace(call, **changes) in planned
    convolutions = [one for one in planned if isinstance(one, ShortConvolution)]
    assert len(convolutions) == 1


def test_mamba_batch_is_planned_with_the_flags_that_were_seen() -> None:
    call = Mamba2Prefill(
        tokens=1000, chunk=256, heads=8, head_dim=64, groups=1, state=128, d="none", a_dtype="bfloat16"
    )
    profile = learned([call])

    planned = set(MambaProvider().plan(Batch(tokens=1000, prefill_lengths=(1000,)), profile))

    assert {(one.d, one.a_dtype, one.chunk) for one in planned if isinstance(one, Mamba2Prefill)} == {
        ("none", "bfloat16", 256)
    }


def test_what_cannot_be_learned_from_is_counted_with_its_reason() -> None:
    learner = Learner(DEPLOYMENT)
    bad: list[dict[str, Any]] = [
        {"op": "of the future", "m": 3},
        {"op": "fp8_gemm_nt", "m": -1, "n": 1, "k": 1},
        {"m": 3},
        {"op": "transform_sf_into_required_layout", "mn": 128, "k": 128},
        {"op": "fp8_gemm_nt", "m": object()},
    ]
    for fields in [*bad, request_to_fields(gemm(5))]:
        learner.add(fields)

    profile = learner.profile()

    assert (learner.requests, learner.left_out.total(), len(profile.notes)) == (1, 5, 5)


def test_home_that_no_setting_allows_enters_no_profile() -> None:
    # Whoever uses the profile imports its homes, and who wrote the log is unknown.
    for home, sites in (("mine.kernels", 1), ("fla", 1), ("antigravity", 0), ("cute:os", 0)):
        learner = Learner(DEPLOYMENT, (*HOME_PACKAGES, "mine"))
        learner.add(
            {"op": "chunk_kda", "tokens": 8, "heads": 2, "key_dim": 64, "value_dim": 64, "home": home}
        )
        learner.add(request_to_fields(gemm(5)))

        assert len(learner.profile().kernels) == sites, home


def test_notes_hold_nothing_that_a_terminal_obeys() -> None:
    learner = Learner(DEPLOYMENT)
    learner.add({"op": "\x1b]0;title\x07\nnote: all is well", "m": 3})
    learner.add(request_to_fields(gemm(5)))

    assert all(note.isprintable() for note in learner.profile().notes)


def test_log_of_a_thousand_models_is_bounded() -> None:
    learner = Learner(DEPLOYMENT)
    for n in range(3000):
        learner.add(request_to_fields(gemm(5, n=n + 1)))

    assert len(learner.profile().gemms) == 2000
    assert learner.left_out.total() == 1000


def test_log_without_requests_teaches_nothing() -> None:
    with pytest.raises(ProfileError, match="nothing to learn"):
        learned([])


def test_command_writes_a_profile_and_says_what_is_in_it(tmp_path: Path) -> None:
    log, out = tmp_path / "a.rank0.jsonl", tmp_path / "mine.profile.toml"
    log.write_bytes(b"".join(map(encode_record, records([gemm(5), gemm(7), gemm(7, n=64)]))))

    result = CliRunner().invoke(main, ["profile", "--from-log", str(log), "-o", str(out), "--json"])

    assert result.exit_code == 0, result.output
    assert json.loads(result.output) | {"notes": []} == {
        "out": str(out),
        "requests": 3,
        "gemms": 2,
        "kernels": 0,
        "left_out": 0,
        "notes": [],
    }
    profile = read_profile(out)
    assert (profile.model, len(profile.gemms)) == (LEARNED, 2)
    assert len(list(expand(DeepGemmProvider().universe_sweeps(profile, LIMITS)))) > 2 * MAX_TOKENS
