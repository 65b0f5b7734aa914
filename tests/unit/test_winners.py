"""Winners: the record and its file, the judgement, the engine's result files, seeding, the account."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from prefetchd.coverage import Ledger, WinnerFigures
from prefetchd.store import StoreUnwritable
from prefetchd.targets import load_target
from prefetchd.tuned import TuningBooks
from prefetchd.winners import (
    MAX_LINE_BYTES,
    WINNER_VERSION,
    Configuration,
    Given,
    Known,
    Tuning,
    Verdict,
    Winner,
    WinnersUnreadable,
    append_winners,
    canonical,
    configuration,
    decode_winner,
    encode_winner,
    index_of,
    merge,
    read_winners,
)

H200, H100 = load_target("h200"), load_target("h100")
DIGEST = key_of("ab" * 32)


def candidate(block: int, **fields: Any) -> dict[str, Any]:
    """As Triton's own tuner describes it in a file."""
    return {
        "kwargs": {"BLOCK": block},
        "num_warps": 4,
        "num_ctas": 1,
        "num_stages": 3,
        "maxnreg": None,
        "pre_hook": None,
        "ir_override": None,
        **fields,
    }


CANDIDATES = [candidate(32), candidate(64), candidate(64, num_warps=8)]


def winner(block: int = 64, **fields: Any) -> Winner:
    values: dict[str, Any] = {
        "gpu": H200.name,
        "sm_count": H200.sm_count,
        "triton": "3.8.0",
        "module": "ops.scale",
        "kernel": "scale",
        "source": "digest",
        "key": [64, True, "torch.bfloat16"],
        "config": Configuration(kwargs={"BLOCK": block}),
        "timing_ms": [0.25, 0.24, 0.26],
    }
    return Winner(**{**values, **fields})


def tuning(**fields: Any) -> Tuning:
    values: dict[str, Any] = {
        "triton": "3.8.0",
        "module": "ops.scale",
        "kernel": "scale",
        "source": "digest",
        "key": [64, True, "torch.bfloat16"],
        "candidates": CANDIDATES,
        "entry": f"{DIGEST}/scale.autotune.json",
        "kept": True,
    }
    return Tuning(**{**values, **fields})


def write_result(root: Path, asked: Tuning, *timings: tuple[dict[str, Any], list[float]]) -> Path:
    path = result_path(root, asked)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"key": asked.key, "configs_timings": list(timings)}))
    return path


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

    def test_missing_file_is_an_error_that_says_how_to_make_one(self, tmp_path: Path) -> None:
        with pytest.raises(WinnersUnreadable, match="winners collect"):
            read_winners(tmp_path / "none.jsonl")

    def test_only_what_is_new_is_added(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "winners.jsonl"
        other = winner(key=[1])

        counts = [append_winners(path, group) for group in ([winner()], [winner(), other], [other])]

        assert counts == [1, 1, 0]
        assert read_winners(path) == ([winner(), other], [])

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


class TestAccount:
    def books(
        self, root: Path, *winners: Winner, environment: dict[str, str] | None = None
    ) -> tuple[TuningBooks, Ledger]:
        ledger = Ledger("h200", 64, dry_run=False)
        ledger.add_provider("kda")
        ledger.add_provider("gdn")
        told = given_for(environment or {}, winners)
        return TuningBooks(Answers(told, H200, root), root, ledger), ledger

    def figures(self, ledger: Ledger, provider: str = "kda") -> WinnerFigures:
        return ledger.winners(provider)

    def test_known_ones_are_seeded_and_the_others_missing(self, tmp_path: Path) -> None:
        books, ledger = self.books(tmp_path, winner())

        books.met("kda", [tuning(), tuning(key=[1])])
        books.seed()

        assert self.figures(ledger) == WinnerFigures(known=1, seeded=1, missing=1)
        assert read_result(tmp_path, tuning()) == (1, winner().timing_ms)

    def test_tuning_met_twice_counts_for_the_provider_that_met_it_first(self, tmp_path: Path) -> None:
        books, ledger = self.books(tmp_path, winner())

        books.met("kda", [tuning(), tuning()])
        books.met("gdn", [tuning()])

        assert (self.figures(ledger).known, self.figures(ledger, "gdn")) == (1, WinnerFigures())

    def test_second_run_finds_what_the_first_has_seeded(self, tmp_path: Path) -> None:
        for _ in range(2):
            books, ledger = self.books(tmp_path, winner())
            books.met("kda", [tuning()])
            books.seed()

        assert self.figures(ledger) == WinnerFigures(known=1, present=1)

    @pytest.mark.parametrize(
        ("other", "figures", "word"),
        [
            (winner(1024), WinnerFigures(missing=1, dropped=1), "candidates"),
            (
                winner(gpu="NVIDIA H100"),
                WinnerFigures(missing=1, refused=1),
                "measured on NVIDIA H100 (132 SMs)",
            ),
            (winner(source="old"), WinnerFigures(missing=1, outdated=1), "source"),
        ],
    )
    def test_winner_that_is_not_valid_is_counted_and_named_and_never_written(
        self, other: Winner, figures: WinnerFigures, word: str, tmp_path: Path
    ) -> None:
        books, ledger = self.books(tmp_path, other)

        books.met("kda", [tuning()])
        books.seed()
        books.close()

        assert self.figures(ledger) == figures
        assert [word in note for note in ledger.coverage.notes] == [True]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("asked", [tuning(kept=False), tuning(entry="")])
    def test_result_that_the_engine_will_not_look_for_is_not_seeded(
        self, asked: Tuning, tmp_path: Path
    ) -> None:
        books, ledger = self.books(tmp_path, winner())

        books.met("kda", [asked])
        books.seed()
        books.close()

        assert self.figures(ledger) == WinnerFigures(missing=1, unread=1)
        assert ledger.coverage.notes[0].startswith("1 tuning: ops: ")
        assert list(tmp_path.iterdir()) == []

    def test_damaged_file_of_the_engine_is_told_and_left(self, tmp_path: Path) -> None:
        path = write_result(tmp_path, tuning())
        path.write_text("{")
        books, ledger = self.books(tmp_path, winner())

        books.met("kda", [tuning()])
        books.seed()
        books.close()

        assert self.figures(ledger) == WinnerFigures(missing=1)
        assert str(path) in ledger.coverage.notes[0]
        assert path.read_text() == "{"

    def test_provider_without_tuned_kernels_has_no_figures(self, tmp_path: Path) -> None:
        books, ledger = self.books(tmp_path)

        books.met("kda", [])

        shown = json.loads(msgspec.json.encode(ledger.coverage))["providers"]
        assert shown["kda"]["winners"] == msgspec.to_builtins(WinnerFigures())
        assert "winners" not in shown["gdn"]
