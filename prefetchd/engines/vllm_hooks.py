"""Where vLLM's V1 engine gets us called, in whichever of its processes the place happens to run.

A worker attaches before it loads the model, with the device it has chosen, and says more once the modules
are built. The engine's core hands each scheduled step to the planner: by the worker's handle where both are
one process, else by one of its own. The subtle rule is that only a vLLM whose series was tried is hooked like
this; any other one is observed, which needs none of its functions but the worker's start.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from prefetchd.attaching import attach
from prefetchd.baking.order import read_order
from prefetchd.engines.hooks import NotFound, when_imported, wrap
from prefetchd.engines.seat import Seat
from prefetchd.engines.vllm_batch import batch_of
from prefetchd.engines.vllm_profile import profile_of_config, state_slots, with_modules
from prefetchd.engines.vllm_warmup import skipping
from prefetchd.profiles import Profile
from prefetchd.profiles.codec import decode_profile

log = logging.getLogger("prefetchd")

# Series of vLLM in which every name used here was tried; a patch release keeps them.
KNOWN_SERIES = ("0.33",)
CORE, WORKER = "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"
DEEP_GEMM_CACHE = "DG_JIT_CACHE_DIR"
ASKED_BY_CORE = "prefetchd_profile"

seat = Seat(attach)


def install() -> None:
    """Hooks this process, once. Raises nothing, unless this engine is baked and therefore serves nobody."""
    if (baked := read_order(os.environ)) is not None:
        from prefetchd.engines import vllm_bake

        vllm_bake.install(*baked)
        return
    try:
        installed = version("vllm")
        known = f"{installed}.".startswith(tuple(f"{series}." for series in KNOWN_SERIES))
        if not known:
            log.warning(
                "prefetchd: vLLM %s is not one that was tried (%s): it is observed, and nothing is planned "
                "for it; update prefetchd",
                installed,
                ", ".join(KNOWN_SERIES),
            )
        _name_deep_gemm_cache()
        hooks: dict[str, Callable[[ModuleType], None]] = {
            WORKER: _guarded(_hook_worker if known else _hook_unknown_worker)
        }
        if known:
            hooks[CORE] = _guarded(_hook_core)
        when_imported(hooks)
    except Exception as error:
        seat.guard.caught("hooking vLLM", error)


def _guarded(hook: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """The hook, whose failure is one line in vLLM's log and never an import that fails."""

    def guarded(module: ModuleType) -> None:
        try:
            hook(module)
        except NotFound as missing:
            log.warning("prefetchd: this vLLM has no %s: it goes on without plans; update prefetchd", missing)
        except Exception as error:
            seat.guard.caught(f"hooking {module.__name__}", error)

    return guarded


def _name_deep_gemm_cache() -> None:
    """Sets what vLLM itself sets at its first use of DeepGEMM: the daemon must know it before that."""
    if not os.environ.get(DEEP_GEMM_CACHE):
        from vllm import envs

        os.environ[DEEP_GEMM_CACHE] = str(Path(envs.VLLM_CACHE_ROOT) / "deep_gemm")
    # The library makes it at its first compile. A daemon makes two levels of a user's cache and no more.
    with contextlib.suppress(OSError):
        Path(os.environ[DEEP_GEMM_CACHE].partition(":")[0]).mkdir(parents=True, exist_ok=True)


def _hook_worker(module: ModuleType) -> None:
    wrap(module.Worker, "load_model", _around_load)
    wrap(module.Worker, "initialize_from_config", _around_caches)
    wrap(module.Worker, "compile_or_warm_up_model", _around_warmup)
    # The passes alone: what follows them sizes buffers as well, and is never left out.
    wrap(module, "kernel_warmup", _around_passes)
    # Called by name, whichever process the worker is.
    setattr(module.Worker, ASKED_BY_CORE, lambda worker: seat.profile())


def _hook_unknown_worker(module: ModuleType) -> None:
    wrap(module.Worker, "load_model", _around_unknown_load)


def _hook_core(module: ModuleType) -> None:
    wrap(module.EngineCore, "__init__", _around_core)


def _around_load(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    profile = _attach_worker(worker)
    result = original(worker, *args, **kwargs)
    if profile is not None:
        try:
            limit = _max_tokens(worker.vllm_config)
            seat.use_profile(with_modules(profile, worker.get_model(), limit), limit)
        except Exception as error:
            seat.guard.caught("reading the model's modules", error)
    return result


def _attach_worker(worker: Any) -> Profile | None:
    try:
        profile = profile_of_config(worker.vllm_config)
        parallel = worker.parallel_config
        seat.take(
            profile,
            engine="vllm",
            # As vLLM counts them for torch: a replica's workers come after those of the replica before.
            rank=parallel.data_parallel_rank * parallel.world_size + worker.rank,
            world=parallel.data_parallel_size * parallel.world_size,
            device=worker.device.index or 0,
            max_tokens=_max_tokens(worker.vllm_config),
            or_observe=True,
        )
    except Exception as error:
        seat.guard.caught("attaching a worker", error)
        return None
    return profile


def _around_unknown_load(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        seat.take(None, engine="vllm", rank=getattr(worker, "rank", 0), or_observe=True)
    except Exception as error:
        seat.guard.caught("attaching a worker", error)
    return original(worker, *args, **kwargs)


def _around_caches(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(worker, *args, **kwargs)
    seat.tell_state_slots(lambda: state_slots(worker.model_runner.kv_cache_config))
    return result


def _around_warmup(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    # By then Inductor has chosen its directories, and moves Triton's below them.
    seat.refresh()
    result = original(worker, *args, **kwargs)
    seat.refresh()
    return result


def _around_passes(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    with skipping(worker, seat):
        return original(worker, *args, **kwargs)


def _around_core(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(core, *args, **kwargs)
    try:
        if seat.handle is None:
            _attach_core(core)
            seat.tell_state_slots(lambda: state_slots(core.scheduler.kv_cache_config))
        wrap(core.scheduler, "schedule", _around_schedule)
    except Exception as error:
        seat.guard.caught("following the scheduler", error)
    return result


def _attach_core(core: Any) -> None:
    """A core whose workers are processes of their own; they have the devices, and say what these are."""
    config = core.vllm_config
    seat.take(
        _profile_of_workers(core) or profile_of_config(config),
        engine="vllm-scheduler",
        rank=config.parallel_config.data_parallel_rank,
        world=config.parallel_config.data_parallel_size,
        max_tokens=_max_tokens(config),
        or_observe=True,
    )


def _profile_of_workers(core: Any) -> Profile | None:
    """What the workers have read off the modules they built; None where they differ or do not say.

    No limit of time: an answer that came too late would be taken for the answer to vLLM's next call. The
    workers have just finished their start, and have the answer ready.
    """
    try:
        answers = set(core.model_executor.collective_rpc(ASKED_BY_CORE))
        (encoded,) = answers if len(answers) == 1 else (b"",)
        return decode_profile(encoded) if encoded else None
    except Exception as error:
        seat.guard.caught("asking the workers for their profile", error)
        return None


def _around_schedule(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = original(*args, **kwargs)
    seat.scheduled(batch_of, output)
    return output


def _max_tokens(config: Any) -> int:
    return int(config.scheduler_config.max_num_batched_tokens)
