"""What strangers, other versions and noise meet at the daemon's door."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from daemon_bench import (
    PROVIDER,
    Engine,
    FakeHelper,
    Place,
    eventually,
    fakes,
    hello,
    plan,
    run,
    still_serves,
    sweep,
)

from prefetchd.node.reception import MAX_APART, MAX_APART_IN_ALL
from prefetchd.protocol import (
    MAX_MESSAGE_BYTES,
    Answer,
    Goodbye,
    Heartbeat,
    HelloWanted,
    KeyName,
    Query,
    Refused,
    Settled,
    State,
    Stats,
    StatsQuery,
    Sweep,
    Universe,
    encode,
    encode_sweeps,
    request_from_fields,
)
from prefetchd.protocol import Plan as PlanMessage

__all__ = ["fakes"]

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode({"type": "plan", "id": "seven"}), "malformed"),
        (msgspec.msgpack.encode({"type": "hello", "protocol": 999}), "version"),
    ],
)
def test_frame_that_is_no_message_is_counted_and_refused_with_the_reason(
    place: Place, frame: bytes, problem: str
) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.socket.send(frame)
            assert (await engine.next(Refused)).text
            assert daemon._node.problems[problem] == 1
            await still_serves(place)
            engine.close()

    run(scenario())


def test_oversized_frame_ends_its_connection_and_nothing_else(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.socket.send(b"x" * (MAX_MESSAGE_BYTES + 1))
            await still_serves(place)
            engine.close()

    run(scenario())


def test_unknown_type_is_counted_and_the_connection_goes_on(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.socket.send(msgspec.msgpack.encode({"type": "from_the_future", "x": 1}))
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            assert daemon._node.problems["unknown"] == 1
            engine.close()

    run(scenario())


def test_stranger_is_asked_to_introduce_itself(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.send(plan(1, 1))
            assert (await engine.next(HelloWanted)).instance == daemon._node.instance
            assert not daemon._node.broker.stats().requests
            engine.close()

    run(scenario())


def test_message_of_several_parts_is_its_last(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.socket.send_multipart([b"", encode(StatsQuery(id=3))])
            assert (await engine.next(Stats)).id == 3
            engine.close()

    run(scenario())


@pytest.mark.parametrize(
    "requests",
    [
        {"fake": b"\xc1"},
        {"fake": encode_sweeps([Sweep(sweep(1).request, ((1, 1 << 62, 1),))])},
        {"fake": encode_sweeps([Sweep(sweep(1).request, ((1, 1 << 20, 1), (1 << 21, 1 << 22, 1)))])},
    ],
)
def test_plan_that_cannot_be_meant_is_counted_and_not_traced(
    place: Place, requests: dict[str, bytes]
) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(PlanMessage(id=1, requests=requests))
            await engine.send(plan(2, 1))
            assert (await engine.next(Settled)).plans == (2,)
            assert daemon._node.problems["malformed"] == 1
            engine.close()

    run(scenario())


def test_profile_that_cannot_be_read_is_counted(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(Universe(profile=b"\xc1", providers=("deep_gemm",), max_tokens=1))
            await eventually(lambda: daemon._node.problems["profile"])
            engine.close()

    run(scenario())


def test_key_that_is_a_path_is_not_looked_up(place: Place) -> None:
    async def scenario() -> None:
        outside = place.root("outside") / "out"
        outside.write_text("good")
        async with place.serving():
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(Query(id=1, keys=(KeyName("shell", "../../outside"),)))
            assert (await engine.next(Answer)).keys == (State.UNKNOWN,)
            engine.close()

    run(scenario())


def test_peers_are_bounded_and_whoever_gave_way_is_asked_again(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving(max_peers=3) as daemon:
            engines = [Engine(place.address) for _ in range(5)]
            for number, engine in enumerate(engines):
                await engine.attach(target=None, generation=f"g{number}")
            assert len(daemon._node.peers) == 3
            await engines[0].send(Heartbeat(sequence=1))
            await engines[0].next(HelloWanted)
            for engine in engines:
                engine.close()

    run(scenario())


def test_request_whose_home_is_no_known_package_is_not_traced_and_the_others_are(place: Place) -> None:
    fields = {
        "op": "chunk_kda",
        "tokens": 8,
        "heads": 2,
        "key_dim": 64,
        "value_dim": 64,
        "home": "antigravity",
    }
    foreign = Sweep(request_from_fields(fields))

    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(PlanMessage(id=1, requests={PROVIDER: encode_sweeps([foreign, sweep(1)])}))
            await engine.next(Settled)
            assert FakeHelper.started[0].traced == [1]
            assert daemon._node.problems["home not allowed"] == 1
            engine.close()

    run(scenario())


def test_noise_leaves_the_daemon_serving_and_small(place: Place) -> None:
    async def scenario() -> None:
        chance = random.Random(7)
        good = [
            encode(hello(place.root())),
            encode(plan(1, 1)),
            encode(Goodbye()),
            encode(Heartbeat(sequence=1)),
        ]
        async with place.serving() as daemon:
            engine = Engine(place.address)
            for _ in range(3000):
                frame = bytearray(chance.choice(good))
                for _ in range(chance.randrange(4)):
                    frame[chance.randrange(len(frame))] = chance.randrange(256)
                await engine.socket.send(bytes(frame))
            await still_serves(place)
            assert daemon._node.problems["defect"] == 0
            engine.close()

    run(scenario())


def test_peer_that_does_not_read_is_asked_for_everything_again_when_it_does(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            (peer,) = daemon._node.peers.ranks().values()
            peer.behind = True
            await engine.send(Heartbeat(sequence=1))
            await engine.next(HelloWanted)
            engine.close()

    run(scenario())


def test_a_message_of_many_small_sweeps_does_not_grow_with_what_they_hold(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            many = [Sweep(sweep(n + 1).request, ((1, MAX_APART + 1, 1),)) for n in range(300)]
            requests = {"nobody": encode_sweeps(many)}
            await engine.send(PlanMessage(id=1, requests=requests))
            await engine.send(Query(id=2, requests=requests))
            assert (await engine.next(Answer)).requests["nobody"] == (State.QUEUED,) * len(many)
            assert daemon._node.broker.stats().asked <= MAX_APART_IN_ALL + len(many)
            engine.close()

    run(scenario())
