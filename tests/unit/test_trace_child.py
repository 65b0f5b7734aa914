"""The trace of one sweep in forked processes: real forks, a provider and a compiler made for the test."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefetchd import trace_child
from prefetchd.compilers.base import Capture, Command, Compiler, EntryState, Job
from prefetchd.profiles import Profile
from prefetchd.protocol import Batch, Request, Sweep, sweeps
from prefetchd.provider import Limits, Provider, Unavailable
from prefetchd.requests.deep_gemm import Bf16GemmNt
from prefetchd.trace import Mode, Report
from prefetchd.trace_child import MAX_CRASHES, MAX_FAILURES, Trace, TraceChild

SWEEP = sweeps(Bf16GemmNt(m=m, n=64, k=64) for m in range(1, 101))[0]


class ScratchCapture:
    """One job for each file in the scratch directory, as a compiler's cache layout would give."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def jobs(self) -> list[Job]:
        return [Job(compiler="files", key=path.name, payload=b"") for path in sorted(self._scratch.iterdir())]


class FileCompiler(Compiler):
    name = "files"

    def fingerprint(self) -> Mapping[str, str]:
        return {}

    def cache_root(self) -> Path:
        raise AssertionError("a trace does not touch the engine's cache")

    @contextmanager
    def capture(self, scratch: Path) -> Iterator[Capture]:
        os.environ["SCRATCH"] = str(scratch)
        yield ScratchCapture(scratch)

    forbid = capture

    def compile(self, job: Job, staging: Path) -> Command:
        raise AssertionError("a trace compiles nothing")

    def verify(self, job: Job, staging: Path) -> None:
        raise AssertionError

    def entry_path(self, key: str, root: Path) -> Path:
        raise AssertionError

    def state(self, key: str, root: Path) -> EntryState:
        raise AssertionError

    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        raise AssertionError


class ActingProvider(Provider):
    """Leaves one key for every ten M, and does what the test says for each M before."""

    name = "acting"
    compilers = ("files",)

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act

    def plan(self, batch: Batch, profile: Profile) -> Iterable[Request]:
        return ()

    def universe(self, profile: Profile, limits: Limits) -> Iterable[Request]:
        return ()

    def warm_up(self) -> None:
        pass

    def run(self, request: Request) -> None:
        assert isinstance(request, Bf16GemmNt)
        self._act(request.m)
        (Path(os.environ["SCRATCH"]) / f"k{request.m // 10}").touch()


def run(
    tmp_path: Path,
    act: Callable[[int], None],
    *,
    sweep: Sweep = SWEEP,
    mode: Mode = "capture",
    timeout_s: float = 60,
) -> Report:
    trace = Trace(7, mode, [sweep], ActingProvider(act), [FileCompiler()], tmp_path / "scratch")
    child = TraceChild(trace, timeout_s)
    while True:
        select.select([child.fd], [], [], timeout_s)
        report = child.finish()
        if report is not None:
            return report
        child.go_on()


def test_report_holds_every_key_and_the_scratch_is_gone(tmp_path: Path) -> None:
    report = run(tmp_path, lambda m: None)

    assert report.id == 7
    assert {job.key for job in report.jobs} == {f"k{i}" for i in range(11)}
    assert report.failures == ()
    assert list(tmp_path.iterdir()) == []


def test_crash_costs_one_request_and_keeps_the_keys_before_it(tmp_path: Path) -> None:
    def act(m: int) -> None:
        if m == 42:
            os.write(2, b"bad layout\n")
            os.kill(os.getpid(), signal.SIGSEGV)

    report = run(tmp_path, act)

    assert {job.key for job in report.jobs} == {f"k{i}" for i in range(11)}
    (failure,) = report.failures
    assert (failure.kind, failure.requests) == ("crash", 1)
    assert "m=42" in failure.request
    assert "SIGSEGV" in failure.text
    assert "bad layout" in failure.text


def test_sweep_that_crashes_everywhere_is_given_up_with_the_rest_counted(tmp_path: Path) -> None:
    report = run(tmp_path, lambda m: os.abort() if m > 20 else None)

    assert len(report.failures) == MAX_CRASHES
    assert sum(failure.requests for failure in report.failures) == 80
    assert {job.key for job in report.jobs} == {"k0", "k1", "k2"}


def test_hang_is_ended_and_the_sweep_goes_on(tmp_path: Path) -> None:
    report = run(tmp_path, lambda m: time.sleep(3600) if m == 3 else None, timeout_s=0.5)

    (failure,) = report.failures
    assert (failure.kind, failure.requests) == ("hang", 1)
    assert "m=3" in failure.request
    assert len(report.jobs) == 11


def test_exception_is_reported_with_its_request_and_the_sweep_goes_on(tmp_path: Path) -> None:
    def act(m: int) -> None:
        if m == 5:
            raise RuntimeError("dim == 2 or dim == 3")

    report = run(tmp_path, act)

    (failure,) = report.failures
    assert (failure.kind, failure.text) == ("error", "RuntimeError: dim == 2 or dim == 3")
    assert "m=5" in failure.request


def test_missing_entry_point_ends_the_sweep_at_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def act(m: int) -> None:
        with calls.open("a") as file:
            file.write("x")
        raise Unavailable("deep_gemm 0.0 has no bf16_gemm_nt")

    report = run(tmp_path, act)

    (failure,) = report.failures
    assert (failure.kind, failure.requests) == ("unavailable", 100)
    assert calls.read_text() == "x"


def test_failures_are_bounded_and_all_requests_counted(tmp_path: Path) -> None:
    def act(m: int) -> None:
        raise ValueError(str(m))

    report = run(tmp_path, act)

    assert len(report.failures) == MAX_FAILURES
    assert sum(failure.requests for failure in report.failures) == 100


def test_few_failures_among_many_are_counted_exactly(tmp_path: Path) -> None:
    def act(m: int) -> None:
        if m <= MAX_FAILURES + 10:
            raise ValueError(str(m))

    report = run(tmp_path, act)

    assert sum(failure.requests for failure in report.failures) == MAX_FAILURES + 10


def test_sweep_that_keeps_failing_slowly_is_given_up_with_the_rest_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_child, "FAILING_S", 0.0)
    calls = tmp_path / "calls"

    def act(m: int) -> None:
        with calls.open("a") as file:
            file.write("x")
        raise ValueError(str(m))

    report = run(tmp_path, act)

    assert len(calls.read_text()) == MAX_FAILURES + 1
    assert sum(failure.requests for failure in report.failures) == 100


@pytest.mark.parametrize(("leaves_key", "kind"), [(True, "miss"), (False, "error")])
def test_only_a_wanted_compile_is_a_miss(tmp_path: Path, leaves_key: bool, kind: str) -> None:
    def act(m: int) -> None:
        if m == 9:
            if leaves_key:
                (Path(os.environ["SCRATCH"]) / "wanted").touch()
            raise RuntimeError("nvcc failed")

    one = Sweep(Bf16GemmNt(m=9, n=64, k=64))

    report = run(tmp_path, act, sweep=one, mode="forbid")

    assert [failure.kind for failure in report.failures] == [kind]


def test_child_does_not_outlive_the_process_that_forked_it(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def act(m: int) -> None:
        os.write(writer, f"{os.getpid()}\n".encode())
        time.sleep(3600)

    middle = os.fork()
    if middle == 0:
        TraceChild(
            Trace(1, "capture", [SWEEP], ActingProvider(act), [FileCompiler()], tmp_path / "scratch"), 60
        )
        signal.pause()
    child = int(os.read(reader, 32))
    handle = os.pidfd_open(child)
    os.kill(middle, signal.SIGKILL)
    os.waitpid(middle, 0)

    ended, _, _ = select.select([handle], [], [], 10)
    assert ended == [handle]
