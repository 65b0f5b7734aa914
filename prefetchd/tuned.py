"""A warm-up's account of its tuners: which are answered, which were seeded, which the engine will measure.

Every tuning that a trace met is counted once, for the provider that met it first, and answered as the
engine's own tuner will be: from its files, else from the winners at hand. Seeding happens here, in a process
that is not on the null device and that writes nothing but measured winners.

The subtle rule: *known* is what spares the engine its measuring. A winner for a tuning whose result the
engine does not look for spares nothing; it counts as missing, and as unread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from prefetchd.compilers.triton_results import Answer, Answers, ResultDamaged, seed_fla, seed_result
from prefetchd.coverage import Ledger, WinnerFigures
from prefetchd.winners import Tuning, Verdict


class TuningBooks:
    """Collects the tunings of a warm-up into its ledger, and seeds what is known."""

    def __init__(self, answers: Answers, root: Path, ledger: Ledger) -> None:
        self._answers = answers
        self._root = root
        self._ledger = ledger
        self._met: set[tuple[str, ...]] = set()
        self._seeds: list[tuple[Tuning, Answer, WinnerFigures]] = []
        self._notes: Counter[str] = Counter()

    def met(self, provider: str, tunings: Iterable[Tuning]) -> None:
        """Takes the tunings of one trace."""
        figures = self._ledger.winners(provider)
        for tuning in tunings:
            if tuning.identity not in self._met:
                self._met.add(tuning.identity)
                self._count(tuning, figures)

    def seed(self) -> None:
        """Writes every known winner where the engine looks for it. Raises `StoreUnwritable`."""
        directory = self._answers.given.fla_config_dir
        for tuning, answer, figures in self._seeds:
            assert answer.winner is not None
            written = False
            if tuning.entry:
                written = seed_result(self._root, tuning, answer.winner)
            if directory and tuning.fla_entry:
                try:
                    written = seed_fla(Path(directory), tuning, answer.winner) or written
                except ResultDamaged as error:
                    self._notes[str(error)] += 1
            figures.seeded += written

    def close(self) -> None:
        """Hands the notes over: one line for each reason, with the number of tunings it is about."""
        for text, count in self._notes.most_common():
            self._ledger.coverage.notes.append(f"{count} tuning{'s' * (count > 1)}: {text}")

    def _count(self, tuning: Tuning, figures: WinnerFigures) -> None:
        answer = self._answers.answer(tuning)
        if answer.text:
            self._notes[answer.text] += 1
        if not self._answers.given.reads(tuning):
            figures.missing += 1
            figures.unread += 1
            self._notes[_unread(tuning)] += 1
            return
        if answer.verdict is Verdict.KNOWN:
            figures.known += 1
            figures.present += answer.present
            if answer.winner is not None:
                self._seeds.append((tuning, answer, figures))
            return
        figures.missing += 1
        figures.dropped += answer.verdict is Verdict.DROPPED
        figures.refused += answer.verdict is Verdict.REFUSED
        figures.outdated += answer.verdict is Verdict.OUTDATED
        if answer.verdict is Verdict.DROPPED:
            self._notes["the winner at hand is no longer among the candidates: all of them stand"] += 1
        if answer.verdict is Verdict.OUTDATED:
            self._notes["the winner at hand is of another Triton or kernel source: measure again"] += 1


def _unread(tuning: Tuning) -> str:
    package = tuning.module.partition(".")[0]
    if not tuning.entry:
        return f"{package}: results are never kept, since a configuration has a hook or the key is empty"
    return (
        f"{package}: the engine keeps no results and measures in every process; "
        "set TRITON_CACHE_AUTOTUNING=1 (for fla: FLA_CACHE_RESULTS=1), here and in the engine"
    )
