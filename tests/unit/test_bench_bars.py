"""What the benchmarks say of their runs: bars that are missed, machines, and where there is no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import deep_gemm_traffic
import first_contact
import traffic_replay
from tables import engine_process
from tables.replay_engine import Stolen, stolen_ticks
from tables.reports import compile_walls
from tables.results import append
from tables.rows import Stored

from prefetchd.targets import TargetError


def served(*, stalls: int = 0, nvcc: int = 0, first_s: float = 4.0, **daemon: float) -> dict[str, Any]:
    """A run of table 1's live arm: 320 CPU seconds on 16 cores and a helper up after 8 s: a bar of 32 s."""
    figures = {"every_m": {"stalls": stalls, "nvcc_starts": nvcc}, "first_request_s": first_s}
    found = {"compile_cpu_s": 320.0, "helper_up_s": 8.0, "drained_s": 31.9, "held_gpu": 0.0, **daemon}
    return {"figures": figures, "daemon": found, "machine": {"cores": 16}}


@pytest.mark.parametrize(
    ("run", "missed"),
    [
        (served(), ""),
        (served(stalls=1), "live: 1 stalls, 0 nvcc starts after ready"),
        (served(nvcc=2), "live: 0 stalls, 2 nvcc starts after ready"),
        (served(first_s=5.1), "live: the first request is served 1.10 s later than with nothing"),
        (served(drained_s=32.1), "live: drained after 32.1 s, bar 32.0 s"),
        (served(held_gpu=1.0), "live: a process of the daemon has opened the GPU"),
    ],
)
def test_each_bar_of_table_1_can_be_missed(run: dict[str, Any], missed: str) -> None:
    nothing = {"figures": {"first_request_s": 4.0}}
    assert deep_gemm_traffic.misses("live", run, nothing=nothing) == [missed][: bool(missed)]
    assert deep_gemm_traffic.misses("nothing", {"figures": {}}, nothing=None) == []


def test_a_helper_that_was_never_seen_up_makes_table_1_no_looser() -> None:
    run = served(drained_s=24.1)
    del run["daemon"]["helper_up_s"]
    assert deep_gemm_traffic.misses("live", run, nothing=None) == ["live: drained after 24.1 s, bar 24.0 s"]


@pytest.mark.parametrize("worse", [{"seconds": 1.0}, {"compiles": 1}, {"benchmarks": 1}])
def test_each_bar_of_table_2_can_be_missed(worse: dict[str, float]) -> None:
    good = {"seconds": 0.99, "compiles": 0, "benchmarks": 0}
    assert first_contact.misses("kda", "winners", {"aligned": good, "ragged": good}) == []
    (missed,) = first_contact.misses("kda", "winners", {"aligned": good, "ragged": {**good, **worse}})
    assert missed.startswith("kda, ragged:")


def replayed(*milliseconds: float, kind: str = "decode") -> dict[str, Any]:
    """A drained run of table 3 with such steps."""
    return {"figures": {"kinds_drained": traffic_replay.by_kind([[0.0, kind, ms] for ms in milliseconds])}}


def test_a_step_of_three_medians_meets_the_bar_and_a_longer_one_does_not() -> None:
    assert traffic_replay.misses("ready", replayed(10, 10, 10, 30)) == []
    (missed,) = traffic_replay.misses("ready", replayed(10, 10, 10, 30.2))
    assert missed.startswith("ready, decode:")
    assert "30.2" in missed


def test_each_kind_of_step_has_its_own_median() -> None:
    steps = [[0.0, "decode", 10.0], [0.0, "prefill", 100.0], [0.0, "decode", 11.0], [0.0, "prefill", 120.0]]
    found = traffic_replay.by_kind(steps)
    assert {kind: one["ratio"] for kind, one in found.items()} == {"decode": 1.05, "prefill": 1.09}


def test_a_daemon_that_was_never_ready_is_a_missed_bar_and_an_arm_without_one_has_none() -> None:
    assert traffic_replay.misses("live", {"figures": {}}) == ["live: the daemon was not ready before the end"]
    assert traffic_replay.misses("alone", replayed(10, 10, 10, 90)) == []


def test_what_the_host_took_is_counted_on_the_cores_that_the_thread_was_on() -> None:
    ticks, cores = iter([{0: 5, 3: 7}, {0: 6, 3: 9}, {0: 8, 3: 10}]), iter((0, 3, 3))
    stolen = Stolen(lambda: next(ticks), lambda: next(cores))
    assert stolen.since() == 3 * Stolen.TICK_MS  # it went from core 0 to core 3 in between: both
    assert stolen.since() == 1 * Stolen.TICK_MS


def test_this_machine_says_what_was_taken_of_each_of_its_cores() -> None:
    found = stolen_ticks()
    assert set(found) >= os.sched_getaffinity(0)
    assert all(ticks >= 0 for ticks in found.values())


def test_compile_walls_of_two_machines_are_not_mixed(tmp_path: Path) -> None:
    def run(gpu: str, jobs: int, **walls: float) -> dict[str, Any]:
        rows = [{"cores": int(cores[1:]), "wall_s": wall} for cores, wall in walls.items()]
        figures = {"jobs": jobs, "walls": rows}
        return {"null": False, "part": "compile", "machine": {"gpu": gpu}, "figures": figures}

    file = tmp_path / "scaling.json"
    append(file, run("NVIDIA H200, 580.1", 24, _8=14.0), run("", 24, _2=30.0, _1=60.0))
    append(file, run("NVIDIA H200, 580.2", 20, _16=9.0), run("", 24, _2=29.0))
    walls = compile_walls(Stored(tmp_path))
    assert {name: [(n, row["wall_s"]) for n, row in rows.items()] for name, rows in walls.items()} == {
        "NVIDIA H200": [(8, 14.0), (16, 9.0)],
        "no GPU": [(1, 60.0), (2, 29.0)],
    }
    assert walls["NVIDIA H200"][16]["jobs"] == 20


def test_a_script_for_the_gpu_ends_at_once_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe() -> None:
        raise TargetError("no NVIDIA driver here: it does not load; name a preset")

    monkeypatch.setattr(engine_process, "probe_target", probe)
    engine_process.need_gpu("h200")
    with pytest.raises(SystemExit) as ended:
        engine_process.need_gpu("")
    assert ended.value.code == 2
    said = "needs a real GPU: no NVIDIA driver here: it does not load; --null h200 tries the script without"
    assert said in capsys.readouterr().err
