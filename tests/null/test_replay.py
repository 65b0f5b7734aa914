"""`prefetchd replay` from end to end: what an engine compiled itself is never compiled in an engine again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from replaying import Machine
from serving import serving
from warming import NEW, Bench, Line

from prefetchd.shapelog import MAX_LINE_BYTES

# Work that no profile names: two layouts of one op, one that compiles an auxiliary kernel too.
CALLS = ("fp8:64,512,512", "fp8:300,512,1024")


@pytest.fixture
def machine(new_bench: Callable[..., Bench], line: Line) -> Machine:
    return Machine(new_bench("replay", line))


@pytest.fixture
def newer(new_bench: Callable[..., Bench]) -> Machine:
    return Machine(new_bench("replay", NEW))


@pytest.mark.parametrize("providers", ["provider", "no provider"])
def test_what_an_engine_compiled_is_not_compiled_by_the_next(machine: Machine, providers: str) -> None:
    first = machine.engine(*CALLS)
    compiled = len(machine.bench.nvcc.compiles())
    if providers == "no provider":
        machine.without_providers()
    machine.cache = "second"
    replay = machine.replay()
    second = machine.engine(*CALLS, forbid=True)

    assert (first["failed"], second["failed"]) == ([], [])
    assert first["figures"]["deep_jit.compiles"] == compiled >= 3
    assert replay.status == 0, replay.reasons
    assert replay.counts("records", "variants", "compiled") == (compiled,) * 3
    assert replay.counts("foreign", "refused", "failed", "uncovered") == (0,) * 4
    if providers == "provider":
        assert replay.result["requests"] == len(CALLS)
        assert replay.result["rebuilt"] == 0
    else:
        assert (replay.result["requests"], replay.result["rebuilt"]) == (0, compiled)
    assert "deep_jit.compiles" not in second["figures"]
    assert len(machine.bench.nvcc.compiles()) == 2 * compiled


def test_second_replay_finds_everything_there(newer: Machine) -> None:
    newer.engine(*CALLS)
    same = newer.replay()
    again = newer.replay(newer.logs, *newer.logs.glob("*.jsonl"))

    for replay in (same, again):
        assert replay.status == 0
        assert replay.counts("present", "compiled") == (replay.result["records"], 0)


def test_engine_without_a_replay_does_compile(newer: Machine) -> None:
    newer.engine(*CALLS)
    newer.cache = "second"

    assert len(newer.engine(*CALLS, forbid=True)["failed"]) == len(CALLS)


def test_two_ranks_with_different_misses_are_both_clean_after_the_merge(newer: Machine) -> None:
    newer.engine(CALLS[0], RANK="0", WORLD_SIZE="2")
    newer.cache = "second"
    newer.engine(CALLS[1], RANK="1", WORLD_SIZE="2")
    newer.cache = "third"
    logs = sorted(newer.logs.glob("*.jsonl"))
    replay = newer.replay(*logs)

    assert [path.name.rpartition(".")[0].rpartition(".")[2] for path in logs] == ["rank0", "rank1"]
    assert replay.status == 0, replay.reasons
    assert {record.rank for record in newer.records()} == {0, 1}
    for rank in ("0", "1"):
        assert newer.engine(*CALLS, forbid=True, RANK=rank, WORLD_SIZE="2")["failed"] == []


def test_forged_records_are_refused_one_by_one_and_the_rest_goes_on(newer: Machine) -> None:
    newer.engine(*CALLS)
    newer.without_providers()
    (path,) = newer.logs.glob("*.jsonl")
    good = [json.loads(line) for line in path.read_bytes().splitlines()]
    record = next(each for each in good if each.get("rebuild"))
    variants = sum(bool(each.get("rebuild")) for each in good)
    forged = [
        {**record, "key": "forged." + "0" * 32, "rebuild": {**record["rebuild"], "source": "int main() {}"}},
        {**record, "key": "../../elsewhere"},
        {**record, "key": record["key"][:-1] + "!"},
        {
            **record,
            "key": "0" * 52,
            "compiler": "triton",
            "rebuild": {"module": "os", "name": "system", "specialization": "{}", "seconds": 1.0},
        },
        {**record, "key": "x" * (2 * MAX_LINE_BYTES)},
        {**record, "key": "x" * 5000},
    ]
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in forged)
    newer.cache = "second"
    replay = newer.replay()

    assert replay.status == 1
    assert replay.counts("compiled", "failed", "unreadable") == (variants, 0, 2)
    assert replay.result["refused"] + replay.result["foreign"] == 4
    told = "\n".join(replay.reasons)
    assert "not as deep_gemm generates it" in told
    assert "not of the form" in told
    assert f"more than {MAX_LINE_BYTES}" in told
    assert newer.engine(*CALLS, forbid=True)["failed"] == []
    assert not (newer.bench.place / "elsewhere").exists()


def test_records_of_another_library_are_kept_skipped_and_counted(newer: Machine) -> None:
    newer.engine(*CALLS)
    newer.without_providers()
    before = {path: path.read_bytes() for path in newer.logs.iterdir()}
    newer.cache = "second"
    replay = newer.replay(changes={"NVCC_APPEND_FLAGS": "-O2"})

    assert replay.status == 0
    assert replay.counts("foreign", "variants", "refused") == (replay.result["records"], 0, 0)
    assert {path: path.read_bytes() for path in newer.logs.iterdir()} == before


def test_request_is_replayed_for_another_library_by_its_provider(newer: Machine) -> None:
    newer.engine(*CALLS)
    newer.cache = "second"
    other = {"NVCC_APPEND_FLAGS": "-O2"}
    replay = newer.replay(changes=other)

    assert replay.status == 0, replay.reasons
    assert replay.counts("requests", "foreign", "rebuilt") == (len(CALLS), 0, 0)
    assert newer.engine(*CALLS, forbid=True, **other)["failed"] == []


def test_interrupted_engine_leaves_a_log_that_is_replayed(newer: Machine) -> None:
    newer.engine(*CALLS)
    (path,) = newer.logs.glob("*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:100])
    newer.cache = "second"
    replay = newer.replay()

    assert replay.status == 0
    assert replay.result["unreadable"] == 1
    assert newer.engine(*CALLS, forbid=True)["failed"] == []


def test_directory_without_logs_is_an_error_that_says_where_they_come_from(
    newer: Machine, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="PREFETCHD_LOG_DIR"):
        newer.replay(tmp_path)


def test_daemon_replays_its_logs_for_an_engine_that_attaches(newer: Machine) -> None:
    newer.engine(*CALLS)
    variants = len(newer.records())
    newer.cache = "second"
    cache = Path(newer.environment()["DG_JIT_CACHE_DIR"])
    newer.bench.nvcc.behave()
    with serving(newer.bench, {"PREFETCHD_LOG_DIR": str(newer.logs)}) as served:
        with served.engine(cache=cache) as engine:
            engine.start()
            served.until(lambda: served.stats()["tables"]["replay"] and served.figure("ready"))
        replayed = served.stats()["tables"]["replay"]

    assert replayed["records"] == replayed["jobs"] == len(list((cache / "cache").iterdir())) == variants
    assert newer.engine(*CALLS, forbid=True)["failed"] == []


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("providers", ["provider", "no provider"])
def test_deep_gemm_and_triton_are_replayed_by_one_command(newer: Machine, providers: str) -> None:
    calls = (*CALLS, "small", "commit")
    first = newer.engine(*calls)
    if providers == "no provider":
        newer.without_providers()
    newer.cache = "second"
    replay = newer.replay()
    second = newer.engine(*calls, forbid=True)

    assert (first["failed"], second["failed"]) == ([], [])
    assert first["figures"]["triton.compiles"] > 3
    assert replay.status == 0, replay.reasons
    assert replay.counts("foreign", "refused", "failed", "uncovered") == (0,) * 4
    assert replay.result["compiled"] == replay.result["records"]
    assert second["figures"].get("triton.compiles", 0) == 0


@pytest.mark.slow
@pytest.mark.ci
def test_measured_winners_are_seeded_without_a_trace(newer: Machine) -> None:
    first = newer.engine("tuned", measure=True)
    newer.without_providers()
    newer.cache = "second"
    replay = newer.replay()
    second = newer.engine("tuned", measure=True, forbid=True)

    assert (first["failed"], second["failed"]) == ([], [])
    assert first["figures"]["triton.benchmarks"] == 2
    assert replay.status == 0, replay.reasons
    assert replay.result["winners"]["seeded"] == 2, replay.result["notes"]
    # Who lost is compiled by nobody: neither here nor by the engine.
    assert replay.counts("compiled", "rivals") == (2, first["figures"]["triton.compiles"] - 2)
    assert [second["figures"].get(f"triton.{what}", 0) for what in ("compiles", "benchmarks")] == [0, 0]


@pytest.mark.slow
def test_winners_of_another_gpu_are_not_seeded(newer: Machine) -> None:
    newer.engine("tuned", measure=True)
    winners = newer.logs / "winners.jsonl"
    winners.write_text(winners.read_text().replace("NVIDIA H200", "NVIDIA H100"))
    newer.cache = "second"
    replay = newer.replay()

    assert replay.status == 0, replay.reasons
    assert "winners" not in replay.result
    assert not list((newer.bench.place / "second").rglob("*.autotune.json"))


@pytest.mark.slow
@pytest.mark.ci
def test_function_outside_of_the_allowed_packages_is_refused_and_never_imported(newer: Machine) -> None:
    newer.engine("commit")
    newer.without_providers()
    (path,) = newer.logs.glob("*.jsonl")
    record = next(each for each in map(json.loads, path.read_bytes().splitlines()) if each.get("rebuild"))
    evil = newer.bench.place / "no-providers/evil.py"
    evil.write_text(f"open({str(newer.bench.place / 'imported')!r}, 'w')\n")
    text = json.dumps(record["rebuild"]).replace("observed_kernels", "evil")
    with path.open("a") as file:
        file.write(json.dumps({**record, "key": "A" * 52, "rebuild": json.loads(text)}) + "\n")
    newer.cache = "second"
    replay = newer.replay()

    assert replay.status == 1
    assert replay.counts("compiled", "refused") == (1, 1)
    assert "evil lies in no allowed package" in replay.reasons[0]
    assert not (newer.bench.place / "imported").exists()


@pytest.mark.slow
@pytest.mark.ci
def test_daemon_replays_triton_and_seeds_winners_without_a_provider(newer: Machine) -> None:
    first = newer.engine("commit", "tuned", measure=True)
    newer.without_providers()
    newer.cache = "second"
    newer.bench.nvcc.behave()
    # It does not say where its Triton looks, so that this is where the daemon's does.
    with serving(newer.bench, newer.environment()) as served:
        with served.engine() as engine:
            engine.start()
            served.until(lambda: served.stats()["tables"]["replay"] and served.figure("ready"))
        replayed = served.stats()["tables"]["replay"]
    second = newer.engine("commit", "tuned", measure=True, forbid=True)

    assert (first["failed"], second["failed"]) == ([], [])
    assert replayed["jobs"] == replayed["records"] == first["figures"]["triton.compiles"]
    assert replayed["winners_seeded"] == first["figures"]["triton.benchmarks"] == 2
    assert second["figures"].get("triton.benchmarks", 0) == 0
