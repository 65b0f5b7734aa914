"""What an SGLang scheduler's process was started as: rank, device, sizes, and how much it runs at once.

The subtle rule: where a release publishes its settings for the process, those count. There the arguments stay
as they were typed, so that what SGLang chose itself, such as the size of a chunk or the number of the
attention's replicas, is not in them at all.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

# SGLang's own limit where the user has set none: it prefills in chunks of this.
USUAL_CHUNK = 8192


class Started(NamedTuple):
    """One rank of an SGLang engine."""

    model: str
    rank: int
    world: int
    device: int
    tp: int
    ep: int
    # Replicas of the attention within the tensor-parallel group.
    dp: int
    max_tokens: int


def started_as(module: ModuleType, scheduler: Any) -> Started:
    """Of a scheduler whose class is this module's. Raises what a release without such settings raises."""
    arguments = scheduler.server_args
    parallel = _published(module, "get_parallel")
    if parallel is None:
        tp, pp, ep = (_count(arguments, name) for name in ("tp_size", "pp_size", "ep_size"))
        dp = _count(arguments, "dp_size") if getattr(arguments, "enable_dp_attention", False) else 1
        tp_rank, pp_rank, device = scheduler.tp_rank, getattr(scheduler, "pp_rank", 0), scheduler.gpu_id
    else:
        tp, pp, ep, dp = (
            _count(parallel, name) for name in ("tp_size", "pp_size", "ep_size", "attn_dp_size")
        )
        tp_rank, pp_rank = parallel.tp_rank, parallel.pp_rank
        device = module.get_device().gpu_id
    return Started(
        model=str(getattr(arguments, "served_model_name", None) or arguments.model_path),
        rank=int(pp_rank) * tp + int(tp_rank),
        world=tp * pp,
        device=int(device),
        tp=tp,
        ep=ep,
        dp=dp,
        max_tokens=_max_tokens(_published(module, "get_schedule") or arguments),
    )


def drafts_of(module: ModuleType, scheduler: Any) -> int:
    """How many drafts each request verifies beside the token that it decodes anyway."""
    settings = _published(module, "get_spec") or scheduler.server_args
    return max(int(getattr(settings, "speculative_num_draft_tokens", 0) or 0) - 1, 0)


def state_slots(scheduler: Any) -> int:
    """How many recurrent states the rank's pool holds; 0 for a model that keeps none.

    One place more than can be given out: padded requests write there.
    """
    requests, _ = scheduler.tp_worker.get_memory_pool()
    pool = getattr(requests, "mamba_pool", None)
    return 0 if pool is None else int(pool.size) + 1


def _published(module: ModuleType, accessor: str) -> Any:
    """A part of the process's settings; None in a release that has no such part."""
    found = getattr(module, accessor, None)
    return None if found is None else found()


def _count(settings: Any, name: str) -> int:
    return int(getattr(settings, name, 1) or 1)


def _max_tokens(settings: Any) -> int:
    chunk = int(getattr(settings, "chunked_prefill_size", 0) or 0)
    return chunk if chunk > 0 else int(getattr(settings, "max_prefill_tokens", 0) or USUAL_CHUNK)
