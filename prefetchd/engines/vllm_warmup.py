"""vLLM's warm-up passes, left out where all that they would compile is in the cache already.

DeepGEMM's pass walks hundreds of row counts, one after another, only to have their kernels compiled: the
daemon knows whether every row count of the model is published. The pass of hand-written Triton kernels is
known by what it used the last time (`warmup_ledger.py`). The subtle rule: only what is vouched for, sweep by
sweep or key by key, leaves a pass out, and never one in which something was measured: a winner is no kernel
that somebody could have made ahead. `PREFETCHD_KEEP_WARMUP=1` keeps both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

import msgspec

from prefetchd.attaching import Handle
from prefetchd.compilers.base import ROOT_FIELDS
from prefetchd.config import Settings, load_settings
from prefetchd.engines.hooks import wrap
from prefetchd.engines.seat import Seat
from prefetchd.engines.vllm_profile import has_other_products, profile_of_config, with_modules
from prefetchd.engines.warmup_ledger import (
    Collected,
    forget_ledger,
    is_covered,
    ledger_path,
    told,
    write_ledger,
)
from prefetchd.profiles import Profile
from prefetchd.profiles.codec import encode_profile
from prefetchd.protocol import State
from prefetchd.provider import Limits
from prefetchd.shapelog import log_directory
from prefetchd.targets import Target

log = logging.getLogger("prefetchd")

DEEP_GEMM, DEEP_GEMM_PASS = "deep_gemm", "VLLM_DEEP_GEMM_WARMUP"
# A daemon that is asked while it traces answers between two of its steps.
ANSWER_S = 5.0
# Between two questions while a start-up waits for what is under way.
PAUSE_S = 0.5
# On sm_90 vLLM makes its CuTe DSL kernels outside of the Triton pass, in every start.
OUTSIDE_ON_SM90 = frozenset({"cute_dsl"})
# A library that the pass may use and that nobody observes.
UNSEEN = "tilelang"


@contextlib.contextmanager
def skipping(worker: Any, seat: Seat) -> Iterator[None]:
    """Within it vLLM leaves out the passes that would compile nothing. Raises nothing of its own."""
    stack = contextlib.ExitStack()
    try:
        settings = load_settings()
        if seat.handle is not None and not settings.keep_warmup:
            _enter(worker, seat.handle, settings, stack)
    except Exception as error:
        seat.guard.caught("asking whether a warm-up pass is needed", error)
    try:
        yield
    finally:
        try:
            # Told of the engine's own failure, after which no list is complete.
            stack.__exit__(*sys.exc_info())
        except Exception as error:
            seat.guard.caught("noting what a warm-up pass used", error)


def _enter(worker: Any, handle: Handle, settings: Settings, stack: contextlib.ExitStack) -> None:
    from vllm import envs

    kernels = worker.vllm_config.kernel_config
    if kernels.enable_jit_warmup:
        stack.enter_context(_jit_pass(worker, handle, settings, kernels))
    if envs.VLLM_DEEP_GEMM_WARMUP != "skip" and _deep_gemm_is_covered(worker, handle, settings):
        log.warning(
            "prefetchd: every DeepGEMM kernel of this model is in the cache: vLLM's warm-up of them is "
            "skipped (PREFETCHD_KEEP_WARMUP=1 keeps it)"
        )
        stack.enter_context(_answering(envs, DEEP_GEMM_PASS, "skip"))


def _deep_gemm_is_covered(worker: Any, handle: Handle, settings: Settings) -> bool:
    """Asked for what the pass itself would walk, whatever profile is planned by."""
    model, tokens = worker.get_model(), int(worker.scheduler_config.max_num_batched_tokens)
    if has_other_products(model):
        return False
    walked = with_modules(profile_of_config(worker.vllm_config), model, tokens)
    return deep_gemm_is_covered(handle, walked, tokens, settings.warmup_wait_s)


def deep_gemm_is_covered(
    handle: Handle,
    profile: Profile,
    max_tokens: int,
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Whether the daemon says that every sweep of the profile's DeepGEMM sites is published for this rank.

    While some are under way it is asked again, for as long as a start-up may wait.
    """
    if handle.client is None or not profile.gemms:
        return False
    provider, target = handle.families.get(DEEP_GEMM), handle.client.hello().target
    if provider is None or target is None:
        return False
    sweeps = list(provider.universe_sweeps(profile, Limits(max_tokens=max_tokens, target=target)))
    deadline = clock() + wait_s
    while True:
        states = handle.client.states({DEEP_GEMM: sweeps}, ANSWER_S).get(DEEP_GEMM, ())
        if len(states) == len(sweeps) and all(state is State.PUBLISHED for state in states):
            return True
        # A daemon that does not answer yet may be starting; one that knows nothing of a sweep was not told.
        hopeless = State.FAILED in states
        if hopeless or clock() >= deadline:
            return False
        time.sleep(PAUSE_S)


@contextlib.contextmanager
def _jit_pass(worker: Any, handle: Handle, settings: Settings, kernels: Any) -> Iterator[None]:
    """Leaves the pass out, or notes what it uses."""
    target = handle.client.hello().target if handle.client is not None else None
    observer = handle.watch.observer if handle.watch is not None else None
    # vLLM's monitor takes a kernel that is loaded for one that is compiled: with its mode `error` an engine
    # that loads its kernels while it serves would fail.
    if target is None or worker.vllm_config.observability_config.jit_monitor_mode == "error":
        yield
        return
    path = ledger_path(log_directory(settings.log_dir, os.environ), _identity(worker, handle, target))
    if is_covered(path, target, dict(os.environ)):
        log.warning(
            "prefetchd: every kernel that vLLM's warm-up of Triton kernels used last time is in the cache: "
            "it is skipped, and with it vLLM's monitor of compiles, as ever without this pass; what is "
            "compiled is in prefetchd's log (PREFETCHD_KEEP_WARMUP=1 keeps both)"
        )
        wrap(worker, "_maybe_activate_jit_monitor", _left_out)
        kernels.enable_jit_warmup = False
        try:
            yield
        finally:
            kernels.enable_jit_warmup = True
    elif observer is None:
        yield
    else:
        collected = Collected()
        with told(observer, collected):
            yield
        if collected.complete and UNSEEN not in sys.modules:
            ignored = OUTSIDE_ON_SM90 if target.major == 9 else frozenset()
            write_ledger(path, {name: keys for name, keys in collected.keys().items() if name not in ignored})
        else:
            log.info(
                "prefetchd: vLLM's warm-up of Triton kernels measured some, or used some that have no name "
                "here: the next start goes through it as well"
            )
            forget_ledger(path)


def _identity(worker: Any, handle: Handle, target: Target) -> Iterator[str]:
    """All that decides which kernels a pass uses: those of another release lie in the cache as before."""
    from vllm import envs

    yield from (version("vllm"), worker.vllm_config.compute_hash(), str(worker.rank))
    yield encode_profile(handle.profile).hex() if handle.profile is not None else ""
    yield from (target.name, str(target.sm_count))
    assert handle.client is not None
    for _, fields in sorted(handle.client.hello().fingerprints.items()):
        yield from (f"{name}={text}" for name, text in sorted(fields.items()) if name not in ROOT_FIELDS)
    # vLLM's own variables choose kernels as well, and are in no configuration.
    factors = getattr(envs, "compile_factors", None)
    if callable(factors):
        yield from (f"{name}={value}" for name, value in sorted(factors().items()))


def _left_out(original: Callable[..., Any], *args: Any) -> None:
    """In place of a step of the start-up."""


@contextlib.contextmanager
def _answering(envs: ModuleType, name: str, value: str) -> Iterator[None]:
    """vLLM's settings answer this: where they are kept from the start, the environment is no longer read."""
    before = vars(envs).get(name, msgspec.UNSET)
    setattr(envs, name, value)
    try:
        yield
    finally:
        if before is msgspec.UNSET:
            delattr(envs, name)
        else:
            setattr(envs, name, before)
