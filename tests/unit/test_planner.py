from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.guard import Guard
from prefetchd.planner import BATCHES_AT_ONCE, Planner
from prefetchd.profiles import Profile, profile_from_config
from prefetchd.protocol import Batch, Request, request_from_fields
from prefetchd.provider import Limits, Provider, load_providers

MODELS = Path(__file__).parents[2] / "examples/models"
PROFILES = {
    name: profile_from_config(MODELS / f"{name}.json", tp=8)
    for name in ("deepseek-v3", "kimi-linear-48b-a3b", "qwen3-next-80b-a3b", "nemotron-h-8b")
}
PROVIDERS = load_providers()
PROFILE = PROFILES["deepseek-v3"]


def request(m: int) -> Request:
    return request_from_fields({"op": "fp8_gemm_nt", "m": m, "n": 512, "k": 512})


class Counts(Provider):
    """Asks for one request a token count, and says so in its keys."""

    name: ClassVar[str] = "counts"
    compilers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.planned: list[int] = []
        self.failing = False

    def plan(self, batch: Batch, profile: Profile) -> Iterable[Request]:
        self.planned.append(batch.tokens)
        if self.failing:
            raise RuntimeError("a provider that breaks its promise")
        return [request(batch.tokens)]

    def batch_keys(self, batch: Batch, profile: Profile) -> tuple[Hashable, ...]:
        return (batch.tokens,)

    def universe(self, profile: Profile, limits: Limits) -> Iterable[Request]:
        return ()

    def warm_up(self) -> None: ...

    def run(self, request: Request) -> None: ...


class Recorder:
    """What the planner needs of a client; the background thread is the test."""

    def __init__(self) -> None:
        self.guard, self.losses, self.wakes, self.taking = Guard(), 0, 0, True
        self.sources: list[Callable[[], bool]] = []
        self.plans: list[dict[str, list[Request]]] = []

    def add_source(self, source: Callable[[], bool]) -> None:
        self.sources.append(source)

    def wake(self) -> None:
        self.wakes += 1

    def plan(self, requests: Mapping[str, list[Request]]) -> bool:
        self.plans.append(dict(requests))
        return self.taking

    def work(self) -> None:
        """Until nothing is pending."""
        while any(source() for source in self.sources):
            pass

    def asked(self) -> list[Request]:
        return [one for plan in self.plans for requests in plan.values() for one in requests]


@pytest.fixture
def client() -> Recorder:
    return Recorder()


@pytest.fixture
def provider() -> Counts:
    return Counts()


@pytest.fixture
def planner(client: Recorder, provider: Counts) -> Planner:
    return Planner(PROFILE, {"counts": provider}, client)  # type: ignore[arg-type]


def batch(tokens: int) -> Batch:
    return Batch(tokens=tokens, prefill_lengths=(tokens,))


def test_provider_is_asked_in_the_background_and_only_what_is_new_is_sent(
    planner: Planner, client: Recorder, provider: Counts
) -> None:
    for tokens in (5, 7, 5):
        planner.on_schedule(batch(tokens))
    assert (provider.planned, client.wakes) == ([], 2)

    client.work()

    assert client.plans == [{"counts": [request(5), request(7)]}]
    planner.on_schedule(batch(7))
    client.work()
    assert (provider.planned, client.wakes) == ([5, 7], 2)


def test_request_known_from_another_batch_is_not_sent_again(
    planner: Planner, client: Recorder, provider: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "plan", lambda batch, profile: [request(1)])

    for tokens in (5, 7):
        planner.on_schedule(batch(tokens))
        client.work()

    assert client.asked() == [request(1)]


def test_many_batches_are_planned_a_few_at_a_time(planner: Planner, client: Recorder) -> None:
    for tokens in range(1, BATCHES_AT_ONCE + 2):
        planner.on_schedule(batch(tokens))

    assert client.sources[0]() is True
    assert client.sources[0]() is False
    assert [len(plan["counts"]) for plan in client.plans] == [BATCHES_AT_ONCE, 1]


def test_too_many_pending_batches_drop_the_oldest_which_is_planned_when_it_comes_again(
    planner: Planner, client: Recorder, provider: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefetchd.planner.MAX_PENDING", 2)
    for tokens in (1, 2, 3):
        planner.on_schedule(batch(tokens))
    client.work()
    assert (provider.planned, planner.dropped) == ([2, 3], 1)

    planner.on_schedule(batch(1))
    client.work()

    assert client.asked() == [request(2), request(3), request(1)]


def test_everything_is_asked_for_anew_when_the_client_lost_plans(planner: Planner, client: Recorder) -> None:
    planner.on_schedule(batch(5))
    client.work()

    client.losses += 1
    planner.on_schedule(batch(5))
    client.work()

    assert client.asked() == [request(5), request(5)]


def test_plan_the_client_cannot_take_may_be_asked_again(
    planner: Planner, client: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.taking = False
    planner.on_schedule(batch(5))
    client.work()
    client.taking = True

    monkeypatch.setattr("prefetchd.planner.MAX_KEYS", 0)
    planner.on_schedule(batch(6))
    planner.on_schedule(batch(5))
    client.work()

    assert client.asked() == [request(5), request(6), request(5)]


def test_memory_is_bounded_whatever_is_scheduled(
    planner: Planner, client: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefetchd.planner.MAX_KEYS", 10)
    monkeypatch.setattr("prefetchd.planner.MAX_ASKED", 10)

    for tokens in range(1, 100):
        planner.on_schedule(batch(tokens))
        client.work()

    assert all(len(family.met) <= 11 for family in planner._families)
    assert len(planner._asked) <= 11


def test_no_exception_of_a_provider_reaches_the_scheduler_or_stops_the_others(
    client: Recorder, provider: Counts
) -> None:
    broken = Counts()
    broken.failing = True
    planner = Planner(PROFILE, {"broken": broken, "counts": provider}, client)  # type: ignore[arg-type]

    planner.on_schedule(batch(5))
    client.work()
    planner.on_schedule(None)  # type: ignore[arg-type]

    assert client.asked() == [request(5)]
    assert client.guard.errors == 2


@pytest.mark.parametrize("part", ["_client", "_families", "_pending", "_losses", "_profile", "_asked"])
def test_no_exception_leaves_the_planner_whatever_part_of_it_fails(planner: Planner, part: str) -> None:
    setattr(planner, part, None)

    planner.on_schedule(batch(5))
    planner.work()


BATCHES = st.builds(
    lambda lengths, decodes, drafts, extra: Batch(
        tokens=sum(lengths) + decodes * (1 + drafts) + extra,
        prefill_lengths=tuple(lengths),
        decodes=decodes,
        speculative_tokens=decodes * drafts,
    ),
    st.lists(st.sampled_from([1, 2, 3, 16, 100, 255, 256, 257, 300]), max_size=20),
    st.sampled_from([0, 1, 2, 16, 17]),
    st.sampled_from([0, 0, 1, 3]),
    # A graph pads its batch.
    st.sampled_from([0, 0, 1]),
)


@pytest.mark.parametrize("model", PROFILES)
@given(st.lists(BATCHES, max_size=12), BATCHES, st.integers(0, 2**32))
def test_batch_whose_keys_were_all_met_has_nothing_new(
    model: str, met: list[Batch], last: Batch, seed: int
) -> None:
    # Permuted and regrouped lengths have the same sum, so that keys do meet.
    chance = random.Random(seed)
    met += [regrouped(last, chance) for _ in range(4)]
    profile = PROFILES[model]
    for provider in PROVIDERS.values():
        keys = {key for one in met for key in provider.batch_keys(one, profile)}
        if keys.issuperset(provider.batch_keys(last, profile)):
            known = {one for batch in met for one in provider.plan(batch, profile)}
            assert set(provider.plan(last, profile)) <= known


def regrouped(batch: Batch, chance: random.Random) -> Batch:
    lengths: list[int] = []
    for length in batch.prefill_lengths:
        cut = chance.randint(0, length)
        lengths += [part for part in (cut, length - cut) if part or chance.random() < 0.2]
    chance.shuffle(lengths)
    return Batch(
        tokens=batch.tokens,
        prefill_lengths=tuple(lengths),
        decodes=batch.decodes,
        speculative_tokens=batch.speculative_tokens,
    )


@pytest.mark.parametrize("model", PROFILES)
def test_batches_of_a_running_engine_become_known(model: str) -> None:
    chance = random.Random(0)
    planner_client = Recorder()
    planner = Planner(PROFILES[model], PROVIDERS, planner_client)  # type: ignore[arg-type]

    def step() -> None:
        decodes = chance.randint(0, 64)
        lengths = tuple(chance.randint(1, 64) for _ in range(chance.randint(0, 8)))
        planner.on_schedule(Batch(tokens=sum(lengths) + decodes, prefill_lengths=lengths, decodes=decodes))

    for _ in range(20_000):
        step()
        # What is pending is planned elsewhere; here only the keys matter.
        planner._pending.clear()
    planner_client.wakes = 0
    for _ in range(1000):
        step()

    # Were every batch its own key, all thousand would wake.
    assert planner_client.wakes < 50
