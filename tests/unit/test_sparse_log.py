"""Lines that a peer can cause are few, whatever it says and however often."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from daemon_bench import Engine, Place, fakes, hello, run

from prefetchd.node.sparse_log import AGAIN_S, MAX_KINDS, MOST_LINES, WINDOW_S, SparseLog
from prefetchd.protocol import Goodbye, Mismatch, Stats, StatsQuery, Welcome

__all__ = ["fakes"]

SAYINGS = 1000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_the_same_kind_is_written_once_and_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    sparse = SparseLog(logging.getLogger("test"), clock)
    for value in range(50):
        sparse.line(logging.WARNING, "kind", "value %d", value)
    clock.now += AGAIN_S
    sparse.line(logging.WARNING, "kind", "value %d", 50)

    assert lines(caplog) == ["value 0", "value 50"]
    assert sparse.suppressed == 49


def test_kinds_without_end_write_no_more_than_the_window_holds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    sparse = SparseLog(logging.getLogger("test"), clock)
    for number in range(10 * MOST_LINES):
        sparse.line(logging.WARNING, number, "kind %d", number)
    assert len(lines(caplog)) == MOST_LINES
    clock.now += WINDOW_S
    sparse.line(logging.WARNING, "late", "late")

    assert lines(caplog)[-1] == "late"
    assert sparse.suppressed == 9 * MOST_LINES


def test_kinds_are_remembered_up_to_a_bound() -> None:
    clock = Clock()
    sparse = SparseLog(logging.getLogger("test"), clock)
    for number in range(MAX_KINDS + 10):
        clock.now += WINDOW_S
        sparse.line(logging.DEBUG, number, "kind")

    assert len(sparse._said) == MAX_KINDS


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("reconnects", [False, True], ids=["one connection", "a connection each"])
def test_rank_that_says_hello_a_thousand_times_writes_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reconnects: bool
) -> None:
    place = Place(tmp_path)

    found: list[float] = []

    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            for number in range(SAYINGS):
                await engine.send(
                    hello(place.root(), interpreter=f"/usr/bin/other-{number if reconnects else 'python'}")
                )
                await engine.next(Welcome if number % 2 else Mismatch)
                if reconnects:
                    await engine.send(Goodbye())
            await engine.send(StatsQuery(id=1))
            found.append((await engine.next(Stats)).figures["prefetchd_log_suppressed_total"])
            engine.close()

    run(scenario())
    written = [line for line in lines(caplog) if line.startswith("mismatch of ")]
    assert len(written) == 1
    # One connection is told of a difference once; each new one counts it, and leaves the line out.
    assert found == [SAYINGS - 1 if reconnects else 0]
