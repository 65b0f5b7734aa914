"""Triton observed in an engine, and replayed: what was compiled once is never compiled there again."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton")

from answering import answer_of
from triton_kernels import DOUBLE_VARIANTS, SCALE_VARIANTS
from triton_site import HERE, Site

from prefetchd.compilers.base import EntryState, Job
from prefetchd.null_device import launcher
from prefetchd.null_device.launcher import KEEP_NO_TIMINGS
from prefetchd.pipeline import Ending
from prefetchd.shapelog import Record, decode_record
from prefetchd.winners import Winner

VARIANTS = SCALE_VARIANTS + DOUBLE_VARIANTS
LINES = ["installed", pytest.param("other", marks=[pytest.mark.slow, pytest.mark.ci])]
ALLOWED = {"PREFETCHD_REPLAY_PACKAGES": "observed_kernels, triton_kernels"}


class Engine:
    """An engine's environment in which no provider of ours can be imported."""

    def __init__(self, place: Path, *, other: bool = False) -> None:
        self.site = Site(place, other=other)
        shadow = place / "without-providers"
        (shadow / "prefetchd_providers").mkdir(parents=True)
        (shadow / "prefetchd_providers" / "__init__.py").write_text('raise ImportError("not here")\n')
        environment = self.site.environment
        environment["PYTHONPATH"] = f"{shadow}:{environment['PYTHONPATH']}"
        environment.update(ALLOWED)

    def run(self, calls: str, *options: str, **changes: str) -> dict[str, Any]:
        child = launcher.environment(self.site.target, {**self.site.environment, **changes}, integer_ops=True)
        if "--measure" in options:
            for name in KEEP_NO_TIMINGS:
                del child[name]
        return answer_of([str(HERE / "observed_engine.py"), calls, *options], child)

    def rebuild(self, answer: dict[str, Any], **changes: str) -> tuple[list[Job], list[str]]:
        """The jobs of an engine's records, and why others are none."""
        environment = {**self.site.environment, **changes}
        made = answer_of(
            [str(HERE / "observed_replay.py"), "h200"], environment, given=json.dumps(answer["records"])
        )
        assert not made["torch"]
        return msgspec.msgpack.decode(base64.b64decode(made["jobs"]), type=list[Job]), made["refused"]

    def empty_cache(self) -> None:
        self.site.root = self.site.place / "another-cache"
        self.site.environment["TRITON_CACHE_DIR"] = str(self.site.root)


def records(answer: dict[str, Any]) -> list[Record]:
    return [decode_record(base64.b64decode(text)) for text in answer["records"]]


def compiles(answer: dict[str, Any]) -> int:
    return int(answer["figures"].get("triton.compiles", 0))


@pytest.fixture(params=LINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    return Engine(tmp_path, other=request.param == "other")


@pytest.fixture
def installed(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


@pytest.mark.parametrize(
    ("calls", "count"),
    [
        ("small,commit", VARIANTS + 1),
        # fla's prefill from a state, its decode, and the commit of a suspended request's state.
        pytest.param("kda,commit", None, marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("mamba", None, marks=pytest.mark.slow),
    ],
)
def test_what_an_engine_compiled_is_replayed_without_a_provider_and_never_compiled_again(
    engine: Engine, calls: str, count: int | None
) -> None:
    first = engine.run(calls)
    seen = records(first)
    engine.empty_cache()
    jobs, refused = engine.rebuild(first)
    outcomes = engine.site.warm(jobs)
    second = engine.run(calls, "--forbid")

    assert (first["raised"], first["errors"], first["open"], refused) == ([], 0, 0, [])
    assert compiles(first) == len(seen) == len(jobs)
    assert count is None or len(seen) == count
    assert {each.cause for each in seen} == {"unplanned"}
    assert all(each.seconds > 0 and each.site for each in seen)
    assert {job.key for job in jobs} == {each.key for each in seen}
    assert {outcome.ending for outcome in outcomes} == {Ending.COMPILED}
    assert (second["raised"], compiles(second)) == ([], 0)
    assert second["figures"]["triton.hits"] == len(seen)


def test_warm_cache_is_all_hits_and_loads_and_no_compile(engine: Engine) -> None:
    cold = engine.run("small")
    warm = engine.run("small")

    assert compiles(cold) == VARIANTS
    assert (compiles(warm), warm["records"]) == (0, [])
    assert warm["figures"]["triton.hits"] == VARIANTS
    assert warm["figures"]["triton.loads"] == VARIANTS
    assert warm["figures"]["triton.load_seconds"] > 0


def test_record_says_under_which_key_and_what_changed_against_the_nearest(installed: Engine) -> None:
    answer = installed.run("small")
    scale = [each for each in records(answer) if each.rebuild["name"] == "_scale"]

    assert all((installed.site.root / each.key).is_dir() for each in scale)
    assert scale[0].changed == "first variant of triton_kernels._scale"
    assert scale[1].changed.startswith("n%16: yes -> no; num_warps, ")
    assert scale[2].changed.startswith("n: i32 -> 1; n%16: no -> absent; ")
    assert {each.site.split(" ")[0] for each in scale} == {"triton_kernels.run_all"}


def test_measured_winner_is_told_as_winners_are_kept_and_a_found_one_is_no_benchmark(engine: Engine) -> None:
    measured = engine.run("small", "--measure")
    found = engine.run("small", "--measure")
    winners = msgspec.convert(measured["winners"], list[Winner])

    assert measured["errors"] == found["errors"] == 0
    assert measured["figures"]["triton.benchmarks"] == 2
    assert {(each.gpu, each.sm_count) for each in winners} == {("NVIDIA H200", 132)}
    assert {(each.module, each.kernel) for each in winners} == {("triton_kernels", "double")}
    assert [each.key[0] for each in winners] == [64, 100]
    assert "triton.benchmarks" not in found["figures"]
    assert found["winners"] == []


def test_what_is_timed_on_the_null_device_is_a_benchmark_and_no_winner(installed: Engine) -> None:
    answer = installed.run("small")

    assert answer["figures"]["triton.benchmarks"] == 2
    # The compiles of its candidates are told as such, and not again as part of it.
    assert answer["figures"]["triton.benchmark_seconds"] < answer["figures"]["triton.compile_seconds"]
    assert answer["winners"] == []


def test_compile_that_fails_has_ended_and_is_not_replayed(engine: Engine) -> None:
    observed = engine.run("fail")
    (record,) = records(observed)
    alone = engine.run("fail", "--without")
    _, (refused,) = engine.rebuild(observed)

    assert observed["raised"] == alone["raised"]
    assert "this kernel is for large blocks" in observed["raised"][0]
    assert (record.ok, observed["open"], observed["errors"]) == (False, 0, 0)
    assert refused.startswith("ok: false")


def test_function_compiled_in_is_replayed_where_the_library_can_write_it_down(engine: Engine) -> None:
    answer = engine.run("map_function")
    engine.empty_cache()
    jobs, refused = engine.rebuild(answer)
    outcomes = engine.site.warm(jobs)

    assert (answer["raised"], answer["errors"], compiles(answer)) == ([], 0, 1)
    if answer["triton"] < "3.8":
        assert jobs == []
        assert "function" in refused[0]
        assert f"Triton {answer['triton']} cannot write down" in refused[0]
        return
    assert [outcome.ending for outcome in outcomes] == [Ending.COMPILED]
    assert compiles(engine.run("map_function", "--forbid")) == 0


def test_kernels_without_a_module_are_seen_and_refused_by_name(installed: Engine) -> None:
    answer = installed.run("local,directly")
    _, refused = installed.rebuild(answer)

    assert (compiles(answer), answer["raised"], answer["errors"]) == (2, [], 0)
    assert [text.split(":")[0] for text in refused] == ["rebuild.name", "rebuild"]
    assert "local.<locals>.inside" in refused[0]


def test_compile_in_another_thread_is_told_with_what_rebuilds_it(engine: Engine) -> None:
    answer = engine.run("in_other_threads")
    jobs, refused = engine.rebuild(answer)

    assert (answer["raised"], answer["errors"], answer["open"]) == ([], 0, 0)
    assert (compiles(answer), len(jobs), refused) == (3, 3, [])


def test_failure_that_tells_nobody_ends_when_its_thread_begins_the_next_compile(installed: Engine) -> None:
    alone = installed.run("directly_broken")
    answer = installed.run("directly_broken,commit")

    assert (alone["open"], compiles(alone)) == (1, 0)
    assert (answer["open"], answer["errors"]) == (0, 0)
    assert [each.ok for each in records(answer)] == [False, True]


@pytest.mark.parametrize("after", ["chain", "replace"])
@pytest.mark.parametrize("only", ["", "cache", "listener", "post"])
def test_hooks_that_others_set_after_ours_hear_all_and_cost_us_detail_at_most(
    installed: Engine, after: str, only: str
) -> None:
    answer = installed.run("commit", "--after", after, *(["--only", only] if only else []))
    (record,) = records(answer)

    assert (answer["raised"], answer["errors"], answer["open"], compiles(answer)) == ([], 0, 0, 1)
    assert set(answer["after"]) == ({only} if only else {"cache", "post", "listener", "load"})
    assert (installed.site.root / record.key).is_dir()
    specialization_lost = after == "replace" and only in ("", "cache")
    assert (record.rebuild is None) == specialization_lost


def test_hooks_set_before_ours_are_called_and_their_exceptions_are_theirs(installed: Engine) -> None:
    chained = installed.run("commit", "--before", "chain")
    installed.empty_cache()
    raising = installed.run("commit", "--before", "raise")
    alone = installed.run("commit", "--before", "raise", "--without")

    assert set(chained["before"]) == {"cache", "post", "listener", "load"}
    assert compiles(chained) == 1
    assert raising["raised"] == alone["raised"] == ["RuntimeError: cache of somebody else"]
    assert (raising["errors"], raising["open"]) == (0, 0)


def test_fail_fast_names_the_kernel_and_what_to_do(installed: Engine) -> None:
    answer = installed.run("commit", "--on-compile", "error")
    again = installed.run("commit", "--on-compile", "error")

    (text,) = answer["raised"]
    assert text.startswith("EngineCompiled: the engine compiled triton ")
    assert "observed_kernels.commit" in text
    # The compile itself was whole, and the next process finds it.
    assert (again["raised"], compiles(again)) == ([], 0)


def test_record_of_another_triton_is_refused_with_both_versions(installed: Engine, tmp_path: Path) -> None:
    other = Engine(tmp_path / "other", other=True)
    answer = other.run("commit")

    _, (refused,) = installed.rebuild(answer)

    assert refused.startswith("rebuild.parts: made under another fingerprint")
    assert f"triton.version: recorded '{answer['triton']}', here '" in refused


def test_worker_compiles_nothing_for_a_record_with_a_forged_key(installed: Engine) -> None:
    answer = installed.run("commit")
    (job,), _ = installed.rebuild(answer)
    key = "A" * (len(job.key) - 1) + "Q"
    installed.empty_cache()

    (outcome,) = installed.site.warm([msgspec.structs.replace(job, key=key)])

    assert outcome.ending is Ending.FAILED
    assert f"the engine looks for it under {key}" in outcome.text
    assert installed.site.compiler().look_up(key) is EntryState.MISSING
