"""An observer with a daemon: what it hears of a compile, and what it has said decides the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_daemon import NAME, FakeDaemon, until

from prefetchd.client import Client
from prefetchd.config import Settings
from prefetchd.observing.client_knowledge import ClientKnowledge
from prefetchd.observing.watch import Watch
from prefetchd.protocol import Event, Mismatch, Published, Request, decode_request, op_of

REQUEST = {"op": "fp8_gemm_nt", "m": 7, "n": 512, "k": 1024}
NAME_PARTS = (NAME.compiler, NAME.key)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    made = Watch(Settings(log_dir=str(tmp_path / "log")), {})
    yield made
    made.close()


def compile_(watch: Watch, **end: Any) -> None:
    token = watch.observer.started(NAME.compiler, key=NAME.key, site="engine.step (e.py:1)")
    watch.observer.ended(token, seconds=2.0, **end)


def reasons(watch: Watch) -> set[str]:
    names = {name.partition(".")[2] for name in watch.observer.figures()}
    return names & {"late", "unplanned", "mismatch", "daemon_down", "planned"}


def planner(*asked: str) -> Callable[[], Any]:
    def known(request: Request) -> bool:
        return op_of(request) in asked

    return lambda: SimpleNamespace(asked=known)


def test_begin_and_end_reach_the_daemon_with_request_and_place(
    watch: Watch, client: Client, daemon: FakeDaemon
) -> None:
    watch.use(client)

    compile_(watch, request=REQUEST)

    began, ended = daemon.next(Event), daemon.next(Event)
    assert [(one.what, one.compiler, one.key, one.site) for one in (began, ended)] == [
        (what, *NAME_PARTS, "engine.step (e.py:1)") for what in ("started", "ended")
    ]
    assert (ended.seconds, ended.ok) == (2.0, True)
    assert op_of(decode_request(ended.request)) == "fp8_gemm_nt"


def test_compiles_before_there_is_a_client_are_logged_and_told_to_nobody(
    watch: Watch, client: Client, daemon: FakeDaemon, tmp_path: Path
) -> None:
    compile_(watch)
    watch.use(client, rank=3)
    watch.observer.hit("triton", "another")

    assert daemon.next(Event).key == "another"
    assert reasons(watch) == {"unplanned"}
    watch.recorder.close(20)
    assert len(list((tmp_path / "log").iterdir())) >= 1


def test_what_the_daemon_has_published_and_the_engine_compiles_is_a_mismatch(
    watch: Watch, client: Client, daemon: FakeDaemon
) -> None:
    watch.use(client)
    daemon.send(Published(compiler=NAME.compiler, key=NAME.key, root="/cache"))
    until(lambda: client.is_published(*NAME_PARTS))

    compile_(watch)

    assert reasons(watch) == {"mismatch"}


def test_what_the_planner_has_asked_for_is_late_until_the_daemon_says_that_keys_differ(
    watch: Watch, client: Client, daemon: FakeDaemon
) -> None:
    watch.use(client, planner("fp8_gemm_nt"))

    compile_(watch, request=REQUEST)
    assert reasons(watch) == {"late"}

    daemon.send(Mismatch(compiler=NAME.compiler, field="nvcc", engine="a", helper="b", fix="c"))
    until(lambda: client.stats().get("mismatches"))
    compile_(watch, request=REQUEST)
    assert reasons(watch) == {"late", "mismatch"}


def test_a_request_that_nobody_knows_was_not_asked_for(client: Client) -> None:
    known = ClientKnowledge(client, planner("fp8_gemm_nt"))

    assert known.asked(REQUEST)
    assert not known.asked({"op": "fp8_gemm_nt", "m": "many"})
    assert not known.asked({})
    assert not ClientKnowledge(client, lambda: None).asked(REQUEST)


def test_a_daemon_that_was_expected_and_does_not_answer_is_the_reason(
    watch: Watch, clients: Callable[..., Client]
) -> None:
    watch.use(clients())

    compile_(watch)

    assert reasons(watch) == {"daemon_down"}
