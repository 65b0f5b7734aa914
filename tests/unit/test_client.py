from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fake_daemon import BEAT_S, LIMIT_S, NAME, FakeDaemon, until

from prefetchd.client import Client
from prefetchd.protocol import (
    Event,
    Goodbye,
    Heartbeat,
    Hello,
    HelloWanted,
    Mismatch,
    Plan,
    Published,
    Refused,
    Request,
    Settled,
    Universe,
    Welcome,
    decode_sweeps,
    expand,
    request_from_fields,
)

NAME_PARTS = (NAME.compiler, NAME.key)
LONG_MS = int(LIMIT_S * 1000)
UNIVERSE = Universe(profile=b"", providers=("deep_gemm",), max_tokens=8)


def request(m: int) -> Request:
    return request_from_fields({"op": "fp8_gemm_nt", "m": m, "n": 512, "k": 512})


def event(key: str = "k") -> Event:
    return Event(what="hit", compiler="triton", key=key)


def planned(plan: Plan) -> set[Request]:
    return {one for data in plan.requests.values() for one in expand(decode_sweeps(data))}


def test_nothing_is_sent_before_the_welcome(clients: Callable[..., Client], daemon: FakeDaemon) -> None:
    client = clients()
    client.plan({"deep_gemm": [request(1)]})
    client.event(event())

    daemon.next(Hello, answering=False)

    until(lambda: client.stats()["connects"])
    assert daemon.is_quiet()


def test_hello_says_the_process_and_is_another_in_each_client(
    clients: Callable[..., Client], daemon: FakeDaemon
) -> None:
    for client in (clients(), clients()):
        client.start()
    first, second = daemon.next(Hello), daemon.next(Hello)

    assert first.pid == second.pid == os.getpid()
    assert first.generation != second.generation


def test_plan_arrives_and_is_wanted_until_it_is_settled(client: Client, daemon: FakeDaemon) -> None:
    client.plan({"deep_gemm": [request(1), request(2)]})

    plan = daemon.next(Plan)
    assert planned(plan) == {request(1), request(2)}
    assert client.wanted == 1
    daemon.send(Settled(plans=(plan.id,)))
    until(lambda: client.wanted == 0)


def test_another_daemon_hears_hello_wanted_plans_and_the_universe_again(
    client: Client, daemon: FakeDaemon, daemons: Callable[..., FakeDaemon]
) -> None:
    client.universe(UNIVERSE)
    for m in (1, 2, 3):
        client.plan({"deep_gemm": [request(m)]})
    plans = [daemon.next(Plan) for _ in range(3)]
    daemon.send(Settled(plans=(plans[1].id,)))
    until(lambda: client.wanted == 2)
    daemon.close()

    second = daemons("second")

    second.next(Hello)
    assert [second.next(Plan).id for _ in range(2)] == [plans[0].id, plans[2].id]
    assert second.next(Universe) == UNIVERSE
    assert client.stats()["restarts"] == 1


def test_daemon_that_does_not_know_us_gets_another_hello_and_the_plans(
    client: Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefetchd.client.session.GREET_PAUSE_S", 0.0)
    client.plan({"deep_gemm": [request(1)]})
    plan = daemon.next(Plan)

    daemon.send(HelloWanted(instance="first"))

    daemon.next(Hello)
    assert daemon.next(Plan) == plan


def test_heartbeat_answered_by_another_instance_makes_the_client_greet(
    client: Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefetchd.client.session.GREET_PAUSE_S", 0.0)
    daemon.instance = "second"

    daemon.next(Hello)
    daemon.next(Heartbeat)

    assert client.stats()["restarts"] == 1


def test_reports_made_while_the_daemon_is_away_arrive_later_but_no_more_than_the_queue_holds(
    clients: Callable[..., Client], daemons: Callable[..., FakeDaemon]
) -> None:
    client = clients(max_queue=3)

    taken = [client.event(event(str(number))) for number in range(5)]

    assert taken == [True, True, True, False, False]
    assert client.stats()["dropped"] == 2
    daemon = daemons()
    assert [daemon.next(Event).key for _ in range(3)] == ["0", "1", "2"]


def test_daemon_that_does_not_read_costs_dropped_reports_and_no_time(
    clients: Callable[..., Client], daemons: Callable[..., FakeDaemon]
) -> None:
    daemon = daemons(rcvhwm=1, rcvbuf=4096)
    client = clients(max_queue=64)
    client.start()
    daemon.next(Heartbeat)
    big = msgspec.structs.replace(event(), request=bytes(60000))

    def is_full() -> bool:
        return bool(client.stats().get("stuck") and client.stats()["dropped"])

    slowest = 0.0
    deadline = time.monotonic() + LIMIT_S
    while not is_full():
        begun = time.perf_counter()
        client.event(big)
        slowest = max(slowest, time.perf_counter() - begun)
        assert time.monotonic() < deadline

    # What a blocking send would cost is the linger or the heartbeat at least.
    assert slowest < LIMIT_S / 10


def test_published_is_remembered(client: Client, daemon: FakeDaemon) -> None:
    assert not client.is_published(*NAME_PARTS)

    daemon.send(Published(compiler=NAME.compiler, key=NAME.key, root="/cache"))

    until(lambda: client.is_published(*NAME_PARTS))


def test_noise_is_counted_and_the_connection_goes_on(client: Client, daemon: FakeDaemon) -> None:
    daemon.send_frame(b"\xc1 noise")
    daemon.send_frame(msgspec.msgpack.encode({"type": "of another version"}))
    daemon.send(Plan(id=1, requests={}))

    until(lambda: client.stats().get("unexpected"))
    assert (client.stats()["malformed"], client.stats()["unknown"]) == (1, 1)
    client.plan({"deep_gemm": [request(1)]})
    daemon.next(Plan)


def test_refused_client_says_so_once_and_goes_quiet(
    clients: Callable[..., Client], daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    client = clients()
    client.plan({"deep_gemm": [request(1)]})
    daemon.next(Hello, answering=False)

    daemon.send(Refused(text="protocol 2 wanted"))
    daemon.send(Refused(text="protocol 2 wanted"))

    until(lambda: client.stats().get("refused") == 2)
    assert daemon.is_quiet()
    assert [record.getMessage() for record in caplog.records] == [
        "prefetchd: the daemon refuses this engine: protocol 2 wanted"
    ]


def test_mismatch_is_logged_once_a_field_with_its_fix(
    client: Client, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    mismatch = Mismatch(
        compiler="triton", field="triton.version", engine="3.8", helper="3.6", fix="same wheels"
    )

    daemon.send(mismatch)
    daemon.send(mismatch)

    until(lambda: client.stats().get("mismatches") == 2)
    (record,) = caplog.records
    for part in ("triton.version", "'3.8'", "'3.6'", "same wheels"):
        assert part in record.getMessage()


def test_changed_hello_is_said_again(
    address: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefetchd.client.session.REFRESH_S", 0.0)
    roots = {"triton": ("/a",)}
    client = Client(
        address,
        lambda: Hello(engine="test", pid=0, generation="", cache_roots=dict(roots)),
        heartbeat_s=BEAT_S,
    )
    client.start()
    daemon.next(Hello)
    daemon.next(Heartbeat)

    roots["triton"] = ("/b",)

    assert daemon.next(Hello).cache_roots == {"triton": ("/b",)}
    client.close()


def test_every_plan_of_many_threads_arrives(client: Client, daemon: FakeDaemon) -> None:
    def work(first: int) -> None:
        for m in range(first, first + 50):
            client.plan({"deep_gemm": [request(m)]})

    threads = [threading.Thread(target=work, args=(first,)) for first in range(1, 401, 50)]
    for thread in threads:
        thread.start()
    found = [daemon.next(Plan) for _ in range(400)]
    for thread in threads:
        thread.join()

    assert len({plan.id for plan in found}) == 400
    assert set().union(*map(planned, found)) == {request(m) for m in range(1, 401)}


def test_heartbeats_go_on_while_the_main_thread_is_blocked(client: Client, daemon: FakeDaemon) -> None:
    # This thread is blocked in the fake daemon's socket all the while.
    sequences = [daemon.next(Heartbeat).sequence for _ in range(3)]

    assert sequences == sorted(set(sequences))


def test_close_says_goodbye_and_silences_every_call(client: Client, daemon: FakeDaemon) -> None:
    client.close()

    daemon.next(Goodbye)
    assert not client.event(event())
    client.plan({"deep_gemm": [request(1)]})
    assert not client.wait(*NAME_PARTS, ms=LONG_MS)
    client.start()
    client.close()


def test_loop_that_fails_makes_a_new_socket_and_loses_no_plan(
    clients: Callable[..., Client], daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefetchd.client.link import Link

    monkeypatch.setattr("prefetchd.client.session.PAUSE_S", 0.0)
    failures = iter([OSError("broken")])
    real = Link.changes

    def changes(link: Link) -> list[bool]:
        for failure in failures:
            raise failure
        return real(link)

    monkeypatch.setattr(Link, "changes", changes)
    client = clients()

    client.plan({"deep_gemm": [request(1)]})

    assert planned(daemon.next(Plan)) == {request(1)}
    assert client.stats()["errors"] == 1


def test_events_that_cannot_be_encoded_are_counted_and_the_next_ones_go(
    client: Client, daemon: FakeDaemon
) -> None:
    client.event(msgspec.structs.replace(event(), request=bytes(5 << 20)))
    client.event(event("fine"))

    assert daemon.next(Event).key == "fine"
    assert client.stats()["errors"] == 1


def test_welcome_of_a_daemon_nobody_greeted_changes_nothing(client: Client, daemon: FakeDaemon) -> None:
    client.plan({"deep_gemm": [request(1)]})
    plan = daemon.next(Plan)

    daemon.send(Welcome(instance="first", pid=1))

    # Taken as a new beginning: what is wanted is said again, and no more is lost than a few bytes.
    assert daemon.next(Plan) == plan


def test_directory_without_a_daemon_is_no_error(tmp_path: Path) -> None:
    client = Client(f"ipc://{tmp_path}/no/daemon", lambda: Hello(engine="", pid=0, generation=""))
    client.start()

    client.plan({"deep_gemm": [request(1)]})

    assert client.wanted == 1
    client.close()
    assert client.stats()["errors"] == 0


def test_engine_that_says_its_directories_moved_is_introduced_anew_at_once(
    client: Client, daemon: FakeDaemon
) -> None:
    client.hello = lambda: Hello(engine="test", pid=0, generation="", cache_roots={"triton": ("/moved",)})

    client.refresh()

    assert daemon.next(Hello).cache_roots == {"triton": ("/moved",)}
