"""Winners: the record and its file, merging, and the judgement of each by who measured it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from winners_bench import CANDIDATES, H100, H200, candidate, tuning, winner

from prefetchd.winners import (
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    WINNER_VERSION,
    Configuration,
    Known,
    Verdict,
    Winner,
    WinnersUnreadable,
    append_winners,
    canonical,
    configuration,
    decode_winner,
    encode_winner,
    index_of,
    known_in,
    merge,
    read_winners,
)


class TestRecord:
    def test_comes_back_as_it_was_written(self) -> None:
        full = winner(config=Configuration(kwargs={"A": 1, "B": None}, maxnreg=128, ir_override="a.ttgir"))

        assert decode_winner(encode_winner(full)) == full
        assert full.version == WINNER_VERSION

    def test_field_and_version_of_a_later_release_are_tolerated(self) -> None:
        fields = {**msgspec.to_builtins(winner()), "version": WINNER_VERSION + 1, "power_w": 700}

        assert decode_winner(json.dumps(fields).encode()).config == winner().config

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("gpu", ""),
            ("sm_count", 0),
            ("timing_ms", []),
            ("timing_ms", [-1.0]),
            ("timing_ms", [None]),
            ("key", "64"),
            ("config", {"num_warps": 4}),
        ],
    )
    def test_wrong_field_is_named(self, field: str, value: object) -> None:
        line = json.dumps({**msgspec.to_builtins(winner()), field: value}).encode()

        with pytest.raises(ValueError, match=field):
            decode_winner(line)

    @pytest.mark.parametrize("timing", [float("inf"), float("nan")])
    def test_what_could_not_be_measured_is_no_winner(self, timing: float) -> None:
        with pytest.raises(ValueError, match="timing_ms"):
            encode_winner(winner(timing_ms=[timing]))

    def test_endless_line_is_refused_before_it_is_read(self) -> None:
        with pytest.raises(ValueError, match="more than"):
            decode_winner(b" " * (MAX_LINE_BYTES + 1))


class TestFile:
    def test_bad_lines_are_reported_by_number_and_the_others_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "winners.jsonl"
        path.write_bytes(b"{]\n\n" + encode_winner(winner()) + b'{"gpu": 3}\n' + encode_winner(winner())[:50])

        winners, problems = read_winners(path)

        assert winners == [winner()]
        assert [text.split(": ")[0] for text in problems] == [f"{path}:{n}" for n in (1, 4, 5)]

    @pytest.mark.parametrize("depth", [17, 500, 990, 1000, 20000])
    def test_deeply_nested_line_is_no_winner(self, tmp_path: Path, depth: int) -> None:
        path = tmp_path / "winners.jsonl"
        nested = encode_winner(winner(key=["inside"])).replace(b'"inside"', b"[" * depth + b"]" * depth)
        path.write_bytes(nested + encode_winner(winner()))

        winners, problems = read_winners(path)

        assert (merge(winners), len(problems)) == ([winner()], 1)

    def test_neither_noise_nor_endless_files_take_memory(self, tmp_path: Path) -> None:
        path = tmp_path / "winners.jsonl"
        path.write_bytes(encode_winner(winner()) + b"noise\n" * 50_000)
        with path.open("ab") as file:
            file.truncate(1 << 40)

        tracemalloc.start()
        winners, problems = read_winners(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert (winners, len(problems)) == ([winner()], 102)
        assert peak < 8 * MAX_FILE_BYTES

    def test_full_file_is_not_added_to(self, tmp_path: Path) -> None:
        path = tmp_path / "winners.jsonl"
        with path.open("wb") as file:
            file.truncate(MAX_FILE_BYTES - 10)

        with pytest.raises(WinnersUnreadable, match="remove it"):
            append_winners(path, [winner()])
        assert path.stat().st_size == MAX_FILE_BYTES - 10

    def test_missing_file_is_an_error_that_says_how_to_make_one(self, tmp_path: Path) -> None:
        with pytest.raises(WinnersUnreadable, match="winners collect"):
            read_winners(tmp_path / "none.jsonl")

    def test_only_what_is_new_is_added(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "winners.jsonl"
        other = winner(key=[1])

        counts = [append_winners(path, group) for group in ([winner()], [winner(), other], [other])]

        assert counts == [1, 1, 0]
        assert read_winners(path) == ([winner(), other], [])

    def test_who_adds_often_reads_the_file_once(self, tmp_path: Path) -> None:
        path = tmp_path / "winners.jsonl"
        append_winners(path, [winner()])
        known = known_in(path)
        path.unlink()
        other = winner(key=[1])

        counts = [append_winners(path, [each], known) for each in (winner(), other, other)]

        assert (counts, read_winners(path)[0]) == ([0, 1, 0], [other])

    def test_half_a_line_of_a_killed_writer_spoils_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "winners.jsonl"
        path.write_bytes(encode_winner(winner())[:40])

        append_winners(path, [winner()])

        winners, problems = read_winners(path)
        assert (winners, len(problems)) == ([winner()], 1)

    def test_place_that_takes_no_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(WinnersUnreadable, match="name another file"):
            append_winners(tmp_path / "file" / "winners.jsonl", [winner()])


class TestMerge:
    def test_faster_measurement_of_the_same_question_stands(self) -> None:
        slow, fast = winner(32, timing_ms=[0.5]), winner(64, timing_ms=[0.25])

        assert merge([slow], [fast]) == merge([fast, slow]) == [fast]

    @pytest.mark.parametrize(
        "change",
        [
            {"gpu": H100.name},
            {"sm_count": 78},
            {"triton": "3.6.0"},
            {"module": "other"},
            {"kernel": "other"},
            {"source": "other"},
            {"key": [64, 1, "torch.bfloat16"]},
            {"key": [64.0, True, "torch.bfloat16"]},
        ],
    )
    def test_other_questions_stay_apart(self, change: dict[str, Any]) -> None:
        assert len(merge([winner()], [winner(**change)])) == 2

    @settings(max_examples=50)
    @given(
        st.lists(
            st.builds(
                lambda block, key, timing: winner(block, key=[key], timing_ms=[timing]),
                st.sampled_from([32, 64]),
                st.integers(0, 2),
                st.sampled_from([0.1, 0.2]),
            )
        ),
        st.randoms(),
    )
    def test_order_and_repetition_change_nothing(self, winners: list[Winner], chance: Any) -> None:
        shuffled = [*winners, *winners[:2]]
        chance.shuffle(shuffled)

        assert merge(shuffled) == merge(merge(winners), winners)


class TestConfigurations:
    def test_function_of_a_tuner_and_unknown_fields_are_left_out(self) -> None:
        assert configuration(candidate(32, new_knob=1)) == Configuration(kwargs={"BLOCK": 32})

    def test_is_found_by_all_its_fields(self) -> None:
        found = [index_of(configuration(each), CANDIDATES) for each in CANDIDATES]

        assert found == [0, 1, 2]
        assert index_of(Configuration(kwargs={"BLOCK": 64}, maxnreg=64), CANDIDATES) is None

    def test_true_is_not_one(self) -> None:
        candidates = [candidate(0, kwargs={"FLAG": 1}), candidate(0, kwargs={"FLAG": True})]

        assert index_of(Configuration(kwargs={"FLAG": True}), candidates) == 1

    def test_two_that_look_the_same_cannot_be_told_apart(self) -> None:
        assert index_of(Configuration(kwargs={"BLOCK": 32}), [candidate(32), candidate(32, new=1)]) is None

    def test_canonical_text_ignores_the_order_of_names_only(self) -> None:
        assert canonical({"a": 1, "b": [1, 2]}) == canonical({"b": [1, 2], "a": 1})
        assert canonical([1, 2]) != canonical([2, 1])


class TestJudgement:
    def test_own_winner_is_known(self) -> None:
        assert Known([winner()], H200).judge(tuning()) == (Verdict.KNOWN, winner())

    def test_nothing_measured_is_missing(self) -> None:
        assert Known([], H200).judge(tuning())[0] is Verdict.MISSING
        assert Known([winner()], H200).judge(tuning(key=[65]))[0] is Verdict.MISSING
        assert Known([winner()], H200).judge(tuning(kernel="other"))[0] is Verdict.MISSING

    @pytest.mark.parametrize("block", [128, 16])
    def test_configuration_that_is_no_candidate_any_more_is_dropped(self, block: int) -> None:
        assert Known([winner(block)], H200).judge(tuning()) == (Verdict.DROPPED, None)

    @pytest.mark.parametrize(
        "device",
        [{"gpu": "NVIDIA H100 80GB HBM3"}, {"gpu": "NVIDIA H200 NVL"}, {"sm_count": 114}],
    )
    def test_another_gpu_s_winner_is_refused_with_its_name(self, device: dict[str, Any]) -> None:
        known = Known([winner(**device)], H200)

        assert known.judge(tuning()) == (Verdict.REFUSED, None)
        assert known.measured_on(tuning()).startswith(str(device.get("gpu", H200.name)))

    @pytest.mark.parametrize("change", [{"triton": "3.6.0"}, {"source": "edited"}])
    def test_another_library_s_or_source_s_winner_is_outdated(self, change: dict[str, str]) -> None:
        assert Known([winner(**change)], H200).judge(tuning()) == (Verdict.OUTDATED, None)

    def test_own_winner_wins_over_every_other(self) -> None:
        known = Known([winner(32, gpu="NVIDIA H100"), winner(32, triton="3.6.0"), winner()], H200)

        assert known.judge(tuning()) == (Verdict.KNOWN, winner())
