"""The nvcc adaptor on a deep_gemm without kernels: whose a compile is, and what is left unknown."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
from fake_deep_gemm import CompileFailed, FakeLibrary, Site
from told_sink import Told

from prefetchd.compilers.nvcc import STAND_IN
from prefetchd.observer import EngineCompiled, Observer
from prefetchd.observing import nvcc as module
from prefetchd.observing.nvcc import NvccAdaptor, first_of_call
from prefetchd.observing.nvcc_variables import NotObservable, stand_in_variables
from prefetchd.observing.recorder import Task
from prefetchd.observing.spool import Run

SOURCE = """
#include <deep_gemm/impls/sm90.cuh>
static void __instantiate_kernel() {{
    auto ptr = reinterpret_cast<void*>(&sm90_impl<
        {0}, Shape<1, 2>, true
    >);
}};
"""
VARIABLES = ("DG_JIT_NVCC_COMPILER", "PREFETCHD_NVCC_MODE", "PREFETCHD_REAL_NVCC", "PREFETCHD_NVCC_SPOOL")


class Background:
    """The recorder's thread, run by the test."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.ticks: list[Task] = []
        self.closed = False

    def submit(self, task: Task) -> bool:
        self.tasks.append(task)
        return True

    def every_second(self, tick: Task) -> None:
        self.ticks.append(tick)

    def work(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()

    def second(self) -> None:
        for tick in self.ticks:
            tick()


class Tensor:
    """What a call's reader looks at."""

    def __init__(self, dtype: str, *shape: int) -> None:
        self.dtype, self.shape = f"torch.{dtype}", shape

    def stride(self) -> tuple[int, ...]:
        return (1, -(-self.shape[0] // 4) * 4)


def operands(m: int, n: int = 512, k: int = 1024) -> tuple[Any, Any, Any]:
    left = (Tensor("float8_e4m3fn", m, k), Tensor("float32", m, k // 128))
    right = (Tensor("float8_e4m3fn", n, k), Tensor("float32", n // 128, k // 128))
    return left, right, Tensor("bfloat16", m, n)


class Engine:
    """A process with the library, its wrappers and a cache of its own."""

    def __init__(self, folder: Path, *, new: bool, on_compile: str = "ignore", **nvcc: str) -> None:
        self.site = Site(folder, new=new, **nvcc)
        os.environ.update({**self.site.environment, "XDG_RUNTIME_DIR": str(folder)})
        self.background, self.told = Background(), Told()
        self.observer = Observer(self.told, on_compile=on_compile)  # type: ignore[arg-type]
        self.adaptor = NvccAdaptor(self.background)  # type: ignore[arg-type]
        self.adaptor.install(self.observer)
        self.deep_gemm: Any = ModuleType("deep_gemm")
        self.deep_gemm.fp8_gemm_nt = self.fp8_gemm_nt
        self.deep_gemm.fp8_mega_moe = self.fp8_mega_moe
        self.deep_gemm.get_num_sms = lambda: 132
        self.during: Callable[[], None] = lambda: None
        self.adaptor.wrap(self.deep_gemm)

    @property
    def library(self) -> FakeLibrary:
        return self.site.traced_library()

    def fp8_gemm_nt(self, a: Any, b: Any, d: Any, c: Any = None) -> str:
        self.library.compile("sm90", SOURCE.format(d.shape[0] // 64))
        self.during()
        return "launched"

    def fp8_mega_moe(self, *args: Any) -> None:
        self.library.compile("mega", SOURCE.format("mega"))

    def call(self, m: int) -> Any:
        return self.deep_gemm.fp8_gemm_nt(*operands(m))

    def keys(self) -> list[str]:
        return [entry.name for entry in (self.site.root / "cache").iterdir()]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    monkeypatch.setattr(module, "_major", lambda: 9)
    monkeypatch.setattr(module, "_sm_count", lambda: 132)
    for name in (*VARIABLES, "DG_JIT_CACHE_DIR", "CUDA_HOME", "CUDA_PATH", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    engines: list[Engine] = []
    with TemporaryDirectory(prefix="pd") as folder:

        def engine(*, new: bool = True, **options: str) -> Engine:
            engines.append(Engine(Path(folder), new=new, **options))
            return engines[-1]

        yield engine
        for one in engines:
            one.adaptor.remove()


@pytest.mark.parametrize("new", [True, False], ids=["newer line", "older line"])
def test_a_compile_is_joined_with_its_call_its_key_its_digest_and_its_source(
    make: Callable[..., Engine], new: bool
) -> None:
    engine = make(new=new)

    assert engine.call(7) == "launched"
    engine.background.work()

    (record,) = engine.told.records
    assert [record.key] == engine.keys()
    assert record.request is not None
    assert {name: record.request[name] for name in ("op", "m", "n", "k", "scales", "scale_layout")} == {
        "op": "fp8_gemm_nt", "m": 7, "n": 512, "k": 1024, "scales": "auto", "scale_layout": "tma",
    }  # fmt: skip
    assert (record.provider, record.ok, len(record.job_digest)) == ("deep_gemm", True, 64)
    assert record.rebuild is not None
    assert record.rebuild["source"] == SOURCE.format(0)
    assert {"{source}", "{output}"} <= set(record.rebuild["arguments"])
    assert (record.rebuild["meta"] is not None) is new
    assert record.rebuild["op"] == "fp8_gemm_nt"
    assert "float8_e4m3fn[7, 1024]" in record.rebuild["call"]
    assert record.site.startswith("test_observing_nvcc.Engine.call (")


def test_a_recorded_compile_has_the_digest_of_the_traced_job(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.call(7)
    engine.background.work()
    (record,) = engine.told.records

    scratch = engine.site.directory / "scratch"
    scratch.mkdir()
    compiler = engine.site.compiler()
    with compiler.capture(scratch) as capture:
        engine.library.compile("sm90", SOURCE.format(0))

    (job,) = capture.jobs()
    assert (compiler.digest(job), job.key) == (record.job_digest, record.key)


def test_a_warm_cache_gives_no_event_and_no_record(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.call(7)
    engine.background.work()
    before = len(engine.told.records), len(engine.told.events)

    engine.call(7)
    engine.background.work()
    engine.background.second()

    assert (len(engine.told.records), len(engine.told.events)) == before


def test_only_a_key_field_that_changed_is_told(make: Callable[..., Engine]) -> None:
    engine = make()

    engine.call(7)
    engine.call(130)
    engine.background.work()

    assert [record.changed for record in engine.told.records] == [
        "first variant of sm90_impl of fp8_gemm_nt",
        "template[0]: 0 -> 2; template[1], template[2] same",
    ]


def test_two_compiles_in_one_call_belong_to_it_and_one_long_before_does_not() -> None:
    def run(began: float, ended: float) -> Run:
        return Run(1, b"", "", began, ended, 0)

    runs = [run(0, 1), run(20, 22), run(22.1, 30)]

    assert first_of_call(runs, 30.2) == 1
    assert first_of_call(runs, 40.0) == 3
    assert first_of_call([], 1.0) == 0


def test_a_call_that_no_request_says_is_described_for_people(make: Callable[..., Engine]) -> None:
    engine = make()

    engine.deep_gemm.fp8_mega_moe(Tensor("bfloat16", 7, 64), 3)
    engine.background.work()

    (record,) = engine.told.records
    assert record.request is None
    assert record.rebuild is not None
    assert record.rebuild["call"] == "fp8_mega_moe(args=(bfloat16[7, 64], 3))"


def test_a_compile_while_another_thread_is_in_a_call_is_left_without_one(make: Callable[..., Engine]) -> None:
    engine = make()
    inside, done = threading.Event(), threading.Event()
    engine.call(7)
    engine.background.work()

    def waits() -> None:
        inside.set()
        done.wait()

    engine.during = waits
    thread = threading.Thread(target=lambda: engine.call(7))
    thread.start()
    inside.wait()
    engine.during = lambda: None
    engine.call(130)
    engine.background.work()
    done.set()
    thread.join()

    assert [record.request is None for record in engine.told.records] == [False, True]
    assert engine.told.records[1].key


def test_a_failed_compile_is_recorded_and_its_call_raises_what_it_raised(make: Callable[..., Engine]) -> None:
    engine = make(body="echo broken >&2; exit 2")

    with pytest.raises(CompileFailed, match="broken"):
        engine.call(7)
    engine.background.work()

    (record,) = engine.told.records
    assert (record.ok, record.key, record.request is not None) == (False, "", True)


def test_a_compile_that_no_call_announces_is_found_within_seconds(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    monkeypatch.setattr(module, "GAP_S", -1.0)

    engine.library.compile("sm90", SOURCE.format("by itself"))
    engine.background.second()

    (record,) = engine.told.records
    assert (record.request, [record.key]) == (None, engine.keys())


def test_what_has_just_ended_is_left_to_its_call_until_the_engine_ends(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.library.compile("sm90", SOURCE.format("by itself"))

    engine.background.second()
    assert engine.told.records == []
    engine.background.closed = True
    engine.background.second()

    assert len(engine.told.records) == 1


def test_another_librarys_nvcc_is_recorded_by_its_output(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make()
    (tmp_path / "x.cu").write_text("")

    engine.library._run(f"{STAND_IN} -c {tmp_path}/x.cu -o {tmp_path}/x.cubin")
    engine.background.closed = True
    engine.background.second()

    (record,) = engine.told.records
    assert (record.compiler, record.key, record.rebuild) == ("nvcc", f"{tmp_path}/x.cubin", None)


def test_a_compile_that_hangs_is_announced(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "ANNOUNCE_AFTER_S", -1.0)
    go = tmp_path / "go"
    engine = make(body=f"while ! [ -e {go} ]; do sleep 0.02; done")
    thread = threading.Thread(target=engine.library.compile, args=("sm90", SOURCE.format(1)))
    thread.start()
    spool = engine.adaptor._spool
    assert spool is not None
    while not spool.unfinished():
        thread.join(0.01)

    engine.background.second()
    engine.background.second()
    go.touch()
    thread.join()
    engine.background.closed = True
    engine.background.second()

    assert [started.compiler for started in engine.told.begun] == ["deep_jit"]
    assert engine.told.ended == [engine.told.begun[0].token]
    assert len(engine.told.records) == 1


def test_fail_fast_raises_after_the_call_that_compiled_and_not_after_a_hit(
    make: Callable[..., Engine],
) -> None:
    engine = make(on_compile="error")

    with pytest.raises(EngineCompiled, match=r"compiled deep_jit sm90\.\w+ itself .*Engine\.call"):
        engine.call(7)

    assert engine.call(7) == "launched"
    assert len(engine.told.records) == 1


def test_an_adaptor_that_fails_is_switched_off_with_one_line(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    imported = engine.deep_gemm.fp8_gemm_nt

    def broken(*args: object) -> None:
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(module, "request_of_call", broken)
    assert engine.call(7) == "launched"
    assert engine.call(130) == "launched"
    assert imported(*operands(200)) == "launched"

    (line,) = [record.getMessage() for record in caplog.records]
    assert "nvcc is no longer observed" in line
    assert "a defect of ours" in line
    assert engine.deep_gemm.fp8_gemm_nt == engine.fp8_gemm_nt
    assert "PREFETCHD_NVCC_SPOOL" not in os.environ


def test_a_forked_child_has_a_spool_of_its_own(make: Callable[..., Engine]) -> None:
    engine = make()
    parents = os.environ["PREFETCHD_NVCC_SPOOL"]

    child = os.fork()
    if child == 0:
        engine.adaptor.forget_parent()
        engine.call(7)
        engine.background.work()
        own = os.environ["PREFETCHD_NVCC_SPOOL"]
        os._exit(0 if own != parents and len(engine.told.records) == 1 else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.call(130)
    engine.background.work()
    assert len(engine.told.records) == 1


def test_variables_put_the_stand_in_before_the_users_own_nvcc(tmp_path: Path) -> None:
    site = Site(tmp_path)
    mine = site.directory / "cuda/bin/nvcc"

    def found(environment: Mapping[str, str]) -> Mapping[str, str]:
        return stand_in_variables({"PATH": "/bin", **environment})

    assert found({"DG_JIT_NVCC_COMPILER": str(mine)})["PREFETCHD_REAL_NVCC"] == str(mine)
    assert found({"DJ_JIT_NVCC_COMPILER": str(mine)})["DJ_JIT_NVCC_COMPILER"] == str(STAND_IN)
    assert found({"CUDA_HOME": str(tmp_path / "cuda")}) == {
        "DG_JIT_NVCC_COMPILER": str(STAND_IN),
        "PREFETCHD_NVCC_MODE": "observe",
        "PREFETCHD_REAL_NVCC": str(mine),
    }
    again = {"PREFETCHD_REAL_NVCC": str(mine), "DG_JIT_NVCC_COMPILER": str(STAND_IN)}
    assert "DG_JIT_NVCC_COMPILER" not in found(again)
    with pytest.raises(NotObservable, match="not an executable file"):
        found({"CUDA_HOME": "/nowhere"})


def test_other_libraries_are_given_the_stand_in_only_where_they_name_none(tmp_path: Path) -> None:
    environment = {"CUDA_HOME": str(Site(tmp_path).directory / "cuda"), "PYTORCH_NVCC": "ccache nvcc"}

    found = stand_in_variables(environment, ("PYTORCH_NVCC", "FLASHINFER_NVCC"))

    assert found["FLASHINFER_NVCC"] == str(STAND_IN)
    assert "PYTORCH_NVCC" not in found


def test_wrappers_look_like_what_they_wrap(make: Callable[..., Engine]) -> None:
    engine = make()

    assert engine.deep_gemm.fp8_gemm_nt.__name__ == "fp8_gemm_nt"
    assert engine.deep_gemm.fp8_gemm_nt.__wrapped__ == engine.fp8_gemm_nt
    assert not hasattr(engine.deep_gemm.get_num_sms, "__wrapped__")
