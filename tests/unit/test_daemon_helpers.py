"""A helper kept alive: what ends it, what becomes of its orders, and when it is replaced on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from daemon_bench import FakeHelper, eventually, fakes, sweep

from prefetchd.broker.types import Priority, TraceOrder
from prefetchd.node.helpers import Helper, HelperState, Limits
from prefetchd.trace import Ready, Report

__all__ = ["fakes"]

pytestmark = pytest.mark.usefixtures("fakes")

QUICK = {"at_once": 2, "max_traces": 1000, "max_rss_bytes": 1 << 50, "first_pause_s": 0.001}


class Orders:
    """The desk of a test: hands out what it was given, keeps what came back."""

    def __init__(self) -> None:
        self.waiting: list[TraceOrder] = []
        self.done: list[int] = []
        self.given_back: list[tuple[int, str]] = []
        self.ups = 0

    def add(self, *numbers: int) -> None:
        self.waiting += [
            TraceOrder(id=n, group="g", provider="fake", sweeps=(sweep(n),), priority=Priority.BATCH)
            for n in numbers
        ]

    def next_order(self) -> TraceOrder | None:
        return self.waiting.pop(0) if self.waiting else None

    def traced(self, order: TraceOrder, report: Report) -> None:
        self.done.append(order.id)

    def lost(self, order: TraceOrder, reason: str) -> None:
        self.given_back.append((order.id, reason))
        self.waiting.append(order)

    def ready(self, ready: Ready) -> None:
        self.ups += 1


def with_helper(
    scenario: Callable[[Helper, Orders], Coroutine[Any, Any, None]], **limits: Any
) -> tuple[Helper, Orders]:
    orders = Orders()

    async def run() -> Helper:
        helper = Helper("h", lambda names: FakeHelper(names, {}), orders, Limits(**{**QUICK, **limits}))
        running = asyncio.create_task(helper.run())
        try:
            await scenario(helper, orders)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return helper

    return asyncio.run(run()), orders


def test_nothing_is_started_before_a_family_is_wanted() -> None:
    async def scenario(helper: Helper, orders: Orders) -> None:
        orders.add(1)
        helper.wake()
        await asyncio.sleep(0.01)
        assert (FakeHelper.started, helper.state) == ([], HelperState.IDLE)
        helper.want(("fake",))
        await eventually(lambda: orders.done == [1])

    helper, _ = with_helper(scenario)
    assert helper.state is HelperState.ENDED


def test_no_more_traces_at_once_than_it_may() -> None:
    async def scenario(helper: Helper, orders: Orders) -> None:
        helper.want(("fake",))
        await eventually(lambda: orders.ups)
        FakeHelper.started[0].holds = True
        orders.add(1, 2, 3)
        helper.wake()
        await eventually(lambda: len(FakeHelper.started[0].traced) == 2)
        assert len(orders.waiting) == 1

    with_helper(scenario)


def test_orders_of_a_helper_that_dies_are_given_back_with_the_reason() -> None:
    async def scenario(helper: Helper, orders: Orders) -> None:
        helper.want(("fake",))
        await eventually(lambda: orders.ups)
        FakeHelper.started[0].holds = True
        orders.add(1, 2)
        helper.wake()
        await eventually(lambda: len(FakeHelper.started[0].traced) == 2)
        FakeHelper.started[0].die()
        await eventually(lambda: sorted(orders.done) == [1, 2])
        assert sorted(orders.given_back) == [(1, "it was killed"), (2, "it was killed")]
        assert (helper.restarts, orders.ups) == (1, 2)

    with_helper(scenario)


def test_helper_that_does_not_answer_is_replaced_and_its_orders_given_back() -> None:
    async def scenario(helper: Helper, orders: Orders) -> None:
        helper.want(("fake",))
        await eventually(lambda: orders.ups)
        first = FakeHelper.started[0]
        first.holds = True
        orders.add(1)
        helper.wake()
        await eventually(lambda: first.traced)
        first.deaf = True
        await eventually(lambda: orders.done == [1])
        assert orders.given_back[0][1].startswith("it did not answer")
        assert first._end.is_set()

    with_helper(scenario, ping_every_s=0.005, ping_limit_s=0.005)


def test_helper_that_refuses_is_tried_again_after_ever_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    real = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds >= 1.0 and len(pauses) < 9:
            pauses.append(seconds)
            await real(0)
        else:
            await real(seconds if seconds < 1.0 else 3600)

    FakeHelper.refuse = "no nvcc"

    async def scenario(helper: Helper, orders: Orders) -> None:
        monkeypatch.setattr("prefetchd.node.helpers.asyncio.sleep", noted)
        helper.want(("fake",))
        await eventually(lambda: len(pauses) == 9)
        assert helper.problem == "no nvcc"

    with_helper(scenario, first_pause_s=1.0)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_helper_is_replaced_after_so_many_traces_and_loses_none() -> None:
    async def scenario(helper: Helper, orders: Orders) -> None:
        orders.add(*range(7))
        helper.want(("fake",))
        await eventually(lambda: sorted(orders.done) == list(range(7)))
        assert orders.given_back == []
        assert [len(each.traced) for each in FakeHelper.started] == [3, 3, 1]
        assert (helper.recycled, helper.restarts) == (2, 0)

    with_helper(scenario, max_traces=3, at_once=1)


def test_helper_that_grew_too_large_is_replaced_once_it_has_traced_something() -> None:
    async def scenario(helper: Helper, orders: Orders) -> None:
        orders.add(1, 2, 3)
        helper.want(("fake",))
        await eventually(lambda: sorted(orders.done) == [1, 2, 3])
        assert [len(each.traced) for each in FakeHelper.started[:3]] == [1, 1, 1]
        assert helper.restarts == 0

    with_helper(scenario, max_rss_bytes=1, at_once=1)


def test_another_family_gets_a_helper_that_has_both() -> None:
    async def scenario(helper: Helper, orders: Orders) -> None:
        helper.want(("fake",))
        await eventually(lambda: orders.ups)
        helper.want(("other",))
        await eventually(lambda: orders.ups == 2)
        assert FakeHelper.started[1].providers == ("fake", "other")
        helper.want(("fake", "other"))
        orders.add(1)
        helper.wake()
        await eventually(lambda: orders.done == [1])
        assert len(FakeHelper.started) == 2

    with_helper(scenario)


def test_cancelling_gives_orders_back() -> None:
    async def scenario(helper: Helper, orders: Orders) -> None:
        helper.want(("fake",))
        await eventually(lambda: orders.ups)
        FakeHelper.started[0].holds = True
        orders.add(1)
        helper.wake()
        await eventually(lambda: FakeHelper.started[0].traced)

    _, orders = with_helper(scenario)
    assert [number for number, _ in orders.given_back] == [1]
