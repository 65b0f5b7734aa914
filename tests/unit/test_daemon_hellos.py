"""What a hello may bring about: what it names is compared, and never run, read from or written to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from daemon_bench import Engine, FakeHelper, Place, eventually, fakes, hello, plan, run, still_serves

from prefetchd.protocol import Mismatch, Settled

__all__ = ["fakes"]

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_other_interpreter_is_an_alarm_and_is_never_started(place: Place) -> None:
    async def scenario() -> None:
        trap = place.directory / "python3"
        trap.write_text(f"#!/bin/sh\ntouch {place.directory}/executed\n")
        trap.chmod(0o755)
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.send(hello(place.root(), interpreter=str(trap)))
            mismatch = await engine.next(Mismatch)
            assert (mismatch.field, mismatch.helper) == ("interpreter", sys.executable)
            assert f"allow_interpreters = ['{trap}']" in mismatch.fix
            (group,) = daemon._node.groups.by_name.values()
            assert group.interpreter == group.workshop.interpreter == sys.executable
            assert daemon._node.broker.stats().mismatches == {" interpreter": 1}
            engine.close()
        assert not (place.directory / "executed").exists()

    run(scenario())


def test_package_directory_of_a_message_is_not_imported_from(place: Place) -> None:
    async def scenario() -> None:
        trap = place.root("site-packages")
        async with place.serving():
            engine = Engine(place.address)
            await engine.send(hello(place.root(), library_directories=(str(trap),)))
            assert (await engine.next(Mismatch)).field == "library_directories"
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            assert str(trap) not in FakeHelper.started[0].environment.get("PYTHONPATH", "")
            engine.close()

    run(scenario())


def test_variables_of_a_message_do_not_reach_the_helper(place: Place) -> None:
    facts = {"shell": {"shell.env.TRITON_PTXAS_PATH": "/tmp/evil", "shell.env.PYTHONPATH": "/tmp/evil"}}

    async def scenario() -> None:
        FakeHelper.facts = {"shell": {"shell.version": "1"}}
        async with place.serving():
            engine = Engine(place.address)
            await engine.attach(place.root(), fingerprints=facts)
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            names = {message.field for message in engine.heard if isinstance(message, Mismatch)}
            assert names == set(facts["shell"])
            assert "/tmp/evil" not in FakeHelper.started[0].environment.values()
            engine.close()

    run(scenario())


def test_fingerprint_that_differs_is_an_alarm_with_both_values(place: Place) -> None:
    async def scenario() -> None:
        FakeHelper.facts = {"shell": {"shell.version": "2", "shell.same": "x"}}
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(
                place.root(), fingerprints={"shell": {"shell.version": "1", "shell.same": "x"}}
            )
            await engine.send(plan(1, 1))
            mismatch = await engine.next(Mismatch)
            assert (mismatch.field, mismatch.engine, mismatch.helper) == ("shell.version", "1", "2")
            figures = (await still_serves(place)).figures
            name = "prefetchd_fingerprint_mismatches_total{compiler=shell,field=shell.version}"
            assert figures[name] == 1
            # The same hello again is told again and counted once.
            await engine.send(hello(place.root(), fingerprints={"shell": {"shell.version": "1"}}))
            await engine.next(Mismatch)
            assert daemon._node.broker.stats().mismatches == {"shell shell.version": 1}
            engine.close()

    run(scenario())


@pytest.mark.parametrize("kind", ["link", "open to all", "another's", "not absolute", "file"])
def test_directory_that_is_not_ours_alone_is_never_written_to(place: Place, kind: str) -> None:
    root = place.root("root")
    named = str(root)
    if kind == "link":
        (place.directory / "link").symlink_to(root)
        named = str(place.directory / "link")
    elif kind == "open to all":
        root.chmod(0o777)
    elif kind == "another's":
        if os.geteuid() != 0:
            pytest.skip("gives a directory away, which only root can")
        os.chown(root, 12345, 12345)
    elif kind == "not absolute":
        named = f"{root}/../root"
    else:
        root.rmdir()
        root.write_text("")

    async def scenario() -> None:
        async with place.serving():
            engine = Engine(place.address)
            await engine.send(hello(cache_roots={"shell": (named,)}))
            mismatch = await engine.next(Mismatch)
            assert (mismatch.field, mismatch.engine) == ("cache_root", named)
            assert f"allow_cache_roots = ['{named}']" in mismatch.fix
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            assert (await still_serves(place)).figures["prefetchd_cache_dir_mismatch{compiler=shell}"] == 1
            engine.close()

    run(scenario())
    assert not root.is_dir() or not any(root.iterdir())


def test_directory_that_the_user_has_allowed_is_used(place: Place) -> None:
    link = place.directory / "link"
    link.symlink_to(place.root("root"))

    async def scenario() -> None:
        async with place.serving(allow_cache_roots=(str(link),)):
            engine = Engine(place.address)
            await engine.attach(link)
            await engine.send(plan(1, 1))
            await engine.next(Settled)
            assert (place.root("root") / "cache/key1/out").read_text() == "good"
            engine.close()

    run(scenario())


def test_helper_that_does_not_start_is_tried_again_and_says_why(place: Place) -> None:
    async def scenario() -> None:
        FakeHelper.refuse = "no null device here"
        async with place.serving() as daemon:
            engine = Engine(place.address)
            await engine.attach(place.root())
            await engine.send(plan(1, 1))
            await eventually(lambda: FakeHelper.started)
            await eventually(lambda: "no null device here" in daemon._figures.left())
            FakeHelper.refuse = ""
            await engine.next(Settled)
            engine.close()

    run(scenario())
