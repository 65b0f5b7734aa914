"""A whole vLLM on the null device with `PREFETCHD=1`: first start, replay, and a start that compiles nothing.

Needs the environment of `make env-vllm`; takes minutes a model.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; make test-vllm"),
]
if find_spec("vllm") is not None:
    from vllm_engine import STEPS
    from vllm_place import Place, Served
    from vllm_results import note_model, start_of

MODELS = ("kimi-linear", "deepseek-v3-fp8")
if os.environ.get("PREFETCHD_TEST_VLLM_ALL"):
    MODELS = (*MODELS, "nemotron-h", "qwen3-next")


@dataclass(frozen=True)
class Run:
    """A first start, the replay of what it compiled, and a second start; the caches are left as they are."""

    place: Place
    first: Served
    replay_s: float
    second: Served


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    made: dict[str, Run] = {}

    def get(model: str) -> Run:
        if model not in made:
            # Observed and not helped, so that the log names all that a start compiles.
            place = Place(tmp_path_factory.mktemp(model[:4]), model)
            first = place.serve(daemon=False, VLLM_DEEP_GEMM_WARMUP="skip")
            # Only what is replayed may help the second start.
            place.forget_kernels()
            begun = time.perf_counter()
            place.replay(1)
            replay_s = round(time.perf_counter() - begun, 1)
            second = place.serve(daemon=False, VLLM_DEEP_GEMM_WARMUP="skip")
            made[model] = Run(place, first, replay_s, second)
            note_model("replay", place, cold=start_of(first), replay_s=replay_s, replayed=start_of(second))
        return made[model]

    yield get
    for one in made.values():
        one.place.end_daemon()


@pytest.mark.parametrize("model", MODELS)
def test_every_prompt_of_the_first_start_returns_and_its_compiles_are_logged(
    run: Callable[[str], Run], model: str
) -> None:
    first = run(model).first

    assert first.tokens == [STEPS] * 5
    assert first.compiles()
    print(f"{model}: first start {start_of(first)}")


@pytest.mark.parametrize("model", MODELS)
def test_start_after_the_replay_compiles_nothing(run: Callable[[str], Run], model: str) -> None:
    second = run(model).second

    assert second.tokens == [STEPS] * 5
    assert second.compiles() == []
    assert second.new_entries == 0
    print(f"{model}: start {start_of(second)} after a replay of {run(model).replay_s} s")


def test_warm_up_of_deep_gemm_is_skipped_where_the_daemon_vouches_for_it(run: Callable[[str], Run]) -> None:
    place = run("deepseek-v3-fp8").place
    try:
        third = place.serve(PREFETCHD_WARMUP_WAIT_S="600")
    finally:
        place.end_daemon()

    assert "warm-up of them is skipped" in third.log
    assert third.compiles() == []


def test_daemon_killed_while_serving_costs_nothing_and_the_next_one_catches_up(
    run: Callable[[str], Run], tmp_path: Path
) -> None:
    # Its kernels are there: what is watched is the daemon, which has to find that out twice.
    place = run("kimi-linear").place
    with ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        # Core and worker in processes of their own, as `vllm serve` has them with several GPUs.
        serving = thread.submit(
            place.serve,
            'distributed_executor_backend="mp"',
            PAUSE=str(tmp_path),
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
        )
        try:
            wait_until((tmp_path / "paused").exists, serving)
            os.kill(place.daemon_pid(), signal.SIGKILL)
            stack.enter_context(place.start_daemon())
            # The engine's client comes back by itself and says again what its model can launch.
            wait_until(lambda: place.planned() > 0, serving)
            (tmp_path / "go").touch()
            served = serving.result()
        finally:
            (tmp_path / "go").touch()
            place.end_daemon()

    assert served.tokens == [STEPS] * 5


def wait_until(condition: Callable[[], bool], serving: Future[Served]) -> None:
    """Until the condition holds; fails with the engine if that ends before."""
    while not condition():
        assert not serving.done(), serving.result().log
        time.sleep(0.1)


def test_plug_in_changes_nothing_without_the_variable(run: Callable[[str], Run]) -> None:
    served = run("kimi-linear").place.serve(daemon=False, PREFETCHD="0")

    assert served.tokens == [STEPS] * 5
    assert served.records == []
    assert "prefetchd:" not in served.log.replace("prefetchd run:", "")
