"""Lines of the log that a peer can cause: each kind seldom, all of them bounded, what is left out counted.

An engine may say hello a thousand times, and each hello may hold the same difference or a new one. The first
line of a kind is what a person needs; the others would hide everything else. The subtle rule: `kind` must not
hold anything of a peer's free choice but names that are bounded themselves, and there is a limit over all
kinds, so that names made up for the purpose change nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

# The same again after so long may be news: a person has looked at the log meanwhile.
AGAIN_S = 600.0
# Over all kinds. A node has tens of ranks and each a handful of differences.
MOST_LINES, WINDOW_S = 100, 60.0
# Kinds remembered; a forgotten one costs a line.
MAX_KINDS = 4096


class SparseLog:
    """`suppressed` counts the lines that were left out."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._said: OrderedDict[Hashable, float] = OrderedDict()
        self._window_end = 0.0
        self._lines = 0
        self.suppressed = 0

    def line(self, level: int, kind: Hashable, text: str, *arguments: object) -> None:
        """Writes the line, unless its kind was written lately or too much was."""
        now = self._clock()
        if now >= self._window_end:
            self._window_end, self._lines = now + WINDOW_S, 0
        last = self._said.get(kind)
        if self._lines >= MOST_LINES or (last is not None and now - last < AGAIN_S):
            self.suppressed += 1
            return
        self._lines += 1
        self._said[kind] = now
        self._said.move_to_end(kind)
        if len(self._said) > MAX_KINDS:
            self._said.popitem(last=False)
        self._log.log(level, text, *arguments)
