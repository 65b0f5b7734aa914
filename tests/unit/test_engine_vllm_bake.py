"""vLLM under a bake: the tokens it is given, and its batches driven to their end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prefetchd.engines import vllm_bake
from prefetchd.engines.vllm_bake import TOKEN, Stuck, drive, supply_tokens


class Request:
    """One of a scheduler's: so many tokens of its prompt are left, and so many to be made."""

    def __init__(self, name: str, prompt: int, steps: int) -> None:
        self.request_id, self.left, self.steps = name, prompt, steps
        self.is_prefill_chunk = True
        self.made: list[int] = []


class Scheduler:
    """Prefills at most 100 tokens a step, then decodes."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def has_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> Any:
        budget, scheduled = 100, {}
        for name, request in self.requests.items():
            count = min(request.left, budget) if request.left else 1
            if count:
                scheduled[name] = count
                request.left = max(request.left - count, 0)
                request.is_prefill_chunk = request.left > 0
                budget -= count
        return SimpleNamespace(num_scheduled_tokens=scheduled)

    def update_from_output(self, output: Any, brought: Any) -> None:
        for name, tokens in zip(brought.req_ids, brought.sampled_token_ids, strict=True):
            request = self.requests[name]
            request.made += tokens
            if len(request.made) >= request.steps:
                del self.requests[name]


class Core:
    """The loop of an engine whose device hands back nothing."""

    request_block_hasher = None

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=4096),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=100),
        )
        self.posted = 0

    def step_fn(self) -> tuple[None, bool]:
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        brought = SimpleNamespace(req_ids=names, sampled_token_ids=[[] for _ in names])
        self.scheduler.update_from_output(output, brought)
        return None, True

    def post_step(self, executed: bool) -> None:
        self.posted += 1


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    def request(core: Core, name: str, length: int, steps: int, number: int) -> Request:
        return Request(name, length, steps)

    monkeypatch.setattr(vllm_bake, "_request", request)
    return Core()


def test_batch_comes_to_its_end_though_the_device_hands_back_nothing(core: Core) -> None:
    supply_tokens(core.scheduler)

    steps = drive(core, (250, 1), 4)

    assert not core.scheduler.has_requests()
    assert steps == core.posted >= 6  # three pieces of the long prompt, then three more tokens


def test_prompt_in_pieces_gets_a_token_only_with_its_last(core: Core) -> None:
    supply_tokens(core.scheduler)
    request = Request("long", 150, 4)
    core.scheduler.add_request(request)

    core.step_fn()
    assert request.made == []
    core.step_fn()
    assert request.made == [TOKEN]


def test_batch_that_never_ends_is_named(core: Core) -> None:
    with pytest.raises(Stuck, match="batch 64,1:"):
        drive(core, (64, 1), 4)
