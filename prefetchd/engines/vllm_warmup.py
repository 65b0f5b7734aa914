"""vLLM's warm-up passes, left out where all that they would compile is in the cache already.

DeepGEMM's pass walks hundreds of row counts, one after another, only to have their kernels compiled: the
daemon knows whether every row count of the model is published. The pass of hand-written Triton kernels is
known by what it used the last time (`warmup_ledger.py`). The subtle rule: only what is vouched for, sweep by
sweep or key by key, leaves a pass out. `PREFETCHD_KEEP_WARMUP=1` keeps both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from prefetchd.attaching import Handle
from prefetchd.config import Settings, load_settings
from prefetchd.engines.hooks import wrap
from prefetchd.engines.seat import Seat
from prefetchd.engines.warmup_ledger import Collected, is_covered, ledger_path, write_ledger
from prefetchd.profiles.codec import encode_profile
from prefetchd.protocol import State
from prefetchd.provider import Limits
from prefetchd.shapelog import log_directory

log = logging.getLogger("prefetchd")

DEEP_GEMM, DEEP_GEMM_PASS = "deep_gemm", "VLLM_DEEP_GEMM_WARMUP"
# A daemon that is asked while it traces answers between two of its steps.
ANSWER_S = 5.0
# Between two questions while a start-up waits for what is under way.
PAUSE_S = 0.5
# On sm_90 vLLM makes its CuTe DSL kernels outside of the Triton pass, in every start.
OUTSIDE_ON_SM90 = frozenset({"cute_dsl"})


@contextlib.contextmanager
def skipping(worker: Any, seat: Seat) -> Iterator[None]:
    """Within it vLLM leaves out the passes that would compile nothing. Raises nothing of its own."""
    with contextlib.ExitStack() as stack:
        try:
            settings = load_settings()
            if seat.handle is not None and not settings.keep_warmup:
                _enter(worker, seat.handle, settings, stack)
        except Exception as error:
            seat.guard.caught("asking whether a warm-up pass is needed", error)
        yield


def _enter(worker: Any, handle: Handle, settings: Settings, stack: contextlib.ExitStack) -> None:
    tokens = int(worker.scheduler_config.max_num_batched_tokens)
    if os.environ.get(DEEP_GEMM_PASS) != "skip" and deep_gemm_is_covered(
        handle, tokens, settings.warmup_wait_s
    ):
        log.warning(
            "prefetchd: every DeepGEMM kernel of this model is in the cache: vLLM's warm-up of them is "
            "skipped (PREFETCHD_KEEP_WARMUP=1 keeps it)"
        )
        stack.enter_context(_variable(DEEP_GEMM_PASS, "skip"))
    kernels = worker.vllm_config.kernel_config
    if kernels.enable_jit_warmup:
        stack.enter_context(_triton_pass(worker, handle, settings, kernels))


def deep_gemm_is_covered(
    handle: Handle, max_tokens: int, wait_s: float, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Whether the daemon says that every sweep of the model's DeepGEMM sites is published for this rank.

    While some are under way it is asked again, for as long as a start-up may wait.
    """
    if handle.client is None or handle.profile is None or not handle.profile.gemms:
        return False
    provider, target = handle.families.get(DEEP_GEMM), handle.client.hello().target
    if provider is None or target is None:
        return False
    sweeps = list(provider.universe_sweeps(handle.profile, Limits(max_tokens=max_tokens, target=target)))
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
def _triton_pass(worker: Any, handle: Handle, settings: Settings, kernels: Any) -> Iterator[None]:
    """Leaves the pass out, or notes what it uses; vLLM's monitor of compiles is switched on in both cases."""
    target = handle.client.hello().target if handle.client is not None else None
    if target is None:
        yield
        return
    path = ledger_path(
        log_directory(settings.log_dir, os.environ),
        (
            version("vllm"),
            worker.vllm_config.compute_hash(),
            encode_profile(handle.profile).hex() if handle.profile is not None else "",
            target.name,
            str(target.sm_count),
            str(worker.rank),
        ),
    )
    if is_covered(path, target, dict(os.environ)):
        log.warning(
            "prefetchd: every kernel that vLLM's warm-up of Triton kernels used last time is in the cache: "
            "it is skipped (PREFETCHD_KEEP_WARMUP=1 keeps it)"
        )

        def around_monitor(original: Callable[..., Any], *args: Any) -> Any:
            # vLLM ties its monitor of compiles to the pass; one that is left out was not unwanted.
            kernels.enable_jit_warmup = True
            return original(*args)

        wrap(worker, "_maybe_activate_jit_monitor", around_monitor)
        kernels.enable_jit_warmup = False
        try:
            yield
        finally:
            kernels.enable_jit_warmup = True
        return
    observer = handle.watch.observer if handle.watch is not None else None
    if observer is None:
        yield
        return
    collected = Collected()
    with _told(observer, collected):
        yield
    ignored = OUTSIDE_ON_SM90 if target.major == 9 else frozenset()
    try:
        write_ledger(path, {name: found for name, found in collected.keys().items() if name not in ignored})
    except OSError as error:
        log.info("prefetchd: %s: %s; the next start goes through its warm-up as well", path, error)


@contextlib.contextmanager
def _told(observer: Any, collected: Collected) -> Iterator[None]:
    """What the observer hears of kernels meanwhile."""

    def around_hit(original: Callable[..., Any], compiler: str, key: str) -> Any:
        collected.add(compiler, key)
        return original(compiler, key)

    def around_started(original: Callable[..., Any], compiler: str, **how: Any) -> Any:
        collected.add(compiler, how.get("key", ""))
        return original(compiler, **how)

    wrap(observer, "hit", around_hit)
    wrap(observer, "started", around_started)
    try:
        yield
    finally:
        del observer.hit, observer.started


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
