"""Single requests are traced many at a time, and not at all where a sweep answers for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from broker_world import COMPILER, PROVIDER, World, gemm, gemms, key_of

from prefetchd.broker.tasks import MAX_CRASHES, MAX_SWEEPS_OF_SITE
from prefetchd.broker.trace_queue import MAX_BATCH
from prefetchd.broker.types import Priority, TraceOrder
from prefetchd.compilers.base import Job
from prefetchd.sweeps import Sweep
from prefetchd.trace import Failure, Report


@pytest.fixture
def world() -> World:
    made = World()
    made.attach("r0")
    return made


def order(world: World) -> TraceOrder:
    found = world.broker.next_trace("group", world.now)
    assert found is not None
    return found


def singles(count: int) -> list[Sweep]:
    return [gemm(64 * number + 1) for number in range(count)]


def test_waiting_requests_are_traced_together_up_to_a_bound(world: World) -> None:
    asked = singles(2 * MAX_BATCH + 3)
    world.plan("r0", *asked)

    orders = world.trace()

    assert [len(each.sweeps) for each in orders] == [MAX_BATCH, MAX_BATCH, 3]
    assert [sweep for each in orders for sweep in each.sweeps] == asked
    world.settle()
    assert {world.state("r0", sweep) for sweep in asked} == {"published"}


def test_an_urgent_request_is_traced_alone(world: World) -> None:
    world.plan("r0", *singles(3), priority=Priority.URGENT)

    assert [len(each.sweeps) for each in world.trace()] == [1, 1, 1]


def test_a_sweep_is_traced_alone(world: World) -> None:
    world.plan("r0", gemms(1, 64), gemm(1, 256), gemm(65, 256))

    assert [len(each.sweeps) for each in world.trace()] == [1, 2]


def test_requests_of_other_priority_provider_or_ranks_are_not_mixed_in(world: World) -> None:
    world.attach("r1")
    world.plan("r0", gemm(1), priority=Priority.REPLAY)
    world.plan("r0", gemm(65))
    world.plan("r1", gemm(129))
    world.plan("r0", gemm(193))
    world.plan("r1", gemm(193))
    world.broker.plan("r0", "other", [gemm(257)], Priority.BATCH, world.now)

    orders = world.trace()

    alone = {(gemm(1),), (gemm(65),), (gemm(129),), (gemm(193),), (gemm(257),)}
    assert {each.sweeps for each in orders} == alone


def test_requests_of_other_sites_are_not_mixed_in(world: World) -> None:
    world.plan("r0", gemm(1, 256), gemm(1, 384), gemm(65, 256))

    assert [each.sweeps for each in world.trace()] == [(gemm(1, 256), gemm(65, 256)), (gemm(1, 384),)]


def test_what_does_not_fit_keeps_its_turn(world: World) -> None:
    world.plan("r0", gemm(1), gemms(1, 64, 256), gemm(65), gemm(129))

    assert [each.sweeps for each in world.trace()] == [
        (gemm(1), gemm(65), gemm(129)),
        (gemms(1, 64, 256),),
    ]


def test_failure_is_of_its_own_request_alone(world: World) -> None:
    asked = singles(3)
    world.failures[asked[1]] = (Failure(request=asked[1].label(), kind="error", text="no"),)
    world.plan("r0", *asked)
    world.settle()

    assert [world.state("r0", sweep) for sweep in asked] == ["published", "uncovered", "published"]
    assert world.broker.stats().uncovered == 1


def test_failure_that_stands_for_the_rest_is_of_every_request_behind_it(world: World) -> None:
    asked = singles(4)
    world.plan("r0", *asked)
    given_up = Failure(request=asked[1].label(), kind="crash", text="again and again", requests=3)
    taken = order(world)
    jobs = tuple(Job(compiler=key[0], key=key[1], payload=b"") for key in (key_of(1),))
    world.broker.traced(
        taken.id, Report(id=taken.id, seconds=0.0, jobs=jobs, failures=(given_up,)), world.now
    )
    world.settle()

    assert [world.state("r0", sweep) for sweep in asked] == ["published", *["uncovered"] * 3]


def test_failure_of_the_whole_order_is_of_all_its_requests(world: World) -> None:
    asked = singles(3)
    world.plan("r0", *asked)
    taken = order(world)
    whole = Failure(request="all of them", kind="unavailable", text="no library", requests=3)
    world.broker.traced(taken.id, Report(id=taken.id, seconds=0.0, failures=(whole,)), world.now)

    assert {world.state("r0", sweep) for sweep in asked} == {"uncovered"}
    assert world.broker.stats().uncovered == 3


def test_requests_of_a_helper_that_died_are_tried_one_by_one(world: World) -> None:
    asked = singles(3)
    world.plan("r0", *asked)
    world.broker.trace_lost(order(world).id, "killed", world.now)

    poison = asked[1]
    for _ in range(3 + MAX_CRASHES):
        taken = world.broker.next_trace("group", world.now)
        if taken is None:
            break
        assert len(taken.sweeps) == 1
        if taken.sweeps == (poison,):
            world.broker.trace_lost(taken.id, "killed", world.now)
        else:
            world.broker.traced(taken.id, world.report(taken), world.now)
    world.settle()

    assert [world.state("r0", sweep) for sweep in asked] == ["published", "uncovered", "published"]


def test_request_inside_a_sweep_that_ended_meanwhile_is_not_traced(world: World) -> None:
    world.plan("r0", gemms(1, 64), priority=Priority.URGENT)
    sweep = order(world)
    world.plan("r0", gemm(1))
    world.broker.traced(sweep.id, world.report(sweep), world.now)
    world.look()
    world.compile()

    assert world.trace() == []
    assert world.state("r0", gemm(1)) == "published"


def test_request_inside_a_sweep_that_is_as_urgent_waits_for_it(world: World) -> None:
    world.plan("r0", gemms(1, 64))
    world.plan("r0", gemm(1), gemm(200))

    orders = world.trace()

    assert [each.sweeps for each in orders] == [(gemms(1, 64),), (gemm(200),)]
    assert world.state("r0", gemm(1)) == "open"
    world.settle()
    assert world.state("r0", gemm(1)) == "published"
    assert world.broker.drained


def test_request_that_waits_for_a_sweep_outlasts_another_rank_that_asks_and_leaves(world: World) -> None:
    world.attach("r1")
    world.plan("r0", gemm(1), gemms(1, 64))
    sweep = order(world)
    world.plan("r1", gemm(1))
    world.broker.detach("r1", 1, world.now)

    world.broker.traced(sweep.id, world.report(sweep), world.now)
    world.settle()

    assert world.state("r0", gemm(1)) == "published"
    assert world.broker.drained


def test_request_inside_a_less_urgent_sweep_gets_its_own_trace(world: World) -> None:
    world.plan("r0", gemms(1, 64), priority=Priority.UNIVERSE)
    world.plan("r0", gemm(1))

    assert [each.sweeps for each in world.trace()] == [(gemm(1),), (gemms(1, 64),)]


def test_request_that_waits_for_a_sweep_which_cannot_be_traced_gets_its_own_trace(world: World) -> None:
    sweep = gemms(1, 64)
    world.failures[sweep] = (Failure(request=gemm(9).label(), kind="error", text="no"),)
    world.plan("r0", sweep)
    world.plan("r0", gemm(1))

    assert [each.sweeps for each in world.trace()] == [(sweep,), (gemm(1),)]


def test_request_that_becomes_more_urgent_than_its_sweep_waits_no_longer(world: World) -> None:
    world.plan("r0", gemms(1, 64, 256), gemms(1, 64))
    world.plan("r0", gemm(1))
    first, _ = order(world), world.broker.next_trace("group", world.now)
    assert world.broker.next_trace("group", world.now) is None
    world.plan("r0", gemm(1), priority=Priority.URGENT)

    assert order(world).sweeps == (gemm(1),)
    assert first.sweeps == (gemms(1, 64, 256),)


def test_rank_that_moves_to_a_root_known_to_lack_its_variants_gets_them_there(world: World) -> None:
    world.attach("r1", "/other")
    world.plan("r1", gemm(1))
    world.trace()
    world.look()
    world.broker.detach("r1", 1, world.now)
    world.plan("r0", gemm(1))
    world.settle()
    assert (key_of(1), "/other") not in world.disk

    world.attach("r0", "/other")
    world.settle()

    assert (key_of(1), "/other") in world.disk
    assert world.state("r0", gemm(1)) == "published"


def test_request_survives_the_rank_that_wanted_the_sweep(world: World) -> None:
    world.attach("r1")
    world.plan("r0", gemms(1, 64))
    world.plan("r1", gemms(1, 64))
    world.plan("r0", gemm(1))
    taken = order(world)
    assert world.broker.next_trace("group", world.now) is None
    world.broker.trace_lost(taken.id, "killed", world.now)
    world.broker.detach("r1", 1, world.now)
    world.settle()

    assert world.broker.request_state("r0", PROVIDER, gemm(1)) == "published"
    assert world.broker.drained


@pytest.fixture
def parked() -> World:
    """A request of `r0` waits for a sweep that `r0` is done with, and that `r1` alone wants traced again.

    That is what becomes of a sweep whose keys were forgotten for want of room.
    """
    world = World(max_keys=2)
    world.attach("r0")
    world.attach("r1")
    world.plan("r0", gemm(1))
    world.plan("r0", gemms(1, 8), priority=Priority.URGENT)
    sweep = order(world)
    world.broker.traced(sweep.id, world.report(sweep), world.now)
    world.look()
    world.compile()
    others = [Job(compiler=COMPILER, key=f"other-{number}", payload=b"") for number in range(5)]
    world.broker.plan_jobs("r0", others, Priority.URGENT, world.now)
    world.look()
    world.compile()
    return world


def test_request_is_traced_when_the_sweep_it_waits_for_is_lost_and_forgotten(parked: World) -> None:
    parked.plan("r1", gemms(1, 8), priority=Priority.URGENT)
    sweep = order(parked)
    assert parked.broker.next_trace("group", parked.now) is None
    assert parked.state("r0", gemm(1)) == "queued"

    parked.broker.detach("r1", 1, parked.now)
    parked.broker.trace_lost(sweep.id, "killed", parked.now)

    assert order(parked).sweeps == (gemm(1),)


def test_request_is_traced_when_nobody_wants_the_sweep_it_waits_for(parked: World) -> None:
    parked.plan("r1", gemms(1, 8), priority=Priority.REPLAY)
    parked.plan("r0", gemms(1, 64, 256))
    assert order(parked).sweeps == (gemms(1, 64, 256),)
    assert parked.state("r0", gemm(1)) == "queued"

    parked.broker.detach("r1", 1, parked.now)

    assert order(parked).sweeps == (gemm(1),)


@pytest.mark.parametrize(
    ("m", "held"), [(1, True), (2, False), (0, False), (150_000 * 3 + 1, True), (900_000, False)]
)
def test_a_sweep_of_very_many_ranges_is_not_walked_to_find_a_request(m: int, held: bool) -> None:
    looked: list[int] = []

    class Spans(tuple[tuple[int, int, int], ...]):
        def __iter__(self) -> Iterator[tuple[int, int, int]]:
            for span in super().__iter__():
                looked.append(span[0])
                yield span

    many = Spans((number * 3 + 1, number * 3 + 2, 1) for number in range(200_000))

    assert Sweep(gemm(1).request, many).holds(m) is held
    assert looked == []


def test_only_so_many_sweeps_of_a_site_are_looked_through_and_each_can_be_forgotten(world: World) -> None:
    many = [gemms(number, number + 99) for number in range(1, MAX_SWEEPS_OF_SITE + 10)]
    world.plan("r0", *many)
    table = world.broker._traces.group("group").table(PROVIDER)

    assert len(table.covering(gemm(90).request)) == MAX_SWEEPS_OF_SITE
    for sweep in many:
        found = table.find(sweep)
        assert found is not None
        table.remove(found)
    assert table.covering(gemm(90).request) == []
