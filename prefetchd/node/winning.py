"""Measured winners for live work: helpers are told of them, and engines find them as their tuners' results.

The two belong together. A helper that knows a winner leaves its rivals out, and an engine that does not find
the winner's result compiles and measures every one of them. So what a trace met is seeded into each of the
group's directories, in those that join later too, and only tuners whose results the engine reads are told.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from prefetchd.compilers.triton_results import Answers, given_for, seed_result
from prefetchd.config import Settings
from prefetchd.shapelog import LogUnusable, log_directory
from prefetchd.store import StoreUnwritable
from prefetchd.targets import Target
from prefetchd.winners import Given, Tuning, Verdict, WinnersUnreadable, read_winners

# Beside the shape logs, where observers and `winners collect` write it.
WINNERS_FILE = "winners.jsonl"
# Tunings of one group that are remembered for directories which join later; a model has some hundred.
MAX_TUNINGS = 10_000

log = logging.getLogger("prefetchd.daemon")


def live_given(settings: Settings, environment: Mapping[str, str], target: Target) -> Given:
    """What a helper of this target is told; without any winner of it, every candidate is wanted."""
    try:
        path = log_directory(settings.log_dir, os.environ) / WINNERS_FILE
        found = read_winners(path)[0] if path.is_file() else []
    except (LogUnusable, WinnersUnreadable, OSError) as error:
        log.warning("no winners are used: %s", error)
        found = []
    mine = tuple(each for each in found if (each.gpu, each.sm_count) == (target.name, target.sm_count))
    return given_for(environment, mine or None)


class Tunings:
    """The tunings of one group that a known winner answers, each once, and where they were seeded."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.given = Given()
        self._met: dict[tuple[str, ...], Tuning] = {}
        self.seeded = 0

    def __len__(self) -> int:
        return len(self._met)

    def met(self, tunings: Iterable[Tuning]) -> list[Tuning]:
        """Takes the tunings of a trace; those that are new and are to be seeded."""
        if not self.given.winners_only:
            return []
        fresh = {
            tuning.identity: tuning
            for tuning in tunings
            if tuning.entry and tuning.identity not in self._met and self.given.reads(tuning)
        }
        self._met.update(fresh)
        while len(self._met) > MAX_TUNINGS:
            del self._met[next(iter(self._met))]
        return list(fresh.values())

    def all(self) -> list[Tuning]:
        """Every one that is remembered."""
        return list(self._met.values())

    def seed(self, roots: Iterable[str], tunings: Iterable[Tuning]) -> str:
        """Writes the known winners into these directories; why some could not be, or nothing. Blocks."""
        problem = ""
        tunings = list(tunings)
        for root in map(Path, roots):
            answers = Answers(self.given, self._target, root)
            for tuning in tunings:
                answer = answers.answer(tuning)
                if answer.verdict is not Verdict.KNOWN or answer.winner is None:
                    continue
                try:
                    self.seeded += seed_result(root, tuning, answer.winner)
                except (StoreUnwritable, ValueError) as error:
                    problem = str(error)
        return problem
