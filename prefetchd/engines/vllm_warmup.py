"""vLLM's warm-up passes, left out where all that they would compile is in the cache already.

DeepGEMM's pass walks hundreds of row counts, one after another, only to have their kernels compiled. The
daemon knows whether every row count of the model is published; then the pass compiles nothing, and is
skipped. The subtle rule: only what the daemon vouches for sweep by sweep counts. No answer, a sweep that
failed or one that is under way leave the pass as vLLM has it, and so does `PREFETCHD_KEEP_WARMUP=1`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from prefetchd.config import load_settings
from prefetchd.engines.seat import Seat
from prefetchd.protocol import State
from prefetchd.provider import Limits

log = logging.getLogger("prefetchd")

DEEP_GEMM, DEEP_GEMM_PASS = "deep_gemm", "VLLM_DEEP_GEMM_WARMUP"
# A daemon that is asked while it traces answers between two of its steps.
ANSWER_S = 5.0
# Between two questions while a start-up waits for what is under way.
PAUSE_S = 0.5


@contextlib.contextmanager
def skipping(worker: Any, seat: Seat) -> Iterator[None]:
    """Within it vLLM leaves out the passes that would compile nothing. Raises nothing of its own."""
    skip = False
    try:
        settings = load_settings()
        skip = (
            not settings.keep_warmup
            and _pass_is_on()
            and deep_gemm_is_covered(
                seat, int(worker.scheduler_config.max_num_batched_tokens), settings.warmup_wait_s
            )
        )
    except Exception as error:
        seat.guard.caught("asking whether a warm-up pass is needed", error)
    if not skip:
        yield
        return
    log.info(
        "prefetchd: every DeepGEMM kernel of this model is in the cache: vLLM's warm-up of them is skipped "
        "(PREFETCHD_KEEP_WARMUP=1 keeps it)"
    )
    before = os.environ.get(DEEP_GEMM_PASS)
    os.environ[DEEP_GEMM_PASS] = "skip"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DEEP_GEMM_PASS]
        else:
            os.environ[DEEP_GEMM_PASS] = before


def _pass_is_on() -> bool:
    return os.environ.get(DEEP_GEMM_PASS) != "skip"


def deep_gemm_is_covered(
    seat: Seat, max_tokens: int, wait_s: float, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Whether the daemon says that every sweep of the model's DeepGEMM sites is published for this rank.

    While some are under way it is asked again, for as long as a start-up may wait.
    """
    handle = seat.handle
    if handle is None or handle.client is None or handle.profile is None:
        return False
    provider, target = handle.families.get(DEEP_GEMM), handle.client.hello().target
    if provider is None or target is None or not handle.profile.gemms:
        return False
    sweeps = list(provider.universe_sweeps(handle.profile, Limits(max_tokens=max_tokens, target=target)))
    deadline = clock() + wait_s
    while True:
        states = handle.client.states({DEEP_GEMM: sweeps}, ANSWER_S).get(DEEP_GEMM, ())
        if len(states) == len(sweeps) and all(state is State.PUBLISHED for state in states):
            return True
        under_way = states and State.FAILED not in states and State.UNKNOWN not in states
        if not under_way or clock() >= deadline:
            return False
        time.sleep(PAUSE_S)
