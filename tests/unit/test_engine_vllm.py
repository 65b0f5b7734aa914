"""vLLM's plug-in, hooked into a vLLM of a few lines (`fake_vllm.py`)."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from fake_vllm import CachedRequests, NewRequest, SchedulerOutput, config_of

from prefetchd.attaching import Handle
from prefetchd.engines import vllm as plug_in
from prefetchd.engines import vllm_hooks
from prefetchd.engines.seat import Seat
from prefetchd.engines.vllm_batch import batch_of
from prefetchd.profiles import Profile
from prefetchd.profiles.codec import encode_profile
from prefetchd.protocol import Batch

MODELS = Path(__file__).parents[2] / "examples/models"
DEEPSEEK = json.loads((MODELS / "tiny-deepseek-fp8.json").read_text())
KIMI = json.loads((MODELS / "kimi-linear-48b-a3b.json").read_text())


# What workers have built, told from what the configuration says by its size.
BUILT = Profile(
    model="m", architecture="A", quantization="bf16", context_tokens=1, tp=7, ep=1, dp=1
)  # fmt: skip
ENCODED = encode_profile(BUILT)


class Attached(Handle):
    """A handle that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.profiles: list[Profile] = []
        self.slots: list[int] = []

    def on_schedule(self, batch: Batch) -> None:
        self.batches.append(batch)

    def use_profile(self, profile: Profile, max_tokens: int, providers: Any = ()) -> None:
        self.profiles.append(profile)

    def use_state_slots(self, slots: int) -> None:
        self.slots.append(slots)


class Attaching:
    """In place of `attach`."""

    def __init__(self) -> None:
        self.handles: list[Attached] = []
        self.asked: list[tuple[Profile | None, dict[str, Any]]] = []

    def __call__(self, profile: Profile | None, **how: Any) -> Attached:
        self.asked.append((profile, how))
        self.handles.append(Attached())
        return self.handles[-1]


@pytest.fixture
def attaching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Attaching:
    attaching = Attaching()
    monkeypatch.setattr(vllm_hooks, "seat", Seat(attaching))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "deep_gemm"))
    return attaching


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def choose(version: str) -> None:
        monkeypatch.setattr(vllm_hooks, "version", lambda name: version)

    choose("0.33.0")
    return choose


def test_worker_attaches_with_its_rank_and_device_before_it_loads(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    worker_module, _ = fake_vllm.install(monkeypatch)
    vllm_hooks.install()
    worker = worker_module.Worker(config_of(DEEPSEEK, tensor_parallel_size=2, world_size=2))

    assert worker.load_model(load_dummy_weights=True) == "loaded"

    ((profile, how),) = attaching.asked
    assert (how["engine"], how["rank"], how["world"], how["device"], how["max_tokens"]) == (
        "vllm", 2, 2, 1, 512,
    )  # fmt: skip
    assert profile is not None
    assert (profile.model, profile.tp, profile.quantization) == ("tiny", 2, "fp8")
    assert worker.done == ["load dummy=True"]


def test_workers_of_a_replica_come_after_those_of_the_replica_before(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    """Each worker is a process of its own, and says where it stands among all of them."""
    worker_module, _ = fake_vllm.install(monkeypatch)
    vllm_hooks.install()
    parallel = {"tensor_parallel_size": 4, "world_size": 4, "data_parallel_size": 2, "data_parallel_rank": 1}

    worker_module.Worker(config_of(DEEPSEEK, **parallel)).load_model()

    ((profile, how),) = attaching.asked
    assert (how["rank"], how["world"]) == (4 + 2, 8)
    assert profile is not None
    assert (profile.tp, profile.dp) == (4, 2)


@pytest.mark.parametrize(("states", "told"), [(True, [512]), (False, [])], ids=["states", "attention alone"])
def test_worker_tells_how_many_states_its_pool_holds_once_it_is_divided(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object, states: bool, told: list[int]
) -> None:
    worker_module, _ = fake_vllm.install(monkeypatch)
    vllm_hooks.install()
    worker = worker_module.Worker(config_of(KIMI))
    worker.load_model()
    assert attaching.handles[0].slots == []

    worker.initialize_from_config(fake_vllm.caches(512, states=states))

    assert attaching.handles[0].slots == told


def test_caches_that_cannot_be_read_are_the_engines_all_the_same(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    worker_module, _ = fake_vllm.install(monkeypatch)
    vllm_hooks.install()
    worker = worker_module.Worker(config_of(KIMI))
    worker.load_model()
    caches = object()

    worker.initialize_from_config(caches)

    assert worker.model_runner.kv_cache_config is caches
    assert vllm_hooks.seat.guard.errors == 1


def test_directories_that_inductor_has_moved_are_told_before_and_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    told: list[str] = []
    client = SimpleNamespace(refresh=lambda: told.append(os.environ["TRITON_CACHE_DIR"]))
    worker_module, _ = fake_vllm.install(monkeypatch)
    vllm_hooks.install()
    worker = worker_module.Worker(config_of(KIMI))
    worker.load_model()
    attaching.handles[0].client = client  # type: ignore[assignment]

    def moving(worker: Any) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", "/moved/again")

    monkeypatch.setenv("TRITON_CACHE_DIR", "/moved")
    monkeypatch.setattr(worker_module.Worker, "_maybe_activate_jit_monitor", moving)
    worker.compile_or_warm_up_model()

    assert told == ["/moved", "/moved/again"]


def test_built_modules_decide_which_products_are_planned(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    worker_module, _ = fake_vllm.install(monkeypatch)
    vllm_hooks.install()

    worker_module.Worker(config_of(DEEPSEEK)).load_model()

    (profile,) = attaching.handles[0].profiles
    assert profile.gemms == ()  # the fake model gives nothing to DeepGEMM, whatever its configuration says


def test_profile_that_a_user_has_named_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    monkeypatch.setenv("PREFETCHD_PROFILE", "/their.profile.toml")
    worker_module, _ = fake_vllm.install(monkeypatch)
    vllm_hooks.install()

    worker_module.Worker(config_of(DEEPSEEK)).load_model()

    assert attaching.asked[0][0] is None
    assert attaching.handles[0].profiles == []


def test_scheduled_steps_reach_the_workers_handle_where_both_are_one_process(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    worker_module, core_module = fake_vllm.install(monkeypatch)
    vllm_hooks.install()
    worker_module.Worker(config_of(DEEPSEEK)).load_model()
    core = core_module.EngineCore(config_of(DEEPSEEK))

    output = core.scheduler.schedule()

    assert output.num_scheduled_tokens == {"a": 64}
    (handle,) = attaching.handles
    assert handle.batches == [Batch(tokens=64, prefill_lengths=(64,))]


def test_core_without_a_worker_attaches_by_itself(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    _, core_module = fake_vllm.install(monkeypatch)
    vllm_hooks.install()

    core = core_module.EngineCore(config_of(DEEPSEEK, data_parallel_size=4, data_parallel_rank=3))
    core.scheduler.schedule()

    ((_, how),) = attaching.asked
    assert (how["engine"], how["rank"], how["world"]) == ("vllm-scheduler", 3, 4)
    assert len(attaching.handles[0].batches) == 1
    # It plans what the pool's size decides as its workers do.
    assert attaching.handles[0].slots == [7]


@pytest.mark.parametrize(
    ("answers", "tp", "errors"),
    [
        ([ENCODED, ENCODED], 7, 0),
        ([ENCODED, b""], 1, 0),
        ([b"", b""], 1, 0),
        ([b"no profile"], 1, 1),
        ([RuntimeError("no such method")], 1, 1),
    ],
    ids=["alike", "different stages", "not attached", "malformed", "failing"],
)
def test_core_plans_by_what_its_workers_have_built_where_they_are_alike(
    monkeypatch: pytest.MonkeyPatch,
    attaching: Attaching,
    installed: object,
    answers: list[Any],
    tp: int,
    errors: int,
) -> None:
    _, core_module = fake_vllm.install(monkeypatch)
    vllm_hooks.install()

    core_module.EngineCore(config_of(DEEPSEEK), *answers)

    ((profile, _),) = attaching.asked
    assert profile is not None
    assert profile.tp == tp
    assert vllm_hooks.seat.guard.errors == errors


def test_worker_answers_its_core_with_the_profile_it_is_planned_by(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    worker_module, _ = fake_vllm.install(monkeypatch)
    vllm_hooks.install()
    worker = worker_module.Worker(config_of(KIMI))
    assert worker.prefetchd_profile() == b""
    worker.load_model()
    attaching.handles[0].profile = BUILT

    assert worker.prefetchd_profile() == ENCODED


def test_plug_in_that_is_loaded_twice_hooks_once(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    _, core_module = fake_vllm.install(monkeypatch)

    vllm_hooks.install()
    vllm_hooks.install()
    core_module.EngineCore(config_of(DEEPSEEK)).scheduler.schedule()

    assert len(attaching.handles[0].batches) == 1


def test_failure_of_ours_never_reaches_the_engine(monkeypatch: pytest.MonkeyPatch, installed: object) -> None:
    def failing(*_: Any, **__: Any) -> Handle:
        raise RuntimeError("attach")

    monkeypatch.setattr(vllm_hooks, "seat", Seat(failing))
    worker_module, core_module = fake_vllm.install(monkeypatch)
    vllm_hooks.install()
    worker = worker_module.Worker(config_of(DEEPSEEK))

    assert worker.load_model() == "loaded"
    assert worker.compile_or_warm_up_model() == "warm"
    assert core_module.EngineCore(config_of(DEEPSEEK)).scheduler.schedule().num_scheduled_tokens == {"a": 64}
    assert vllm_hooks.seat.guard.errors


def test_engines_own_errors_pass_unchanged(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    _, core_module = fake_vllm.install(monkeypatch)
    vllm_hooks.install()
    core = core_module.EngineCore(config_of(DEEPSEEK))
    core.scheduler.outputs.clear()

    with pytest.raises(IndexError):
        core.scheduler.schedule()


def test_unknown_vllm_is_one_line_and_only_observed(
    monkeypatch: pytest.MonkeyPatch,
    attaching: Attaching,
    installed: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker_module, core_module = fake_vllm.install(monkeypatch)
    installed("0.99.1")
    vllm_hooks.install()

    worker_module.Worker(config_of(DEEPSEEK)).load_model()
    core_module.EngineCore(config_of(DEEPSEEK)).scheduler.schedule()

    ((profile, how),) = attaching.asked
    assert profile is None
    assert how["or_observe"]
    assert attaching.handles[0].batches == []
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "0.99.1" in line


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.33", True), ("0.33.0", True), ("0.33.4.post1", True), ("0.33.0+cu130", True), ("0.330.0", False)],
)
def test_every_release_of_a_series_that_was_tried_is_known(
    monkeypatch: pytest.MonkeyPatch,
    attaching: Attaching,
    installed: Callable[[str], None],
    version: str,
    known: bool,
) -> None:
    worker_module, _ = fake_vllm.install(monkeypatch)
    installed(version)
    vllm_hooks.install()

    worker_module.Worker(config_of(DEEPSEEK)).load_model()

    assert (attaching.asked[0][0] is not None) is known


def test_vllm_without_a_function_that_is_hooked_is_named(
    monkeypatch: pytest.MonkeyPatch,
    attaching: Attaching,
    installed: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker_module, _ = fake_vllm.install(monkeypatch, without="compile_or_warm_up_model")
    vllm_hooks.install()

    assert worker_module.Worker(config_of(DEEPSEEK)).load_model() == "loaded"
    assert "Worker.compile_or_warm_up_model" in caplog.text


def test_deep_gemms_cache_is_named_as_vllm_itself_will_and_is_there(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object, tmp_path: Path
) -> None:
    monkeypatch.delenv("DG_JIT_CACHE_DIR")
    fake_vllm.install(monkeypatch)
    monkeypatch.setattr("vllm.envs.VLLM_CACHE_ROOT", str(tmp_path / "vllm"))

    vllm_hooks.install()

    assert os.environ["DG_JIT_CACHE_DIR"] == str(tmp_path / "vllm/deep_gemm")
    assert (tmp_path / "vllm/deep_gemm").is_dir()


def test_kernels_are_vllms_own_copies_with_the_flags_it_passes() -> None:
    profile = vllm_hooks.profile_of_config(config_of(KIMI))

    assert {site.home for site in profile.kernels} == {"vllm"}
    assert profile.gemms == ()  # unquantized products are not given to DeepGEMM
    flags = {site.flags["set"] for site in profile.kernels if site.op == "chunk_kda"}
    assert flags == {"vllm", "vllm-fused-gate"}


def test_model_that_no_table_knows_has_a_profile_without_sites() -> None:
    profile = vllm_hooks.profile_of_config(config_of({"architectures": ["SomethingNew"]}))

    assert (profile.architecture, profile.gemms, profile.kernels) == ("SomethingNew", (), ())


@pytest.mark.parametrize(
    ("output", "batch"),
    [
        (SchedulerOutput({}), None),
        (fake_vllm.prefill(a=64, b=3), Batch(tokens=67, prefill_lengths=(64, 3))),
        (
            SchedulerOutput({"a": 1, "b": 1}, [], CachedRequests(["a", "b"], [4, 9])),
            Batch(tokens=2, decodes=2),
        ),
        (
            SchedulerOutput({"a": 1, "b": 500}, [], CachedRequests(["a", "b"], [4, 0])),
            Batch(tokens=501, prefill_lengths=(500,), decodes=1),
        ),
        (
            SchedulerOutput({"a": 4, "b": 1}, [], CachedRequests(["a", "b"], [4, 9]), {"a": [7, 8, 9]}),
            Batch(tokens=5, decodes=2, speculative_tokens=3),
        ),
        (
            SchedulerOutput({"a": 1, "n": 1}, [NewRequest("n")], CachedRequests(["a"], [1])),
            Batch(tokens=2, prefill_lengths=(1,), decodes=1),
        ),
    ],
    ids=["nothing", "prefill", "decode", "chunk beside decode", "drafts", "a prompt of one token"],
)
def test_scheduled_step_as_a_batch(output: SchedulerOutput, batch: Batch | None) -> None:
    assert batch_of(output) == batch


def test_without_the_variable_nothing_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules); from prefetchd.engines.vllm import register; register(); "
        "print(*sorted(set(sys.modules) - before))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PREFETCHD"}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    foreign = {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign == {"prefetchd", "prefetchd.engines", "prefetchd.engines.vllm"}


def test_register_hooks_when_the_variable_is_set(
    monkeypatch: pytest.MonkeyPatch, attaching: Attaching, installed: object
) -> None:
    worker_module, _ = fake_vllm.install(monkeypatch)
    monkeypatch.setenv("PREFETCHD", "1")

    plug_in.register()
    worker_module.Worker(config_of(DEEPSEEK)).load_model()

    assert len(attaching.handles) == 1
