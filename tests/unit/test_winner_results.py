"""The engine's own result files: read, given to a null process, seeded, never touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from winners_bench import CANDIDATES, DIGEST, H200, candidate, tuning, winner, write_result

from prefetchd.collect import read_all
from prefetchd.compilers.triton_cache import key_of
from prefetchd.compilers.triton_results import (
    Answers,
    ResultDamaged,
    given_for,
    read_fla,
    read_result,
    result_path,
    seed_fla,
    seed_result,
)
from prefetchd.store import StoreUnwritable
from prefetchd.winners import Given, Tuning, Winner


class TestReading:
    """Which results an engine reads at all."""

    @pytest.mark.parametrize(
        ("environment", "asked", "read"),
        [
            ({}, tuning(), True),
            ({}, tuning(kept=False), False),
            ({"TRITON_CACHE_AUTOTUNING": "1"}, tuning(kept=False), True),
            ({"TRITON_CACHE_AUTOTUNING": "on"}, tuning(kept=False), True),
            ({"TRITON_CACHE_AUTOTUNING": "0"}, tuning(kept=False), False),
            ({}, tuning(kept=False, module="fla.ops.kda.gate"), True),
            ({"FLA_CACHE_RESULTS": "0"}, tuning(kept=False, module="fla.ops.kda.gate"), False),
            ({"TRITON_CACHE_AUTOTUNING": "1"}, tuning(entry=""), False),
        ],
    )
    def test_depends_on_the_kernel_and_the_engine_s_environment(
        self, environment: dict[str, str], asked: Tuning, read: bool
    ) -> None:
        assert given_for(environment, ()).reads(asked) is read

    def test_fla_s_directory_is_read_whatever_else_is_set(self, tmp_path: Path) -> None:
        told = given_for({"FLA_CACHE_RESULTS": "0"}, (), tmp_path)

        assert told.reads(tuning(entry="", fla_entry="md5"))
        assert not told.reads(tuning(entry=""))


class TestChoice:
    def choice(self, told: Given, root: Path, asked: Tuning | None = None) -> int | None:
        return Answers(told, H200, root).choose(asked or tuning())

    def test_known_winner_stands_for_all(self, tmp_path: Path) -> None:
        assert self.choice(given_for({}, (winner(),)), tmp_path) == 1

    @pytest.mark.parametrize("other", [winner(128), winner(gpu="NVIDIA B200"), winner(key=[1])])
    def test_without_a_valid_one_all_are_visited(self, other: Winner, tmp_path: Path) -> None:
        assert self.choice(given_for({}, (other,)), tmp_path) is None

    def test_without_a_file_of_winners_all_are_visited(self, tmp_path: Path) -> None:
        write_result(tmp_path, tuning(), (CANDIDATES[0], [0.1]))

        assert self.choice(given_for({}, None), tmp_path) is None

    def test_engine_that_reads_no_result_needs_all(self, tmp_path: Path) -> None:
        assert self.choice(given_for({}, (winner(),)), tmp_path, tuning(kept=False)) is None

    def test_engine_s_own_result_goes_before_winners_at_hand(self, tmp_path: Path) -> None:
        write_result(tmp_path, tuning(), (CANDIDATES[2], [0.1]))

        assert self.choice(given_for({}, (winner(),)), tmp_path) == 2

    def test_fla_s_own_entry_goes_before_both(self, tmp_path: Path) -> None:
        asked, directory = tuning(fla_entry="md5"), tmp_path / "fla"
        write_result(tmp_path, asked, (CANDIDATES[2], [0.1]))
        seed_fla(directory, asked, winner(32))

        assert self.choice(given_for({}, (winner(),), directory), tmp_path, asked) == 0

    def test_damaged_result_leaves_all_as_nothing_can_take_its_place(self, tmp_path: Path) -> None:
        write_result(tmp_path, tuning(), (CANDIDATES[2], [0.1])).write_text('{"key": [64, tr')

        assert self.choice(given_for({}, (winner(),)), tmp_path) is None


class TestEngineResult:
    def test_smallest_timing_wins_and_unmeasurable_ones_are_passed_over(self, tmp_path: Path) -> None:
        inf = float("inf")
        write_result(
            tmp_path,
            tuning(),
            (CANDIDATES[0], [inf, inf, inf]),
            (CANDIDATES[1], [0.2, 0.3, 0.2]),
            (CANDIDATES[2], [0.2, 0.1, 0.2]),
        )

        assert read_result(tmp_path, tuning()) == (2, [0.2, 0.1, 0.2])

    def test_no_file_is_no_result(self, tmp_path: Path) -> None:
        assert read_result(tmp_path, tuning()) is None
        assert read_result(tmp_path, tuning(entry="")) is None

    @pytest.mark.parametrize(
        "text",
        [
            "",
            '{"key": [64, true, "torch.bfl',
            "[]",
            "{}",
            '{"key": [64, true, "torch.bfloat16"]}',
            '{"key": [64, true, "torch.bfloat16"], "configs_timings": []}',
            '{"key": [64, true, "torch.bfloat16"], "configs_timings": [[{}, [1.0]]]}',
            '{"key": [64, true, "torch.bfloat16"], "configs_timings": [[{"kwargs": {}}, [Infinity]]]}',
            '{"key": [64, true, "torch.bfloat16"], "configs_timings": [[{"kwargs": {}}, []]]}',
            '{"key": [64, true, "torch.bfloat16"], "configs_timings": [[{"kwargs": {}}]]}',
            '{"key": [65, true, "torch.bfloat16"], "configs_timings": [[{"kwargs": {}}, [1.0]]]}',
            "\x00",
        ],
    )
    def test_damaged_file_is_named_with_what_to_do(self, text: str, tmp_path: Path) -> None:
        path = write_result(tmp_path, tuning())
        path.write_text(text)

        with pytest.raises(ResultDamaged, match="remove it") as raised:
            read_result(tmp_path, tuning())
        assert str(path) in str(raised.value)

    @pytest.mark.parametrize(
        "entry",
        ["../x/scale.autotune.json", f"{DIGEST}/../scale.autotune.json", f"{DIGEST}/scale.json", "scale"],
    )
    def test_entry_that_leads_out_of_the_cache_is_refused(self, entry: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="Triton's"):
            result_path(tmp_path, tuning(entry=entry))

    def test_collecting_names_the_gpu_and_counts_the_rest(self, tmp_path: Path) -> None:
        asked = [
            tuning(),
            tuning(key=[1], entry=f"{key_of('01' * 32)}/scale.autotune.json"),
            tuning(key=[2], entry=f"{key_of('02' * 32)}/scale.autotune.json"),
            tuning(key=[3], entry=f"{key_of('03' * 32)}/scale.autotune.json"),
        ]
        stranger = tuning(key=[9], entry=f"{key_of('09' * 32)}/other.autotune.json")
        write_result(tmp_path, asked[0], (CANDIDATES[0], [0.3]), (CANDIDATES[1], [0.25, 0.24, 0.26]))
        write_result(tmp_path, asked[1]).write_text("{")
        write_result(tmp_path, asked[2], (candidate(1024), [0.1]))
        write_result(tmp_path, stranger, (CANDIDATES[0], [0.1]))

        found = read_all(asked, tmp_path, H200)

        origin = str(result_path(tmp_path, asked[0]))
        assert found.winners == [winner(origin=origin)]
        assert (found.gpu, found.tunings, found.unmeasured) == ("NVIDIA H200", 4, 1)
        assert (found.damaged, len(found.notes), found.unasked) == (2, 2, 1)


class TestSeeding:
    def test_file_holds_the_winner_alone_as_the_library_writes_it(self, tmp_path: Path) -> None:
        assert seed_result(tmp_path, tuning(), winner())

        path = result_path(tmp_path, tuning())
        assert json.loads(path.read_bytes()) == {
            "key": [64, True, "torch.bfloat16"],
            "configs_timings": [[candidate(64), [0.25, 0.24, 0.26]]],
        }
        assert path.stat().st_mode & 0o777 == 0o644
        assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]

    @pytest.mark.parametrize("text", ["the engine's own", ""])
    def test_file_that_is_there_is_never_touched(self, text: str, tmp_path: Path) -> None:
        path = write_result(tmp_path, tuning())
        path.write_text(text)
        before = path.stat()

        assert not seed_result(tmp_path, tuning(), winner())

        after = path.stat()
        assert path.read_text() == text
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    def test_winner_that_is_no_candidate_is_never_written(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="none of the candidates"):
            seed_result(tmp_path, tuning(), winner(1024))
        assert not list(tmp_path.rglob("*.json"))

    def test_cache_that_takes_no_file_is_an_error_that_names_the_variable(self, tmp_path: Path) -> None:
        root = tmp_path / "cache"
        root.touch()

        with pytest.raises(StoreUnwritable, match="TRITON_CACHE_DIR") as raised:
            seed_result(root, tuning(), winner())
        assert str(root) in str(raised.value)

    def test_fla_s_file_gains_entries_and_loses_none(self, tmp_path: Path) -> None:
        first, second = tuning(fla_entry="one"), tuning(fla_entry="two", key=[2])

        written = [
            seed_fla(tmp_path, first, winner()),
            seed_fla(tmp_path, second, winner(32)),
            seed_fla(tmp_path, first, winner(32)),
        ]

        assert written == [True, True, False]
        file = json.loads((tmp_path / "scale.json").read_bytes())
        assert (file["kernel_name"], file["triton_version"]) == ("scale", "3.8.0")
        assert file["autotune_entries"]["one"]["autotune_key"] == [64, True, "torch.bfloat16"]
        assert read_fla(tmp_path, first) == winner().config
        assert read_fla(tmp_path, second) == winner(32).config
        assert [path.name for path in tmp_path.iterdir()] == ["scale.json"]

    def test_file_that_is_not_fla_s_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "scale.json").write_text("{")

        with pytest.raises(ResultDamaged, match=r"scale\.json"):
            seed_fla(tmp_path, tuning(fla_entry="one"), winner())
        assert (tmp_path / "scale.json").read_text() == "{"
