import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, cast

import pytest
from rich.console import Console

from prefetchd.coverage import Coverage, ProviderCoverage
from prefetchd.progress import PLAIN_INTERVAL_S, Live, Plain, Progress, Unbroken


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_progress_is_one_line_an_interval_and_one_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()

    with Plain(stream, clock).phase("compile", 4) as advance:
        advance("a")
        clock.now = PLAIN_INTERVAL_S
        advance("b")
        advance("c")
        clock.now = 2 * PLAIN_INTERVAL_S
        advance("d")

    assert stream.getvalue().splitlines() == ["compile: 2/4 b", "compile: 4/4 in 10.0 s"]


@pytest.mark.parametrize("progress", [Plain, lambda stream: Live(Console(file=stream, force_terminal=True))])
def test_work_goes_on_where_nobody_can_see_it(progress: Callable[[TextIO], Progress]) -> None:
    done = []
    # Every write fails: a log on a full disk, a terminal that was closed.
    stream = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
    with contextlib.suppress(OSError), contextlib.closing(stream):
        shown = progress(cast(TextIO, Unbroken(stream)))
        shown.found(Coverage(target="h200", max_tokens=8, dry_run=False), missing=3)
        with shown.phase("compile", 2) as advance:
            for part in "ab":
                advance(part)
                done.append(part)
        done.append("end")

    assert done == ["a", "b", "end"]


def test_counts_are_said_before_compiling() -> None:
    stream = io.StringIO()
    coverage = Coverage(target="h200", max_tokens=8, dry_run=False)
    coverage.providers["deep_gemm"] = ProviderCoverage(requests=80, variants=5)

    Plain(stream).found(coverage, missing=3)

    assert stream.getvalue() == "80 requests need 5 variants: 2 in the cache, 3 to compile\n"
