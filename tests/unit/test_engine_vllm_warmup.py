"""vLLM's warm-up passes, left out or kept, on the vLLM of a few lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import msgspec
import pytest
from fake_vllm import config_of

from prefetchd.attaching import Handle
from prefetchd.compilers.base import EntryState
from prefetchd.engines import vllm_hooks, vllm_warmup, warmup_ledger
from prefetchd.engines.seat import Seat
from prefetchd.guard import Guard
from prefetchd.observer import Observer
from prefetchd.profiles import Profile, profile_from_config
from prefetchd.protocol import State
from prefetchd.targets import load_target

MODELS = Path(__file__).parents[2] / "examples/models"
DEEPSEEK = json.loads((MODELS / "tiny-deepseek-fp8.json").read_text())
PROFILE = profile_from_config(DEEPSEEK)
H200 = load_target("h200")
PASS = ["jit pass", "deep_gemm full", "buffers sized", "monitor"]
# What a start does whose pass of Triton kernels is left out: buffers are sized all the same.
WITHOUT_PASS = ["deep_gemm full", "buffers sized"]


class Daemon:
    """A client whose daemon answers with these states, one answer after another."""

    def __init__(self, *answers: State | None) -> None:
        self.answers = list(answers)
        self.asked: list[set[tuple[int, int]]] = []
        self.guard = Guard()
        self.losses = 0
        self.fingerprints = {"triton": {"triton.version": "3.6", "triton.root": "/cache"}}

    def states(self, wanted: dict[str, list[Any]], timeout_s: float) -> dict[str, tuple[State, ...]]:
        self.asked.append({(sweep.request.n, sweep.request.k) for sweep in wanted["deep_gemm"]})
        state = self.answers.pop(0)
        return {} if state is None else {"deep_gemm": (state,) * len(wanted["deep_gemm"])}

    def hello(self) -> Any:
        return SimpleNamespace(target=H200, fingerprints=self.fingerprints)

    def refresh(self) -> None: ...
    def universe(self, universe: object) -> None: ...
    def add_source(self, source: object) -> None: ...


def deep_gemm_handle(*answers: State | None) -> Handle:
    handle = Handle(Daemon(*answers))  # type: ignore[arg-type]
    handle.use_profile(PROFILE, 512)
    return handle


@pytest.mark.parametrize(
    ("answers", "wait_s", "skipped"),
    [
        ([State.PUBLISHED], 0.0, True),
        ([State.QUEUED], 0.0, False),
        ([None], 0.0, False),
        ([State.FAILED], 60.0, False),
        ([State.UNKNOWN, None, State.COMPILING, State.PUBLISHED], 60.0, True),
    ],
    ids=["published", "under way", "no answer", "failed", "waited for"],
)
def test_deep_gemms_warm_up_is_skipped_only_if_the_daemon_vouches_for_every_sweep(
    monkeypatch: pytest.MonkeyPatch, answers: list[State | None], wait_s: float, skipped: bool
) -> None:
    monkeypatch.setattr(vllm_warmup, "PAUSE_S", 0.0)

    assert vllm_warmup.deep_gemm_is_covered(deep_gemm_handle(*answers), PROFILE, 512, wait_s) is skipped


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Handle:
    """Of a worker whose DeepGEMM kernels are all published, in a vLLM that is hooked."""
    handle = deep_gemm_handle(State.PUBLISHED)
    monkeypatch.setattr(vllm_hooks, "version", lambda name: "0.33.0")
    monkeypatch.setattr(vllm_warmup, "version", lambda name: "0.33.0")
    monkeypatch.setattr(vllm_hooks, "seat", Seat(lambda profile, **how: handle))
    monkeypatch.setattr(vllm_hooks, "with_modules", lambda profile, model, tokens: profile)
    monkeypatch.setattr(vllm_warmup, "with_modules", lambda profile, model, tokens: profile)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "deep_gemm"))
    monkeypatch.setenv("PREFETCHD_LOG_DIR", str(tmp_path))
    fake_vllm.install(monkeypatch)
    vllm_hooks.install()
    return handle


def started(jit_pass: Callable[[], None] | None = None, monitor: str = "warn") -> Any:
    """A worker that has loaded its model and warmed up."""
    config = config_of(DEEPSEEK)
    config.kernel_config.enable_jit_warmup = jit_pass is not None
    config.observability_config.jit_monitor_mode = monitor
    worker = sys.modules["vllm.v1.worker.gpu_worker"].Worker(config)
    worker.jit_pass = jit_pass
    worker.load_model()
    worker.done.clear()
    assert worker.compile_or_warm_up_model() == "warm"
    return worker


def test_covered_pass_is_left_out_where_vllm_no_longer_reads_its_environment(handle: Handle) -> None:
    assert started().done == ["deep_gemm skip", "monitor"]
    assert sys.modules["vllm.envs"].VLLM_DEEP_GEMM_WARMUP == "full"
    assert "VLLM_DEEP_GEMM_WARMUP" not in vars(sys.modules["vllm.envs"])


def test_covered_pass_is_kept_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, handle: Handle
) -> None:
    monkeypatch.setenv("PREFETCHD_KEEP_WARMUP", "1")

    assert started().done == ["deep_gemm full", "monitor"]


def test_pass_that_would_walk_products_of_no_site_is_kept(
    monkeypatch: pytest.MonkeyPatch, handle: Handle
) -> None:
    module = "vllm.model_executor.warmup.deep_gemm_warmup"
    monkeypatch.setattr(f"{module}._mega_moe_may_use_deep_gemm", lambda module: True)
    model = SimpleNamespace(named_modules=lambda: iter(()), modules=lambda: iter([object()]))
    monkeypatch.setattr("vllm.v1.worker.gpu_worker.Worker.get_model", lambda worker: model)

    assert started().done == ["deep_gemm full", "monitor"]


def test_what_the_pass_would_walk_is_asked_for_and_not_the_profile_that_a_user_has_named(
    monkeypatch: pytest.MonkeyPatch, handle: Handle
) -> None:
    monkeypatch.setenv("PREFETCHD_PROFILE", "/their.profile.toml")
    handle.use_profile(PROFILE, 512)
    walked = PROFILE.gemms[:2]

    def of_modules(profile: Profile, model: object, tokens: int) -> Profile:
        return msgspec.structs.replace(profile, gemms=walked)

    monkeypatch.setattr(vllm_warmup, "with_modules", of_modules)
    started()

    assert handle.client is not None
    assert handle.client.asked == [{(site.n, site.k) for site in walked}]  # type: ignore[attr-defined]


class Engine:
    """Starts of one engine whose Triton kernels all lie in the cache, observed as a real one."""

    def __init__(self, handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
        self.observer = Observer(Silent())
        handle.watch = SimpleNamespace(observer=self.observer)  # type: ignore[assignment]
        monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "skip")
        monkeypatch.setattr(warmup_ledger, "load_compiler", lambda *_: Everything())

    def start(self, jit_pass: Callable[[Observer], None], monitor: str = "warn") -> list[str]:
        """What its start did."""
        sys.modules["vllm.envs"].__getattr__.cache_clear()
        done: list[str] = started(lambda: jit_pass(self.observer), monitor).done
        # Nothing of ours is left on the observer.
        assert not {"hit", "started", "benchmarked"} & vars(self.observer).keys()
        return [step.replace("skip", "full") for step in done]


@pytest.fixture
def engine(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(handle, monkeypatch)


class Everything:
    """A compiler whose cache holds every key."""

    def look_up(self, key: str) -> EntryState:
        assert key == "KEY"
        return EntryState.PUBLISHED


class Silent:
    """A sink that hears everything and says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_pass_of_triton_kernels_is_left_out_once_all_it_used_is_there(engine: Engine) -> None:
    """The first start notes what the pass used; the second, which finds all of it, does without it."""
    assert engine.start(lambda observer: observer.hit("triton", "KEY")) == PASS
    assert engine.start(lambda observer: None) == WITHOUT_PASS


@pytest.mark.parametrize(
    ("field", "text", "steps"),
    [("triton.version", "3.8", PASS), ("triton.root", "/elsewhere", WITHOUT_PASS)],
)
def test_pass_of_another_release_of_a_compiler_is_kept_though_the_kernels_of_before_are_there(
    engine: Engine, handle: Handle, field: str, text: str, steps: list[str]
) -> None:
    engine.start(lambda observer: observer.hit("triton", "KEY"))
    client: Any = handle.client
    client.fingerprints["triton"][field] = text

    assert engine.start(lambda observer: None) == steps


def test_pass_is_kept_where_vllms_own_variables_choose_other_kernels(engine: Engine) -> None:
    chosen = {"VLLM_USE_SOMETHING": "0"}
    sys.modules["vllm.envs"].__dict__["compile_factors"] = lambda: chosen
    engine.start(lambda observer: observer.hit("triton", "KEY"))
    assert engine.start(lambda observer: None) == WITHOUT_PASS
    chosen["VLLM_USE_SOMETHING"] = "1"

    assert engine.start(lambda observer: None) == PASS


def test_both_passes_are_kept_where_that_is_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start(lambda observer: observer.hit("triton", "KEY"))
    monkeypatch.setenv("PREFETCHD_KEEP_WARMUP", "1")

    assert engine.start(lambda observer: None) == PASS


def test_pass_is_kept_for_a_monitor_that_would_fail_the_engine_at_a_mere_load(engine: Engine) -> None:
    engine.start(lambda observer: observer.hit("triton", "KEY"))

    assert engine.start(lambda observer: None, monitor="error") == PASS


def used_a_kernel_without_a_name(observer: Observer) -> None:
    observer.hit("triton", "KEY")
    observer.ended(observer.started("cute_dsl"), seconds=1.0)


def measured(observer: Observer) -> None:
    observer.hit("triton", "KEY")
    observer.benchmarked("triton", "kernel", 1.0)


def used_what_nobody_sees(observer: Observer) -> None:
    observer.hit("triton", "KEY")
    sys.modules["tilelang"] = sys


@pytest.mark.parametrize("unlisted", [used_a_kernel_without_a_name, measured, used_what_nobody_sees])
def test_pass_whose_kernels_are_not_all_on_its_list_is_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, unlisted: Callable[[Observer], None]
) -> None:
    monkeypatch.setitem(sys.modules, "tilelang", sys)
    del sys.modules["tilelang"]

    assert engine.start(unlisted) == PASS
    assert engine.start(lambda observer: observer.hit("triton", "KEY")) == PASS


def test_pass_that_measured_is_left_out_once_its_tuners_found_their_winners(engine: Engine) -> None:
    engine.start(measured)
    engine.start(lambda observer: observer.hit("triton", "KEY"))

    assert engine.start(lambda observer: None) == WITHOUT_PASS


def test_list_of_before_is_dropped_by_a_pass_that_measured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start(lambda observer: observer.hit("triton", "KEY"))
    gone = SimpleNamespace(look_up=lambda key: EntryState.MISSING)
    with monkeypatch.context() as context:
        context.setattr(warmup_ledger, "load_compiler", lambda *_: gone)
        assert engine.start(measured) == PASS

    assert engine.start(lambda observer: None) == PASS


def test_kernels_that_nvcc_makes_beside_the_pass_are_none_of_its_list(engine: Engine) -> None:
    def beside(observer: Observer) -> None:
        observer.hit("triton", "KEY")
        observer.ended(observer.started("deep_jit", digest="D"), seconds=1.0)

    engine.start(beside)

    assert engine.start(lambda observer: None) == WITHOUT_PASS


def test_failed_pass_is_the_engines_own_failure_and_leaves_no_list(engine: Engine, tmp_path: Path) -> None:
    def failing(observer: Observer) -> None:
        observer.hit("triton", "KEY")
        raise RuntimeError("the engine's own")

    with pytest.raises(RuntimeError, match="the engine's own"):
        engine.start(failing)

    assert list(tmp_path.glob("warmup.*")) == []
    assert not {"hit", "started", "benchmarked"} & vars(engine.observer).keys()


def test_list_that_cannot_be_written_fails_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PREFETCHD_LOG_DIR", str(tmp_path / "file/logs"))

    assert engine.start(lambda observer: observer.hit("triton", "KEY")) == PASS
    assert vllm_hooks.seat.guard.errors == 1


def test_configuration_that_cannot_be_read_keeps_every_pass(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_warmup, "has_other_products", lambda model: model.unknown)

    assert started().done == ["deep_gemm full", "monitor"]
    assert vllm_hooks.seat.guard.errors == 1
