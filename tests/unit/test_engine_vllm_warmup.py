"""vLLM's warm-up passes, left out or kept, on the vLLM of a few lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from fake_vllm import config_of

from prefetchd.attaching import Handle
from prefetchd.compilers.base import CompilerUnavailable, EntryState
from prefetchd.engines import vllm_hooks, vllm_warmup, warmup_ledger
from prefetchd.engines.seat import Seat
from prefetchd.engines.warmup_ledger import is_covered, ledger_path, write_ledger
from prefetchd.guard import Guard
from prefetchd.observer import Observer
from prefetchd.profiles import profile_from_config
from prefetchd.protocol import State
from prefetchd.targets import load_target

MODELS = Path(__file__).parents[2] / "examples/models"
DEEPSEEK = json.loads((MODELS / "tiny-deepseek-fp8.json").read_text())
H200 = load_target("h200")


class Daemon:
    """A client whose daemon answers with these states, one answer after another."""

    def __init__(self, *answers: State | None) -> None:
        self.answers = list(answers)
        self.guard = Guard()
        self.losses = 0

    def states(self, wanted: dict[str, list[Any]], timeout_s: float) -> dict[str, tuple[State, ...]]:
        state = self.answers.pop(0)
        return {} if state is None else {"deep_gemm": (state,) * len(wanted["deep_gemm"])}

    def hello(self) -> Any:
        return SimpleNamespace(target=H200)

    def refresh(self) -> None: ...
    def universe(self, universe: object) -> None: ...
    def add_source(self, source: object) -> None: ...


def deep_gemm_handle(*answers: State | None) -> Handle:
    handle = Handle(Daemon(*answers))  # type: ignore[arg-type]
    handle.use_profile(profile_from_config(DEEPSEEK), 512)
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

    assert vllm_warmup.deep_gemm_is_covered(deep_gemm_handle(*answers), 512, wait_s) is skipped


@pytest.fixture
def covered_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Any]:
    """A worker whose DeepGEMM kernels are all published, hooked and loaded."""
    monkeypatch.setattr(vllm_hooks, "version", lambda name: "0.33.0")
    monkeypatch.setattr(
        vllm_hooks, "seat", Seat(lambda profile, **how: deep_gemm_handle(State.PUBLISHED, State.PUBLISHED))
    )
    monkeypatch.setattr(vllm_hooks, "with_modules", lambda profile, model, tokens: profile)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "deep_gemm"))
    monkeypatch.setenv("PREFETCHD_LOG_DIR", str(tmp_path))
    worker_module, _ = fake_vllm.install(monkeypatch)
    vllm_hooks.install()

    def make() -> Any:
        worker = worker_module.Worker(config_of(DEEPSEEK))
        worker.load_model()
        return worker

    return make


def test_covered_pass_is_left_out_and_the_variable_is_as_before(covered_worker: Callable[[], Any]) -> None:
    worker = covered_worker()

    assert worker.compile_or_warm_up_model() == "warm"

    assert worker.done[-1] == "warm-up skip"
    assert "VLLM_DEEP_GEMM_WARMUP" not in os.environ


def test_covered_pass_is_kept_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, covered_worker: Callable[[], Any]
) -> None:
    monkeypatch.setenv("PREFETCHD_KEEP_WARMUP", "1")
    worker = covered_worker()

    worker.compile_or_warm_up_model()

    assert worker.done[-1] == "warm-up on"


def test_pass_of_triton_kernels_is_left_out_once_all_it_used_is_there(
    monkeypatch: pytest.MonkeyPatch, covered_worker: Callable[[], Any]
) -> None:
    """The first start notes what the pass used; the second, which finds all of it, does without it."""
    observer = Observer(Silent())
    worker = covered_worker()
    kernels = worker.vllm_config.kernel_config
    kernels.enable_jit_warmup = True
    seen: list[tuple[bool, str]] = []

    def warm_up(worker: Any) -> None:
        observer.hit("triton", "KEY")
        seen.append((kernels.enable_jit_warmup, "pass"))
        worker._maybe_activate_jit_monitor()

    def activate(worker: Any) -> None:
        seen.append((kernels.enable_jit_warmup, "monitor"))

    type(worker).inner, type(worker)._maybe_activate_jit_monitor = warm_up, activate
    handle = vllm_hooks.seat.handle
    assert handle is not None
    handle.watch = SimpleNamespace(observer=observer)  # type: ignore[assignment]
    monkeypatch.setattr(vllm_warmup, "version", lambda name: "0.33.0")

    with vllm_warmup.skipping(worker, vllm_hooks.seat):
        worker.inner()
    monkeypatch.setattr(warmup_ledger, "load_compiler", lambda *_: Everything())
    with vllm_warmup.skipping(worker, vllm_hooks.seat):
        worker.inner()

    assert seen == [(True, "pass"), (True, "monitor"), (False, "pass"), (True, "monitor")]
    assert kernels.enable_jit_warmup
    assert "hit" not in vars(observer)


class Everything:
    """A compiler whose cache holds every key."""

    def look_up(self, key: str) -> EntryState:
        assert key == "KEY"
        return EntryState.PUBLISHED


class Silent:
    """A sink that hears everything and says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_pass_is_needed_where_a_key_it_used_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = ledger_path(tmp_path, ("vllm", "hash"))
    write_ledger(path, {"triton": ("THERE", "GONE")})
    there = SimpleNamespace(
        look_up=lambda key: EntryState.PUBLISHED if key == "THERE" else EntryState.MISSING
    )
    monkeypatch.setattr(warmup_ledger, "load_compiler", lambda *_: there)

    assert not is_covered(path, H200, {})


def test_pass_is_needed_where_its_compiler_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(*_: object) -> None:
        raise CompilerUnavailable("no triton")

    path = ledger_path(tmp_path, ("vllm", "hash"))
    write_ledger(path, {"triton": ("KEY",)})
    monkeypatch.setattr(warmup_ledger, "load_compiler", missing)

    assert not is_covered(path, H200, {})


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b'{"keys": {}}', b'{"keys": {"triton": ["K"]}, "version": 9}']
)
def test_pass_is_needed_without_a_readable_list(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "warmup.json"
    if content is not None:
        path.write_bytes(content)

    assert not is_covered(path, H200, {})


def test_pass_that_used_nothing_leaves_no_list(tmp_path: Path) -> None:
    write_ledger(tmp_path / "warmup.json", {"triton": ()})

    assert list(tmp_path.iterdir()) == []


def test_another_engine_has_another_list(tmp_path: Path) -> None:
    assert ledger_path(tmp_path, ("vllm", "a")) != ledger_path(tmp_path, ("vllm", "b"))
