"""What a person sees while something long runs: bars on a terminal, plain lines elsewhere.

With --json nothing is shown. Everything goes to standard error, so that standard output holds results only.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from prefetchd.coverage import Coverage

# Plain output is read in logs: one line in so many seconds is enough to see that it moves.
PLAIN_INTERVAL_S = 5.0


class Progress(Protocol):
    """Where phases report."""

    def phase(self, name: str, total: int) -> AbstractContextManager[Callable[[str], None]]:
        """One long step of `total` parts; call what it yields with each part's name as it ends."""
        ...

    def found(self, coverage: Coverage, missing: int) -> None:
        """The exact number of variants is known, before anything is compiled."""
        ...


class Silent:
    """For machine-readable output."""

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[str], None]]:
        """Reports nothing."""
        yield lambda part: None

    def found(self, coverage: Coverage, missing: int) -> None:
        """Reports nothing."""


class Unbroken:
    """A stream whose failures end nothing: no compile is lost because a log's disk is full."""

    def __init__(self, stream: TextIO | None) -> None:
        # Python has no stream for a descriptor that was closed at the start.
        self._stream = stream or io.StringIO()

    def write(self, text: str) -> int:
        """Says that all is written, whatever happened."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Does what can be done."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Plain:
    """Lines for logs and pipes."""

    def __init__(self, stream: TextIO | Unbroken, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[str], None]]:
        """A line at most every few seconds and one at the end."""
        count, begun = 0, self._clock()
        last = begun

        def advance(part: str) -> None:
            nonlocal count, last
            count += 1
            if self._clock() - last >= PLAIN_INTERVAL_S and count < total:
                last = self._clock()
                self._say(f"{name}: {count}/{total} {part}")

        yield advance
        self._say(f"{name}: {count}/{total} in {self._clock() - begun:.1f} s")

    def found(self, coverage: Coverage, missing: int) -> None:
        """The counts, one line."""
        self._say(_summary(coverage, missing))

    def _say(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()


class Live:
    """Bars on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar with counts and the time left."""
        columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bars(
            *columns, TimeRemainingColumn(), TextColumn("{task.fields[part]}"), console=self._console
        ) as bars:
            task = bars.add_task(name, total=total, part="")

            def advance(part: str) -> None:
                bars.update(task, advance=1, part=part)

            yield advance

    def found(self, coverage: Coverage, missing: int) -> None:
        """The counts, one line."""
        self._console.print(_summary(coverage, missing))


def progress_for(as_json: bool) -> Progress:
    """Bars on a terminal, plain lines elsewhere, nothing where a program reads the result."""
    if as_json:
        return Silent()
    stream = Unbroken(sys.stderr)
    console = Console(file=cast(TextIO, stream))
    return Live(console) if console.is_terminal else Plain(stream)


def _summary(coverage: Coverage, missing: int) -> str:
    requests = sum(provider.requests for provider in coverage.providers.values())
    variants = sum(provider.variants for provider in coverage.providers.values())
    found = variants - missing
    return f"{requests} requests need {variants} variants: {found} in the cache, {missing} to compile"
