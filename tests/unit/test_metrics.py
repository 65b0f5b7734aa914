"""The figures as Prometheus, probes, people and tools see them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from http import HTTPStatus
from pathlib import Path

import pytest
from click.testing import CliRunner
from daemon_bench import Engine, FakeHelper, Place, eventually, fakes, hello, plan, run
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from prefetchd import serve_commands
from prefetchd.endpoint import find_endpoint
from prefetchd.protocol import Event, Heartbeat, HeartbeatAnswer, Mismatch, Settled
from prefetchd.protocol import Priority as Urgency
from prefetchd.top import ask_stats, show_stats

__all__ = ["fakes"]

PREFETCHD = Path(sys.executable).with_name("prefetchd")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@pytest.mark.usefixtures("fakes")
def test_page_tells_what_became_of_each_ranks_variants(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root(), cpus=())
            await engine.send(plan(1, 1, 2))
            await engine.next(Settled)
            await engine.send(Event(what="hit", compiler="shell", key="key1"))
            await engine.send(Event(what="ended", compiler="shell", key="other", seconds=2.0))
            await engine.send(Heartbeat(sequence=1, figures={"dropped": 4, 'odd"name': 1}))
            await engine.next(HeartbeatAnswer)
            found = samples(daemon._figures.metrics_page().text)
            rank = (("compiler", "shell"), ("rank", "test/0"))
            reason = (("compiler", "shell"), ("rank", "test/0"), ("reason", "unplanned"))
            assert found["prefetchd_planned_total", rank] == 2
            assert found["prefetchd_wasted", rank] == 1
            assert found["prefetchd_engine_compiles_total", reason] == 1
            assert found["prefetchd_engine_compile_seconds_total", reason] == 2.0
            assert found["prefetchd_compiles_total", (("result", "compiled"),)] == 2
            assert found["prefetchd_clients", (("figure", "dropped"),)] == 4
            assert ("prefetchd_clients", (("figure", 'odd"name'),)) not in found
            engine.close()

    run(scenario())


@pytest.mark.usefixtures("fakes")
def test_not_ready_until_replay_is_done_and_says_what_is_left(place: Place) -> None:
    async def scenario() -> None:
        gate = place.directory / "gate"
        os.mkfifo(gate)
        FakeHelper.hook = f"read opened <{gate}"
        async with place.serving() as daemon:
            page = daemon._figures.ready_page
            assert page().status is HTTPStatus.OK
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1, priority=Urgency.REPLAY))
            await eventually(lambda: daemon._works.busy)
            assert page().status is HTTPStatus.SERVICE_UNAVAILABLE
            assert "to compile: 0 (and 1 under way)" in page().text
            await asyncio.to_thread(gate.write_text, "open\n")
            await engine.next(Settled)
            assert page().status is HTTPStatus.OK
            engine.close()

    run(scenario())


@pytest.mark.usefixtures("fakes")
def test_people_see_alarms_helpers_and_ranks(place: Place) -> None:
    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.send(hello(place.root(), interpreter="/other/python"))
            await engine.next(Mismatch)
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            stats = await asyncio.to_thread(ask_stats, find_endpoint({}, place.address))
            console = Console(width=200, record=True, file=io.StringIO())
            show_stats(stats, console)
            text = console.export_text()
            assert all(part in text for part in ("mismatch: interpreter (1 ranks)", "test/0", "sm90-", "up"))
            engine.close()

    run(scenario())


def test_commands_end_with_status_2_and_a_line_where_no_daemon_runs(place: Place) -> None:
    environment = {**place.environment, "PREFETCHD_ENDPOINT": place.address}
    for command in ("stats", "top"):
        done = subprocess.run(
            [PREFETCHD, command], env=environment, capture_output=True, text=True, check=False
        )

        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"no daemon runs at {place.address}; start one with `prefetchd serve`" in done.stderr


def test_top_that_is_interrupted_has_done_what_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_commands, "watch", watched)

    done = CliRunner().invoke(serve_commands.top_command)

    assert (done.exit_code, done.stderr) == (0, "")


def test_keygen_writes_a_pair_and_shows_the_line_for_others(place: Place) -> None:
    command = [PREFETCHD, "keygen"]
    first = subprocess.run(command, env=place.environment, capture_output=True, text=True, check=True)
    second = subprocess.run(command, env=place.environment, capture_output=True, text=True, check=False)

    public = (place.directory / ".config/prefetchd/keys/daemon.key").read_text().strip()
    assert f'allow_peers = ["{public}"]' in first.stdout
    assert (second.returncode, "is there already" in second.stderr) == (2, True)


def test_keygen_tells_programs_the_key_and_its_place(place: Place) -> None:
    done = subprocess.run(
        [PREFETCHD, "keygen", "--json"], env=place.environment, capture_output=True, text=True, check=True
    )

    keys = place.directory / ".config/prefetchd/keys"
    assert json.loads(done.stdout) == {
        "directory": str(keys),
        "public_key": (keys / "daemon.key").read_text().strip(),
    }
