from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from prefetchd.guard import Guard
from prefetchd.planner import BATCHES_AT_ONCE, Planner
from prefetchd.profiles import Profile, profile_from_config
from prefetchd.protocol import Batch, Request, request_from_fields
from prefetchd.provider import Limits, Provider, load_providers
from prefetchd.targets import load_target

MODELS = Path(__file__).parents[2] / "examples/models"


def profile_of(model: str, home: str = "") -> Profile:
    """The model's; with the kernels of an engine's own copy, where more about a batch matters."""
    found = profile_from_config(MODELS / f"{model}.json", tp=8)
    kernels = [msgspec.structs.replace(site, home=home or site.home) for site in found.kernels]
    return msgspec.structs.replace(found, kernels=tuple(kernels))


PROFILES = {
    "deepseek-v3": profile_of("deepseek-v3"),
    "kimi-linear": profile_of("kimi-linear-48b-a3b"),
    "kimi-linear in vllm": profile_of("kimi-linear-48b-a3b", "vllm"),
    "qwen3-next in vllm": profile_of("qwen3-next-80b-a3b", "vllm"),
    "nemotron-h": profile_of("nemotron-h-8b"),
    "nemotron-h in vllm": profile_of("nemotron-h-8b", "vllm"),
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
    assert all(len(family.asked) <= 11 for family in planner._families)


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


@pytest.mark.parametrize("part", ["_client", "_families", "_pending", "_losses", "_profile"])
def test_no_exception_leaves_the_planner_whatever_part_of_it_fails(planner: Planner, part: str) -> None:
    setattr(planner, part, None)

    planner.on_schedule(batch(5))
    planner.work()


def scheduled(chance: random.Random) -> Batch:
    """A batch of few totals and any lengths, so that keys meet in batches that are otherwise unlike."""
    total, parts = chance.choice((0, 1, 16, 100, 256, 300, 4096)), chance.choice((1, 2, 3, 40))
    cuts = sorted(chance.randint(0, total) for _ in range(parts - 1))
    lengths = [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]
    decodes, drafts = chance.choice((0, 1, 2, 16)), chance.choice((0, 0, 1, 3))
    tokens = total + decodes * (1 + drafts)
    if chance.random() < 0.3:
        # A graph pads its batch.
        tokens = -(-tokens // 16) * 16
    return Batch(
        tokens=tokens,
        prefill_lengths=tuple(length for length in lengths if length),
        decodes=decodes,
        speculative_tokens=decodes * drafts,
    )


@pytest.mark.parametrize("model", PROFILES)
@pytest.mark.parametrize("name", PROVIDERS)
def test_batch_whose_keys_were_all_met_has_nothing_new(model: str, name: str) -> None:
    profile, provider = PROFILES[model], PROVIDERS[name]
    for seed in range(15):
        chance = random.Random(seed)
        met: set[Hashable] = set()
        known: set[Request] = set()
        for _ in range(60):
            batch = scheduled(chance)
            keys, requests = provider.batch_keys(batch, profile), set(provider.plan(batch, profile))
            if met.issuperset(keys):
                assert requests <= known, batch
            met.update(keys)
            known |= requests


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


def test_what_a_batch_or_the_universe_asked_for_is_known_as_asked() -> None:
    provider = load_providers(["deep_gemm"])
    limits = Limits(max_tokens=256, target=load_target("h200"))
    recorder = Recorder()
    planner = Planner(PROFILE, provider, recorder, lambda: limits)  # type: ignore[arg-type]
    site = PROFILE.gemms[0]

    def fields(m: int, k: int = site.k) -> Request:
        return request_from_fields({"op": site.op, "m": m, "n": site.n, "k": k, **site.options})

    assert planner.asked(fields(1))
    assert planner.asked(fields(256))
    assert not planner.asked(fields(257))
    assert not planner.asked(fields(1, site.k + 128))

    planner.on_schedule(Batch(tokens=300, prefill_lengths=(300,)))
    planner.work()

    assert planner.asked(fields(300))
    assert not planner.asked(fields(257))


def test_without_a_device_only_batches_have_asked() -> None:
    recorder = Recorder()
    counts = Counts()
    planner = Planner(PROFILE, {"counts": counts}, recorder)  # type: ignore[arg-type]
    planner.on_schedule(Batch(tokens=7))
    planner.work()

    assert planner.asked(request(7))
    assert not planner.asked(request(8))
