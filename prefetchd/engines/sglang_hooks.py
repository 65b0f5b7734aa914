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
from prefetchd.engines.sglang_settings import drafts_of, started_as, state_slots

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
# Where a rank has made its pools: whichever of these the release has.
POOLS_MADE = ("init_memory_pools", "init_model_worker")

seat = Seat(attach)


def install() -> None:
    """Hooks this process, once. Raises nothing."""
    try:
        installed = version("sglang")
        if not f"{installed}.".startswith(tuple(f"{series}." for series in KNOWN_SERIES)):
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

    def around_pools(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scheduler, *args, **kwargs)
        seat.tell_state_slots(lambda: state_slots(scheduler))
        return result

    def around_run(
        original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        seat.scheduled(lambda one: batch_of(one, drafts_of(module, scheduler)), batch)
        return original(scheduler, batch, *args, **kwargs)

    try:
        wrap(module.Scheduler, "init_model_config", around_config)
        wrap(module.Scheduler, "run_batch", around_run)
        made = [name for name in POOLS_MADE if hasattr(module.Scheduler, name)]
        wrap(module.Scheduler, made[0] if made else POOLS_MADE[0], around_pools)
    except NotFound as missing:
        log.warning(
            "prefetchd: this SGLang has no %s: it goes on without what that tells; update prefetchd", missing
        )
    except Exception as error:
        seat.guard.caught("hooking SGLang's scheduler", error)


def _attach(module: ModuleType, scheduler: Any) -> None:
    try:
        started = started_as(module, scheduler)
        seat.take(
            engine_profile(
                dict(scheduler.model_config.hf_config.to_dict()),
                started.model,
                SGLANG,
                tp=started.tp,
                ep=started.ep,
                dp=started.dp,
            ),
            engine="sglang",
            rank=started.rank,
            world=started.world,
            device=started.device,
            max_tokens=started.max_tokens,
            or_observe=True,
        )
    except Exception as error:
        seat.guard.caught("attaching a scheduler", error)
