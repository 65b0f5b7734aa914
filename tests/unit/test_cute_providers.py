"""Which provider serves a site of CuTe kernels, what it asks for, and the engine's own pool size in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefetchd.cute.pools import with_state_pool
from prefetchd.profiles import Profile
from prefetchd.profiles.sites import KernelSite
from prefetchd.protocol import Batch
from prefetchd.provider import Limits, load_providers
from prefetchd.requests.delta import sequence_lengths
from prefetchd.targets import load_target

SIZES = {"heads": 2, "key_dim": 128, "value_dim": 128}
LIMITS = Limits(max_tokens=256, target=load_target("b200"))


def site(op: str, home: str, **flags: Any) -> KernelSite:
    sizes = SIZES if op != "fused_kda_decode" else {"heads": 2, "key_dim": 128}
    return KernelSite(name=f"{op} {home}", op=op, home=home, sizes=sizes, flags=flags)


def profile(*sites: KernelSite) -> Profile:
    return Profile(
        model="m", architecture="a", tp=1, ep=1, dp=1, quantization="none", context_tokens=1, kernels=sites
    )


@pytest.fixture
def universe() -> Callable[[str, Profile], list[Any]]:
    def of(provider: str, chosen: Profile) -> list[Any]:
        return list(load_providers([provider])[provider].universe(chosen, LIMITS))

    return of


def test_one_op_is_served_by_one_provider_by_its_home(universe: Callable[[str, Profile], list[Any]]) -> None:
    mixed = profile(*(site("chunk_kda", home) for home in ("fla", "flashinfer", "tensorrt_llm", "cute:a.b")))

    triton, cute = ({each.home for each in universe(name, mixed)} for name in ("kda", "kda_cute"))

    assert triton == {"fla"}
    assert cute == {"flashinfer", "tensorrt_llm", "cute:a.b"}


def test_prefills_are_asked_for_at_powers_of_two_from_two(
    universe: Callable[[str, Profile], list[Any]],
) -> None:
    found = universe("kda_cute", profile(site("chunk_kda", "flashinfer")))

    assert [request.tokens for request in found] == [2, 4, 8, 16, 32, 64, 128, 256]


def test_aligned_and_ragged_are_what_they_say_at_every_size(
    universe: Callable[[str, Profile], list[Any]],
) -> None:
    both = site("chunk_kda", "tensorrt_llm", lengths=("aligned", "ragged"), sequences=3)

    for request in universe("kda_cute", profile(both)):
        aligned = all(length % 64 == 0 for length in sequence_lengths(request))
        assert aligned is (request.lengths == "aligned"), request


def test_a_batch_asks_for_its_class_of_prefill_and_its_very_number_of_steps() -> None:
    (provider,) = load_providers(["kda_cute"]).values()
    chosen = profile(
        site("chunk_kda", "flashinfer"),
        site("fused_kda_decode", "flashinfer"),
        site("fused_recurrent_kda", "cute:a.b"),
    )
    batch = Batch(tokens=103, prefill_lengths=(100,), decodes=3)

    found = {(type(each).__name__, each.tokens) for each in provider.plan(batch, chosen)}

    assert {("ChunkKda", 128), ("FusedKdaDecode", 3), ("FusedRecurrentKda", 3)} <= found


def test_the_engines_pool_replaces_the_profiles_where_there_is_one(
    universe: Callable[[str, Profile], list[Any]],
) -> None:
    chosen = with_state_pool(
        profile(site("chunk_kda", "cute:a.b", pool=1), site("chunk_kda", "flashinfer")), 4711
    )

    assert {(each.home, each.pool) for each in universe("kda_cute", chosen)} == {
        ("cute:a.b", 4711),
        ("flashinfer", 0),
    }
    assert with_state_pool(chosen, 0) == chosen
    with pytest.raises(ValueError, match="slots = -1"):
        with_state_pool(chosen, -1)
