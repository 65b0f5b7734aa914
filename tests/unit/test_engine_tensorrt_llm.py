"""The calls for TensorRT-LLM, on stand-ins with the names of its public executor classes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefetchd.attaching import Handle
from prefetchd.engines import tensorrt_llm
from prefetchd.engines.seat import Seat
from prefetchd.protocol import Batch

DEEPSEEK = json.loads((Path(__file__).parents[2] / "examples/models/deepseek-v3.json").read_text())
MAPPING = SimpleNamespace(rank=5, world_size=8, tp_size=8, moe_ep_size=8, enable_attention_dp=True)


def context(chunk: int, remaining: int = 0) -> Any:
    return SimpleNamespace(context_chunk_size=chunk, get_context_remaining_length=lambda: remaining)


def generation(drafts: int) -> Any:
    return SimpleNamespace(num_draft_tokens=drafts)


@pytest.mark.parametrize(
    ("contexts", "generations", "expected"),
    [
        ([], [], None),
        ([context(256), context(0, 17)], [], Batch(tokens=273, prefill_lengths=(256, 17))),
        ([], [generation(0)] * 3, Batch(tokens=3, decodes=3)),
        (
            [context(64)],
            [generation(3), generation(1)],
            Batch(tokens=70, prefill_lengths=(64,), decodes=2, speculative_tokens=4),
        ),
    ],
    ids=["nothing", "chunk and whole prompt", "decode", "drafts"],
)
def test_scheduled_requests(contexts: list[Any], generations: list[Any], expected: Batch | None) -> None:
    scheduled = SimpleNamespace(context_requests=contexts, generation_requests=generations)

    assert tensorrt_llm.batch_of(scheduled) == expected


def test_rank_attaches_with_what_its_mapping_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = []

    def attach(profile: Any, **how: Any) -> Handle:
        asked.append((profile, how))
        return Handle()

    monkeypatch.setattr(tensorrt_llm, "seat", Seat(attach))
    monkeypatch.setenv("PREFETCHD", "1")

    tensorrt_llm.attach_executor(DEEPSEEK, MAPPING, device=5, max_num_tokens=4096)

    ((profile, how),) = asked
    assert (profile.tp, profile.ep, profile.dp, profile.quantization) == (8, 8, 8, "fp8")
    assert (how["rank"], how["world"], how["device"], how["max_tokens"]) == (5, 8, 5, 4096)


def test_pool_of_states_is_told_once_the_rank_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle()
    told: list[int] = []
    monkeypatch.setattr(handle, "use_state_slots", told.append)
    monkeypatch.setattr(tensorrt_llm, "seat", Seat(lambda profile, **how: handle))
    monkeypatch.setenv("PREFETCHD", "1")

    tensorrt_llm.on_state_pool(64)
    tensorrt_llm.attach_executor(DEEPSEEK, MAPPING, device=5, max_num_tokens=4096)
    tensorrt_llm.on_state_pool(64)
    tensorrt_llm.on_state_pool("many")  # type: ignore[arg-type]

    assert told == [64]
    assert tensorrt_llm.seat.guard.errors == 1


def test_switched_off_it_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFETCHD", raising=False)

    handle = tensorrt_llm.attach_executor(object(), object(), device=0, max_num_tokens=1)

    assert not handle.attached


def test_executor_that_cannot_be_read_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_llm, "seat", Seat(lambda profile, **how: Handle()))
    monkeypatch.setenv("PREFETCHD", "1")

    assert not tensorrt_llm.attach_executor(object(), object(), device=0, max_num_tokens=1).attached
    tensorrt_llm.on_batch(object())
    assert tensorrt_llm.seat.guard.errors == 1
