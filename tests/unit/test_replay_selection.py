"""Which records are traced, rebuilt, skipped or refused, and what each of them can cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from prefetchd.compilers.base import Compiler, CompilerUnavailable, Job, NotRebuildable, fingerprint_id
from prefetchd.replaying import selection
from prefetchd.replaying.interruptible import interruptible
from prefetchd.replaying.selection import MAX_PROBLEMS, Left, Rebuilder, Room, left_alone, split, traceable
from prefetchd.shapelog import Record
from prefetchd.targets import load_target

H200 = load_target("h200")
FACTS = {"made.version": "1", "deep_jit.roots": "/somewhere"}
OURS = fingerprint_id(FACTS)


class Made(Compiler):
    """A compiler whose records hold what happens to them."""

    name = "made"

    def fingerprint(self) -> Mapping[str, str]:
        return FACTS

    def rebuild(self, record: Record) -> Job:
        what = (record.rebuild or {}).get("what")
        if what == "refuse" or record.rebuild is None:
            raise NotRebuildable("rebuild.what: 'refuse'")
        if what == "fail":
            raise RecursionError("a defect")
        key = "another" if what == "rename" else record.key
        return Job(compiler="made", key=key, payload=b"")

    def cache_root(self) -> Path:
        raise AssertionError

    capture = forbid = verify = entry_path = state = publish = cache_root  # type: ignore[assignment]


def load(name: str) -> Compiler:
    if name != "made":
        raise CompilerUnavailable(f"no compiler {name}")
    return Made()


def record(key: str, what: str = "", **fields: Any) -> Record:
    return Record(
        **{"compiler": "made", "key": key, "fingerprint": OURS, "rebuild": {"what": what}, **fields}
    )


def gemm(m: int, n: int = 512, **fields: Any) -> Record:
    request = {"op": "fp8_gemm_nt", "m": m, "n": n, "k": 512}
    return record(f"key{m}-{n}", **{"provider": "deep_gemm", "request": request, **fields})


@pytest.fixture
def rebuilder() -> Rebuilder:
    return Rebuilder(H200, load, {})


def kda(home: str) -> Record:
    request = {"op": "chunk_kda", "tokens": 8, "heads": 2, "key_dim": 64, "value_dim": 64, "home": home}
    return record(f"key of {home}", provider="kda", request=request, rebuild=None)


def test_request_whose_home_no_setting_allows_is_refused_and_never_traced() -> None:
    # A provider imports the home of a request, so a log that names one would have its module run.
    allowed = [
        kda("fla"),
        kda("fla.ops.kda"),
        kda("flashinfer"),
        kda("mine.kernels"),
        kda("cute:mine.kernels"),
    ]
    others = [kda("antigravity"), kda("os.path"), kda("cute:os"), kda("flawed.kernels"), kda("")]
    environment = {"PREFETCHD_REPLAY_PACKAGES": "mine"}

    asked, rest = split([*allowed, *others], {"kda"}, environment)
    rebuilder = Rebuilder(H200, load, environment)
    for each in rest:
        rebuilder.add(each)

    assert [each.record for each in asked] == allowed
    assert rebuilder.refused.count == len(others)
    for problem in rebuilder.refused.problems:
        assert "request.home" in problem.text
        assert "replay_packages" in problem.text


def test_records_with_a_known_request_and_an_installed_provider_are_traced() -> None:
    traced = gemm(1)
    others = [
        gemm(2, provider="not installed"),
        gemm(3, provider=""),
        gemm(4, request=None),
        gemm(5, request={"op": "of a later version", "m": 1}),
        gemm(6, request={"op": "fp8_gemm_nt", "m": -1, "n": 512, "k": 512}),
        gemm(7, request={"op": ["fp8_gemm_nt"]}),
        gemm(8, request={"m": 1}),
        gemm(9, request={"op": "fp8_gemm_nt", "m": 2**80, "n": 1, "k": 1}),
    ]

    asked, rest = split([traced, *others], {"deep_gemm"}, {})

    assert [each.record for each in asked] == [traced]
    assert rest == others


def test_requests_of_one_site_are_one_sweep_in_the_order_of_the_dearest() -> None:
    records = [gemm(64, n=1024), gemm(3), gemm(1), gemm(64, n=1024), gemm(2)]

    asked, _ = split(records, {"deep_gemm"}, {})
    first, second = traceable(asked)

    assert [request.n for request in first.sweep.expand()] == [1024]  # type: ignore[attr-defined]
    assert [request.m for request in second.sweep.expand()] == [1, 2, 3]  # type: ignore[attr-defined]
    assert [each.key for each in second.records] == ["key3-512", "key1-512", "key2-512"]


def test_jobs_cost_what_the_engine_measured(rebuilder: Rebuilder) -> None:
    assert rebuilder.add(record("a", seconds=7.0))
    assert rebuilder.add(record("b"))

    assert [(job.key, job.cost) for job in rebuilder.jobs.values()] == [("a", 7.0), ("b", 1.0)]


def test_variant_that_several_records_name_is_one_job_of_the_first(rebuilder: Rebuilder) -> None:
    assert all([rebuilder.add(record("a", seconds=seconds)) for seconds in (7.0, 3.0)])

    assert [job.cost for job in rebuilder.jobs.values()] == [7.0]


@pytest.mark.parametrize(
    "fields", [{"fingerprint": "0" * 16}, {"fingerprint": ""}, {"capability": 100}, {"sm_count": 78}]
)
def test_records_from_elsewhere_are_counted_and_no_refusal(rebuilder: Rebuilder, fields: Any) -> None:
    assert not rebuilder.add(record("a", "refuse", **fields))

    assert (rebuilder.foreign, rebuilder.refused.count) == (1, 0)


def test_same_library_with_its_cache_elsewhere_is_no_other_fingerprint(rebuilder: Rebuilder) -> None:
    elsewhere = fingerprint_id({**FACTS, "deep_jit.roots": "/elsewhere"})

    assert rebuilder.add(record("a", fingerprint=elsewhere))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (record("bad", "refuse"), "rebuild.what: 'refuse'"),
        (record("bad", "fail"), "RecursionError: a defect"),
        (record("bad", "rename"), "it is 'another'"),
        (record("bad", compiler="unknown"), "no compiler unknown"),
    ],
)
def test_bad_record_is_refused_by_name_and_the_rest_goes_on(
    rebuilder: Rebuilder, bad: Record, reason: str
) -> None:
    outcomes = [rebuilder.add(each) for each in (record("a"), bad, record("b"))]

    assert outcomes == [True, False, True]
    (problem,) = rebuilder.refused.problems
    assert problem.what == f"{bad.compiler} bad"
    assert reason in problem.text


def test_trial_leaves_no_trace_of_its_failure(rebuilder: Rebuilder) -> None:
    assert not rebuilder.try_add(record("a", "refuse"))
    assert not rebuilder.try_add(record("b", fingerprint="other"))
    assert rebuilder.try_add(record("c"))

    assert (rebuilder.foreign, rebuilder.refused.count, len(rebuilder.jobs)) == (0, 0, 1)


def test_refusals_are_all_counted_and_some_told(rebuilder: Rebuilder) -> None:
    for number in range(MAX_PROBLEMS + 10):
        rebuilder.add(record(f"key{number}", "refuse"))

    assert rebuilder.refused.count == MAX_PROBLEMS + 10
    assert len(rebuilder.refused.problems) == MAX_PROBLEMS


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (record("a", ok=False), Left.ENGINE_FAILED),
        (record("a", compiler="nvcc"), Left.OTHERS),
        (record("a", rebuild=None, cause="planned"), Left.PLANNED),
        (record("a", rebuild=None, cause="late"), None),
        (record("a", cause="planned"), None),
        (gemm(1, rebuild=None, cause="planned"), None),
    ],
)
def test_what_is_left_alone_is_no_fault(left: Record, reason: Left | None) -> None:
    assert left_alone(left) is reason


def test_what_one_replay_takes_is_bounded_in_number_and_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MAX_RECORDS", 3)
    many = Room()
    assert [many.takes(record(str(number))) for number in range(5)] == [True] * 3 + [False] * 2
    assert many.left_out == 2

    monkeypatch.setattr(selection, "MAX_PAYLOAD", 100_000)
    large = {"op": "of no provider", "text": "x" * 60_000}
    wholes: tuple[dict[str, Any], ...] = ({"request": large}, {"rebuild": large})
    for fields in wholes:
        wide = Room()
        assert [wide.takes(record(str(number), **fields)) for number in range(3)] == [True, True, False]


def test_work_beside_a_loop_ends_when_its_task_is_cancelled() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(check: Callable[[], None]) -> None:
        try:
            while True:
                check()
                begun.set()
        finally:
            ended.set()

    async def scenario() -> None:
        task = asyncio.ensure_future(interruptible(work))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(scenario())
