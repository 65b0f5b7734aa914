"""The observer's bookkeeping: what counts as an engine compile, why it was one, and what is told to whom."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from told_sink import Told

from prefetchd.observer import MAX_OPEN, EngineCompiled, Observer
from prefetchd.winners import Configuration, Winner

REQUEST = {"op": "fp8_gemm_nt", "m": 7, "n": 512, "k": 1024}
WINNER = Winner(
    gpu="NVIDIA H200", sm_count=132, triton="3.8", module="fla.x", kernel="k", source="s", key=[1],
    config=Configuration(kwargs={}), timing_ms=[1.0],
)  # fmt: skip


class Known:
    """What a daemon has said, as a test sets it."""

    def __init__(self, *published: str, asked: bool = False, up: bool = True, differs: bool = False) -> None:
        self.keys, self.was_asked, self.up, self.differs = set(published), asked, up, differs

    def reachable(self) -> bool:
        return self.up

    def published(self, compiler: str, key: str) -> bool:
        return key in self.keys

    def asked(self, request: Mapping[str, Any]) -> bool:
        return self.was_asked

    def mismatched(self) -> bool:
        return self.differs


class Broken(Told):
    """A sink of which every method fails."""

    def began(self, *_: object) -> None:
        raise OSError("no")

    over = found = record = event = winner = began


def compile_(observer: Observer, key: str = "k", request: dict[str, Any] | None = None, **end: Any) -> None:
    token = observer.started("triton", key=key)
    observer.ended(token, seconds=1.5, request=request, **end)


def cause(known: Known, **end: Any) -> tuple[str, dict[str, float]]:
    sink = Told()
    observer = Observer(sink, known)
    compile_(observer, **end)
    return sink.records[0].cause, observer.figures()


def test_a_compile_is_recorded_once_with_all_that_was_told() -> None:
    sink = Told()
    observer = Observer(sink, clock=lambda: 100.0, site=lambda: "engine.step (engine.py:3)")

    token = observer.started("deep_jit", digest="d")
    observer.ended(
        token, seconds=2.0, key="k", provider="deep_gemm", request=REQUEST, rebuild={"source": "x"}
    )

    (record,) = sink.records
    assert (record.compiler, record.key, record.job_digest, record.seconds) == ("deep_jit", "k", "d", 2.0)
    assert (record.at, record.site, record.ok) == (100.0, "engine.step (engine.py:3)", True)
    assert (record.provider, record.request, record.rebuild) == ("deep_gemm", REQUEST, {"source": "x"})


def test_the_same_variant_again_is_counted_and_not_recorded() -> None:
    sink = Told()
    observer = Observer(sink)

    compile_(observer)
    compile_(observer)

    assert len(sink.records) == len(sink.begun) == 1
    assert observer.figures()["triton.compiles"] == 2
    assert observer.figures()["triton.compile_seconds"] == 3.0


def test_compiles_without_any_name_are_each_recorded() -> None:
    sink = Told()
    observer = Observer(sink)

    for _ in range(2):
        compile_(observer, key="")

    assert len(sink.records) == 2
    assert sink.begun == []
    assert sink.events == []


def test_a_start_without_an_end_stays_to_be_seen() -> None:
    sink = Told()
    observer = Observer(sink, site=lambda: "engine.hangs (e.py:1)")

    token = observer.started("triton", key="k")

    assert [(one.token, one.key, one.site) for one in sink.begun] == [(token, "k", "engine.hangs (e.py:1)")]
    assert [one.token for one in observer.running()] == [token]
    assert [event.what for event in sink.events] == ["started"]
    observer.ended(token, seconds=1.0)
    assert (observer.running(), sink.ended) == ([], [token])
    assert [event.what for event in sink.events] == ["started", "ended"]


def test_a_compile_heard_of_when_it_is_over_is_not_announced_as_running() -> None:
    sink = Told()
    observer = Observer(sink, site=lambda: "of the wrong thread")

    observer.ended(observer.started("deep_jit", key="k", at=50.0, over=True), seconds=1.0, site="right")

    assert (sink.begun, sink.ended) == ([], [])
    assert [(record.at, record.site) for record in sink.records] == [(50.0, "right")]


def test_the_daemon_hears_of_the_end_under_the_name_it_heard_at_the_start() -> None:
    sink = Told()
    observer = Observer(sink)

    observer.ended(observer.started("deep_jit", digest="d"), seconds=1.0, key="k")

    assert [(event.what, event.key, event.digest) for event in sink.events] == [
        ("started", "", "d"), ("ended", "", "d"),
    ]  # fmt: skip


def test_a_name_known_only_at_the_end_is_told_as_a_whole_compile() -> None:
    sink = Told()
    observer = Observer(sink)

    observer.ended(observer.started("deep_jit"), seconds=1.0, key="k")

    assert [(event.what, event.key) for event in sink.events] == [("started", "k"), ("ended", "k")]


def test_a_request_goes_to_the_daemon_encoded_and_one_that_is_none_does_not() -> None:
    sink = Told()
    observer = Observer(sink)

    compile_(observer, "a", REQUEST)
    compile_(observer, "b", {"op": "fp8_gemm_nt", "m": "many"})

    assert [bool(event.request) for event in sink.events if event.what == "ended"] == [True, False]
    assert sink.records[1].request == {"op": "fp8_gemm_nt", "m": "many"}


def test_nobody_asked_is_unplanned() -> None:
    found, figures = cause(Known(), request=REQUEST)

    assert found == "unplanned"
    assert figures["triton.unplanned"] == 1


def test_asked_and_not_there_yet_is_late() -> None:
    assert cause(Known(asked=True), request=REQUEST)[0] == "late"


def test_published_before_and_compiled_all_the_same_is_a_mismatch() -> None:
    assert cause(Known("k"))[0] == "mismatch"


def test_published_while_it_was_compiled_is_late() -> None:
    sink, known = Told(), Known()
    observer = Observer(sink, known)

    token = observer.started("triton", key="k")
    known.keys.add("k")
    observer.ended(token, seconds=1.0)

    assert sink.records[0].cause == "late"


def test_asked_of_a_daemon_whose_keys_differ_is_a_mismatch() -> None:
    assert cause(Known(asked=True, differs=True), request=REQUEST)[0] == "mismatch"


@pytest.mark.parametrize(("asked", "logged"), [(True, "late"), (False, "unplanned")])
def test_without_the_daemon_that_was_expected_the_log_keeps_what_was_planned(
    asked: bool, logged: str
) -> None:
    found, figures = cause(Known(asked=asked, up=False), request=REQUEST)

    assert found == logged
    assert figures["triton.daemon_down"] == 1


def test_a_disk_hit_is_no_compile() -> None:
    sink = Told()
    observer = Observer(sink)

    observer.hit("triton", "k")
    observer.hit("triton", "k")

    assert sink.records == []
    assert [event.what for event in sink.events] == ["hit"]
    assert observer.figures() == {"triton.hits": 2}


def test_a_hit_of_what_the_daemon_published_is_told_as_found_once_and_is_no_record() -> None:
    sink = Told()
    observer = Observer(sink, Known("k"))

    observer.hit("triton", "k")
    observer.hit("triton", "k")

    assert [(one.compiler, one.key) for one in sink.hits] == [("triton", "k")]
    assert sink.records == []
    assert observer.figures()["triton.planned"] == 2


def test_loads_and_benchmarks_are_counted_apart_and_a_winner_is_kept() -> None:
    sink = Told()
    observer = Observer(sink)

    observer.loaded("triton", "k", 0.25)
    observer.benchmarked("triton", "kernel", 3.0, WINNER)
    observer.benchmarked("triton", "kernel", 1.0)

    assert observer.figures() == {
        "triton.loads": 1, "triton.load_seconds": 0.25,
        "triton.benchmarks": 2, "triton.benchmark_seconds": 4.0,
    }  # fmt: skip
    assert sink.winners == [WINNER]
    assert [event.what for event in sink.events] == ["load"]
    assert sink.records == []


def test_a_record_says_how_the_variant_differs_from_the_nearest_one() -> None:
    sink = Told()
    observer = Observer(sink)

    compile_(observer, "a", parts={"kernel": "f", "T%16": "yes", "num_warps": "4"})
    compile_(observer, "b", parts={"kernel": "f", "T%16": "no", "num_warps": "4"})

    assert [record.changed for record in sink.records] == [
        "first variant of f",
        "T%16: yes -> no; num_warps same",
    ]


def test_a_field_that_never_settles_is_warned_of_once_with_the_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    observer = Observer(Told(), site=lambda: "engine.step (e.py:9)")

    for value in range(17, 50):
        compile_(observer, f"k{value}", parts={"kernel": "f", "T": str(value)})

    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "f: field T of its key has taken more than 8 values that are no power of two" in warning
    assert "engine.step (e.py:9)" in warning


def test_warn_says_in_one_line_what_was_compiled_where_and_why(caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer(Told(), on_compile="warn", site=lambda: "engine.step (e.py:9)")

    compile_(observer, parts={"kernel": "f", "D": "64"})
    observer.enforce()

    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "prefetchd: the engine compiled triton k itself in 1.50 s (unplanned), called from "
        "engine.step (e.py:9); first variant of f"
    )


def test_error_raises_when_it_is_enforced_and_only_once() -> None:
    observer = Observer(Told(), on_compile="error")

    compile_(observer)

    with pytest.raises(EngineCompiled, match=r"compiled triton k itself .* warm or replay this variant"):
        observer.enforce()
    observer.enforce()


def test_error_is_raised_in_the_thread_that_compiled_and_in_no_other() -> None:
    observer = Observer(Told(), on_compile="error")
    raised: list[EngineCompiled] = []

    def engine() -> None:
        compile_(observer)
        try:
            observer.enforce()
        except EngineCompiled as error:
            raised.append(error)

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()

    observer.enforce()
    assert len(raised) == 1


def test_hits_loads_and_benchmarks_are_not_forbidden() -> None:
    observer = Observer(Told(), on_compile="error")

    observer.hit("triton", "k")
    observer.loaded("triton", "k", 1.0)
    observer.benchmarked("triton", "kernel", 1.0)

    observer.enforce()


def test_a_failing_sink_reaches_nobody_and_is_counted() -> None:
    observer = Observer(Broken())

    compile_(observer)
    observer.hit("triton", "other")
    observer.loaded("triton", "k", 1.0)
    observer.benchmarked("triton", "kernel", 1.0, WINNER)

    assert observer.guard.errors > 0


def test_nonsense_from_an_adaptor_raises_nothing() -> None:
    sink = Told()
    observer = Observer(sink)

    observer.ended(12345, seconds=1.0)
    observer.ended(0, seconds=1.0)
    compile_(observer, "x" * 100_000, rebuild={"odd": object()})
    token = observer.started("triton", key="negative")
    observer.ended(token, seconds=-1.0)

    assert len(sink.records[0].key) == 1024
    assert sink.events[-1].seconds == 0.0


def test_compiles_that_never_end_are_bounded() -> None:
    observer = Observer(Told())

    for number in range(MAX_OPEN + 10):
        observer.started("triton", key=str(number))

    assert len(observer.running()) == MAX_OPEN


def test_threads_that_compile_at_once_lose_nothing() -> None:
    sink = Told()
    observer = Observer(sink)

    def engine(name: int) -> None:
        for number in range(200):
            compile_(observer, f"{name}.{number}", parts={"kernel": str(name), "T": str(number)})

    threads = [threading.Thread(target=engine, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(sink.records) == 800
    assert observer.figures()["triton.compiles"] == 800
    assert observer.guard.errors == 0


def test_a_forked_child_has_compiled_nothing_yet() -> None:
    observer = Observer(Told())
    observer.started("triton", key="of the parent")
    compile_(observer)

    observer.forget_parent()

    assert (observer.running(), observer.figures()) == ([], {})
