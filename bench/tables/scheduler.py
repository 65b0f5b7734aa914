"""The scheduler of table 3: requests that arrive by chance, cut into the steps that an engine would run.

Pure: the time is passed in and nothing is launched. As in engines, a step decodes one token of everything
that runs and fills the rest of its budget with prefill chunks, the oldest first; the last chunk of a prompt
is a ragged remainder. Now and then a sequence with unverified drafts is suspended, which launches what no
other step does: that is a step of its own kind.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

BUDGET = 2048
MOST_RUNNING = 48
# Every so many requests, one is suspended after this many tokens.
SUSPEND_EVERY, SUSPEND_AT = 16, 5

Kind = Literal["decode", "prefill", "suspend"]


class Arrival(NamedTuple):
    """A request: seconds after the beginning, tokens of its prompt, tokens it will be given."""

    at: float
    prompt: int
    answer: int


def arrivals(seed: int, rate: float) -> Iterator[Arrival]:
    """A Poisson process of `rate` a second, for ever; prompts from short questions to long documents."""
    chance = random.Random(seed)
    at = 0.0
    while True:
        at += chance.expovariate(rate)
        prompt = min(6000, max(8, round(chance.lognormvariate(6.3, 1.0))))
        yield Arrival(at, prompt, 1 + min(200, round(chance.expovariate(1 / 40))))


@dataclass
class Sequence:
    """A request on its way; `first_token` is when its prompt was through, None before."""

    arrival: Arrival
    number: int
    prefilled: int = 0
    given: int = 0
    first_token: float | None = None
    suspended: bool = False


@dataclass
class Step:
    """What one forward runs: prefill chunks, and one token for each sequence that decodes."""

    kind: Kind
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    # Of the decodes, those whose drafts are verified because they are put away after this step.
    leaving: list[Sequence] = field(default_factory=list)

    @property
    def lengths(self) -> tuple[int, ...]:
        """New tokens of each prefill."""
        return tuple(tokens for _, tokens in self.chunks)

    @property
    def tokens(self) -> int:
        """All rows of the batch."""
        return sum(self.lengths) + len(self.decodes)


class Scheduler:
    """`admit` what has arrived, run `next_step`, say when it `ended`."""

    def __init__(self, coming: Iterator[Arrival]) -> None:
        self.sequences: list[Sequence] = []
        self._coming, self._next = coming, next(coming)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def next_arrival(self) -> float:
        """When there will be something to do, if there is nothing now."""
        return self._next.at

    def admit(self, now: float) -> None:
        """Takes what has arrived by now."""
        while self._next.at <= now:
            sequence = Sequence(self._next, len(self.sequences))
            self.sequences.append(sequence)
            self._waiting.append(sequence)
            self._next = next(self._coming)

    def next_step(self) -> Step | None:
        """The step to run now, or None when nobody waits."""
        leaving = [one for one in self._running if self._is_suspended_now(one)]
        if leaving:
            for one in leaving:
                one.suspended = True
            return Step("suspend", decodes=list(self._running), leaving=leaving)
        decodes = list(self._running)
        chunks = []
        budget = BUDGET - len(decodes)
        for sequence in list(self._waiting)[: MOST_RUNNING - len(self._running)]:
            tokens = min(budget, sequence.arrival.prompt - sequence.prefilled)
            if tokens <= 0:
                break
            chunks.append((sequence, tokens))
            budget -= tokens
        if not chunks and not decodes:
            return None
        return Step("prefill" if chunks else "decode", chunks, decodes)

    def ended(self, step: Step, now: float) -> None:
        """The step's tokens are there."""
        for sequence in step.decodes:
            sequence.given += 1
        for sequence, tokens in step.chunks:
            sequence.prefilled += tokens
            if sequence.prefilled == sequence.arrival.prompt:
                sequence.first_token, sequence.given = now, 1
                self._waiting.remove(sequence)
                self._running.append(sequence)
        self._running = [one for one in self._running if one.given < one.arrival.answer]

    @staticmethod
    def _is_suspended_now(sequence: Sequence) -> bool:
        chosen = sequence.number % SUSPEND_EVERY == SUSPEND_EVERY - 1
        return chosen and not sequence.suspended and sequence.given >= SUSPEND_AT
