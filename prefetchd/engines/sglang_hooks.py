"""Where SGLang gets us called: each rank is a process with a scheduler and a device of its own.

It attaches as soon as its scheduler has read the model's configuration, which is before the weights load, and
tells each batch right before it is run. A batch of an overlapping scheduler is told while the device still
works on the one before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType
from typing import Any

from prefetchd.attaching import attach
from prefetchd.engines.hooks import NotFound, when_imported, wrap
from prefetchd.engines.profile import Engine, engine_profile
from prefetchd.engines.seat import Seat
from prefetchd.engines.sglang_batch import batch_of
from prefetchd.profiles import Profile

log = logging.getLogger("prefetchd")

# Series of SGLang whose scheduler has the names used here.
KNOWN_SERIES = ("0.5",)
SCHEDULER = "sglang.srt.managers.scheduler"
SGLANG = Engine(
    "sglang",
    {
        "fused_recurrent_kda": (("fused_recurrent_kda_packed_decode", "sglang"),),
        "fused_recurrent_gated_delta_rule": (
            ("fused_recurrent_gated_delta_rule_packed_decode", "sglang"),
            ("fused_sigmoid_gating_delta_rule_update", "sglang"),
        ),
    },
)
# SGLang's own limit where the user has set none: it prefills in chunks of this.
USUAL_CHUNK = 8192

seat = Seat(attach)


def install() -> None:
    """Hooks this process, once. Raises nothing."""
    try:
        installed = version("sglang")
        if not installed.startswith(tuple(f"{series}." for series in KNOWN_SERIES)):
            log.warning(
                "prefetchd: SGLang %s is not one that was tried (%s): it is observed, and nothing is planned "
                "for it; update prefetchd",
                installed,
                ", ".join(KNOWN_SERIES),
            )
            seat.take(None, engine="sglang", or_observe=True)
            return
        when_imported({SCHEDULER: _hook_scheduler})
    except Exception as error:
        seat.guard.caught("hooking SGLang", error)


def _hook_scheduler(module: ModuleType) -> None:
    def around_config(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scheduler, *args, **kwargs)
        _attach(module, scheduler)
        return result

    def around_run(
        original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        seat.scheduled(lambda one: batch_of(one, _drafts(scheduler)), batch)
        return original(scheduler, batch, *args, **kwargs)

    try:
        wrap(module.Scheduler, "init_model_config", around_config)
        wrap(module.Scheduler, "run_batch", around_run)
    except NotFound as missing:
        log.warning("prefetchd: this SGLang has no %s: it goes on without plans; update prefetchd", missing)
    except Exception as error:
        seat.guard.caught("hooking SGLang's scheduler", error)


def _attach(module: ModuleType, scheduler: Any) -> None:
    try:
        arguments = scheduler.server_args
        rank, device = _place(module, scheduler)
        seat.take(
            profile_of(scheduler.model_config, arguments),
            engine="sglang",
            rank=rank,
            world=int(arguments.tp_size) * int(getattr(arguments, "pp_size", 1) or 1),
            device=device,
            max_tokens=_max_tokens(arguments),
            or_observe=True,
        )
    except Exception as error:
        seat.guard.caught("attaching a scheduler", error)


def _place(module: ModuleType, scheduler: Any) -> tuple[int, int]:
    """Rank and device: of the process's context where the release has one, of the scheduler before."""
    parallel, device = getattr(module, "get_parallel", None), getattr(module, "get_device", None)
    if parallel is not None and device is not None:
        return int(parallel().tp_rank), int(device().gpu_id)
    return int(scheduler.tp_rank), int(scheduler.gpu_id)


def profile_of(model: Any, arguments: Any) -> Profile:
    """The profile of a `ModelConfig` and `ServerArgs`."""
    fields = dict(model.hf_config.to_dict())
    return engine_profile(
        fields,
        str(getattr(arguments, "served_model_name", None) or arguments.model_path),
        SGLANG,
        tp=int(arguments.tp_size),
        ep=int(getattr(arguments, "ep_size", 1) or 1),
        dp=int(getattr(arguments, "dp_size", 1) or 1),
    )


def _max_tokens(arguments: Any) -> int:
    chunk = int(getattr(arguments, "chunked_prefill_size", 0) or 0)
    return chunk if chunk > 0 else int(getattr(arguments, "max_prefill_tokens", 0) or USUAL_CHUNK)


def _drafts(scheduler: Any) -> int:
    """Beside the token that each request decodes anyway."""
    return max(int(getattr(scheduler.server_args, "speculative_num_draft_tokens", 0) or 0) - 1, 0)
