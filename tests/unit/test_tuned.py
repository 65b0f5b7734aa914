"""The account that a warm-up keeps of tunings and their winners."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from winners_bench import H200, tuning, winner, write_result

from prefetchd.compilers.triton_results import Answers, given_for, read_result
from prefetchd.coverage import Ledger, WinnerFigures
from prefetchd.tuned import TuningBooks
from prefetchd.winners import Tuning, Winner


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
