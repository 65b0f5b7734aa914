"""Winners beside the shape logs are told to helpers and seeded where engines look, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from winners_bench import DIGEST, H100, H200, tuning, winner

from prefetchd.compilers.triton_results import read_result
from prefetchd.config import Settings
from prefetchd.node import winning
from prefetchd.node.winning import WINNERS_FILE, Tunings, live_given
from prefetchd.winners import append_winners

READS = {"TRITON_CACHE_AUTOTUNING": "1"}


def known(directory: Path) -> Tunings:
    append_winners(directory / WINNERS_FILE, [winner()])
    made = Tunings(H200)
    made.given = live_given(Settings(log_dir=str(directory)), READS, H200)
    return made


def test_winners_of_the_log_directory_are_given(tmp_path: Path) -> None:
    given = known(tmp_path).given

    assert given.winners == (winner(),)
    assert given.winners_only


@pytest.mark.parametrize("write", [False, True], ids=["no file", "other device's"])
def test_without_a_winner_of_the_device_every_candidate_is_wanted(tmp_path: Path, write: bool) -> None:
    if write:
        append_winners(tmp_path / WINNERS_FILE, [winner()])

    given = live_given(Settings(log_dir=str(tmp_path)), READS, H100)

    assert (given.winners, given.winners_only) == ((), False)


def test_file_that_cannot_be_read_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / WINNERS_FILE).write_bytes(b"\xff\n{}\n")

    assert not live_given(Settings(log_dir=str(tmp_path)), READS, H200).winners_only


def test_tuning_that_a_trace_met_is_seeded_in_every_directory(tmp_path: Path) -> None:
    tunings = known(tmp_path)
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()

    fresh = tunings.met([tuning(), tuning()])
    problem = tunings.seed(map(str, roots), fresh)

    assert (len(fresh), problem, tunings.seeded) == (1, "", 2)
    assert [read_result(root, tuning()) for root in roots] == [(1, [0.25, 0.24, 0.26])] * 2
    assert tunings.met([tuning()]) == []


def test_tuning_whose_result_the_engine_does_not_read_is_left_alone(tmp_path: Path) -> None:
    tunings = known(tmp_path)
    tunings.given = live_given(Settings(log_dir=str(tmp_path)), {}, H200)

    assert tunings.met([tuning(kept=False)]) == []


def test_tuning_without_a_winner_is_not_seeded(tmp_path: Path) -> None:
    tunings = known(tmp_path)
    (tmp_path / "a").mkdir()

    assert tunings.seed([str(tmp_path / "a")], [tuning(kernel="other")]) == ""
    assert not (tmp_path / "a" / DIGEST).exists()


def test_directory_that_cannot_be_written_is_told_and_the_others_are_seeded(tmp_path: Path) -> None:
    tunings = known(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "b").mkdir()

    problem = tunings.seed([str(tmp_path / "file"), str(tmp_path / "b")], [tuning()])

    assert str(tmp_path / "file") in problem
    assert read_result(tmp_path / "b", tuning()) is not None


def test_tunings_are_remembered_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winning, "MAX_TUNINGS", 2)
    tunings = known(tmp_path)
    tunings.met(tuning(kernel=name) for name in ("a", "b", "c"))

    assert [each.kernel for each in tunings.all()] == ["b", "c"]
