"""The scheduler that the traffic replay is scripted by: it cuts batches as engines do, and forgets nobody."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from tables.gemm_traffic import coarse_grid, fast_list, fine_grid, traffic
from tables.scheduler import BUDGET, MOST_RUNNING, Arrival, Scheduler, Step, arrivals

STEP_S = 0.02


def played(scheduler: Scheduler, seconds: float) -> list[Step]:
    """All steps of so long, each of the same time."""
    steps, now = [], 0.0
    while now < seconds:
        scheduler.admit(now)
        now += STEP_S
        if step := scheduler.next_step():
            steps.append(step)
            scheduler.ended(step, now)
    return steps


def test_no_step_exceeds_its_budget_and_no_more_run_than_may() -> None:
    steps = played(Scheduler(arrivals(1, rate=20.0)), 30)

    assert max(step.tokens for step in steps) == BUDGET
    assert max(len(step.decodes) for step in steps) <= MOST_RUNNING


def test_all_kinds_occur_and_chunks_are_ragged_and_aligned() -> None:
    steps = played(Scheduler(arrivals(1, rate=6.0)), 30)

    assert {step.kind for step in steps} == {"decode", "prefill", "suspend"}
    ragged = [any(length % 64 for length in step.lengths) for step in steps if step.chunks]
    assert any(ragged)
    assert not all(ragged)


def test_long_prompt_is_cut_and_gets_its_first_token_with_the_last_chunk() -> None:
    coming = iter([Arrival(0.0, BUDGET + 100, 3), Arrival(99.0, 8, 1)])
    scheduler = Scheduler(coming)

    steps = played(scheduler, 1)

    assert [step.lengths for step in steps] == [(BUDGET,), (100,), (), ()]
    assert scheduler.sequences[0].first_token == 2 * STEP_S
    assert scheduler.sequences[0].given == 3


def test_everybody_who_came_is_served_once_there_is_time() -> None:
    early = islice(arrivals(3, rate=6.0), 100)
    scheduler = Scheduler(iter([*early, Arrival(1e9, 8, 1)]))

    played(scheduler, 120)

    assert len(scheduler.sequences) == 100
    assert all(one.given == one.arrival.answer for one in scheduler.sequences)
    assert scheduler.next_step() is None


def test_arrivals_and_traffic_are_the_same_for_the_same_seed() -> None:
    assert list(islice(arrivals(5, 6.0), 50)) == list(islice(arrivals(5, 6.0), 50))
    assert list(islice(traffic(5, 8192, 5), 50)) == list(islice(traffic(5, 8192, 5), 50))
    assert list(islice(traffic(5, 8192, 5), 50)) != list(islice(traffic(6, 8192, 5), 50))


def test_traffic_stays_in_its_range() -> None:
    calls = list(islice(traffic(1, 8192, 5), 5000))

    assert {shape for shape, _ in calls} == set(range(5))
    assert min(m for _, m in calls) == 1
    assert 8000 < max(m for _, m in calls) <= 8192


def test_warm_up_lists_are_those_that_were_published() -> None:
    assert len(fine_grid(8192)) == 520
    assert coarse_grid(8192)[:17] == [*range(8, 136, 8), 256]
    assert fast_list(4096)[1022:1026] == [1023, 1024, 1026, 1028]
    assert fast_list(8192)[-2:] == [8184, 8192]
