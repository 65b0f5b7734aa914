"""TensorRT-LLM's executor has no plug-ins: three calls that its maintainers, or a user's patch, put there.

`attach_executor` once, in each rank's process before the model is built; `on_state_pool` when a model with
states has its cache manager; `on_batch` in the executor's loop, right after a batch was scheduled
(`docs/tensorrt-llm.md` says where). They raise nothing, and cost next to nothing unless `PREFETCHD` is set.
The subtle rule: a request that prefills in chunks says how long this one is, and one that never was chunked
says the rest of its prompt.
"""

from __future__ import annotations

import os
from typing import Any

from prefetchd.attaching import Handle, attach
from prefetchd.engines.profile import Engine, engine_profile
from prefetchd.engines.seat import Seat
from prefetchd.protocol import Batch

# Its kernels are its own: no home of ours holds them, so only matrix products are planned by configuration.
TENSORRT_LLM = Engine("tensorrt_llm", {})

seat = Seat(attach)


def attach_executor(hf_config: Any, mapping: Any, *, device: int, max_num_tokens: int) -> Handle:
    """Attaches this rank: the model's configuration, and the executor's `Mapping`. Raises nothing."""
    if os.environ.get("PREFETCHD", "") in ("", "0"):
        return Handle(reason="PREFETCHD is not set")
    try:
        fields = hf_config if isinstance(hf_config, dict) else hf_config.to_dict()
        found = engine_profile(
            fields,
            str(fields.get("_name_or_path") or fields.get("model_type") or "model"),
            TENSORRT_LLM,
            tp=int(mapping.tp_size),
            ep=int(getattr(mapping, "moe_ep_size", 1) or 1),
            dp=int(mapping.tp_size) if getattr(mapping, "enable_attention_dp", False) else 1,
        )
        return seat.take(
            found,
            engine="tensorrt_llm",
            rank=int(mapping.rank),
            world=int(mapping.world_size),
            device=device,
            max_tokens=max_num_tokens,
            or_observe=True,
        )
    except Exception as error:
        seat.guard.caught("attaching an executor", error)
        return Handle(reason=str(error))


def on_state_pool(slots: int) -> None:
    """How many states the rank's cache manager has made room for. Raises nothing."""
    seat.tell_state_slots(lambda: int(slots))


def on_batch(scheduled: Any) -> None:
    """The executor's next batch, a `ScheduledRequests`; on its thread, so in microseconds. Raises nothing."""
    seat.scheduled(batch_of, scheduled)


def batch_of(scheduled: Any) -> Batch | None:
    """The batch of a `ScheduledRequests`; None for one without requests."""
    lengths = tuple(map(_chunk, scheduled.context_requests))
    decodes = len(scheduled.generation_requests)
    if not lengths and not decodes:
        return None
    drafts = sum(int(request.num_draft_tokens or 0) for request in scheduled.generation_requests)
    return Batch(
        tokens=sum(lengths) + decodes + drafts,
        prefill_lengths=lengths,
        decodes=decodes,
        speculative_tokens=drafts,
    )


def _chunk(request: Any) -> int:
    return int(request.context_chunk_size or request.get_context_remaining_length())
