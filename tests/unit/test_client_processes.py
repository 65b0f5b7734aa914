"""The client in a forked child and at the interpreter's end, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_daemon import BEAT_S, LIMIT_S, FakeDaemon, until
from processes import start_child

from prefetchd.client import CLOSE_S, Client
from prefetchd.protocol import Goodbye, Heartbeat, Hello, Plan, Settled, request_from_fields

# Twenty times what the client gives itself, for a busy machine; a wait for the daemon would have no end.
QUICK_S = 20 * CLOSE_S
# Registered before the client's own, so called after it: prints what the end took us.
ENGINE = """
import atexit, sys, time
begun = []
atexit.register(lambda: print("ended", time.monotonic() - begun[0], flush=True))
from prefetchd.client import Client
from prefetchd.protocol import Event, Hello
client = Client(sys.argv[1], lambda: Hello(engine="test", pid=0, generation=""), heartbeat_s=0.02)
client.start()
client.event(Event(what="hit", compiler="triton", key="k"))
print("running", flush=True)
sys.stdin.readline()
begun.append(time.monotonic())
"""

FORKING = """
import os, sys, time
from prefetchd.client import Client
from prefetchd.protocol import Event, Hello
client = Client(sys.argv[1], lambda: Hello(engine="test", pid=0, generation=""), heartbeat_s=0.02)
client.start()
print("running", flush=True)
sys.stdin.readline()
child = os.fork()
if child:
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.stdin.readline()
else:
    client.event(Event(what="hit", compiler="triton", key="k"))
    while not client.stats().get("connected"):
        time.sleep(0.001)
"""


@pytest.fixture
def address() -> Iterator[str]:
    with TemporaryDirectory(prefix="pd") as folder:
        yield f"ipc://{folder}/daemon"


@pytest.fixture
def daemon(address: str) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(address)
    yield daemon
    daemon.close()


def start(script: str, address: str) -> subprocess.Popen[str]:
    engine = subprocess.Popen(
        [sys.executable, "-c", script, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "running\n"
    return engine


def go_on(engine: subprocess.Popen[str]) -> str:
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write("\n")
    engine.stdin.flush()
    return engine.stdout.readline()


def seconds_at_the_end(engine: subprocess.Popen[str]) -> float:
    word, seconds = go_on(engine).split()
    assert word == "ended"
    assert engine.wait(LIMIT_S) == 0
    return float(seconds)


def test_interpreter_ends_quickly_without_a_daemon(address: str) -> None:
    assert seconds_at_the_end(start(ENGINE, address)) < QUICK_S


def test_interpreter_ends_quickly_with_a_daemon_and_says_goodbye(address: str, daemon: FakeDaemon) -> None:
    engine = start(ENGINE, address)
    daemon.next(Heartbeat)

    assert seconds_at_the_end(engine) < QUICK_S
    daemon.next(Goodbye)


def test_interpreter_ends_quickly_beside_a_stopped_daemon(address: str) -> None:
    ready, written = os.pipe()

    def serve() -> None:
        daemon = FakeDaemon(address)
        daemon.next(Heartbeat)
        os.write(written, b".")
        os.kill(os.getpid(), signal.SIGSTOP)

    child = start_child(serve)
    engine = start(ENGINE, address)
    assert os.read(ready, 1) == b"."
    os.waitpid(child, os.WUNTRACED)

    assert seconds_at_the_end(engine) < QUICK_S

    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_forked_child_is_an_engine_of_its_own_and_the_parent_stays_connected(
    address: str, daemon: FakeDaemon
) -> None:
    client = Client(address, lambda: Hello(engine="test", pid=0, generation=""), heartbeat_s=BEAT_S)
    client.plan({"deep_gemm": [request_from_fields({"op": "fp8_gemm_nt", "m": 1, "n": 512, "k": 512})]})
    parent = daemon.next(Hello)
    daemon.next(Plan)

    def in_child() -> None:
        assert client.wanted == 0
        client.plan({"deep_gemm": [request_from_fields({"op": "fp8_gemm_nt", "m": 2, "n": 512, "k": 512})]})
        until(lambda: client.wanted == 0)

    child = start_child(in_child)
    hello = daemon.next(Hello)
    assert hello.pid == child
    assert hello.generation != parent.generation
    plan = daemon.next(Plan)
    # The daemon answers whoever spoke last, and the parent's heartbeats may come between.
    other = daemon.peer
    daemon.send(Settled(plans=(plan.id,)))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0

    while daemon.peer == other:
        daemon.next(Heartbeat)
    assert client.wanted == 1
    assert client.stats()["errors"] == 0
    client.close()


def test_child_that_ends_as_an_interpreter_does_leaves_the_parents_connection(
    address: str, daemon: FakeDaemon
) -> None:
    engine = start(FORKING, address)
    daemon.next(Heartbeat)
    parent = daemon.peer

    assert engine.stdin is not None
    engine.stdin.write("\n")
    engine.stdin.flush()
    child = daemon.next(Hello)
    assert child.pid != engine.pid

    assert engine.stdout is not None
    assert engine.stdout.readline() == "child 0\n"
    daemon.next(Heartbeat)
    until(lambda: daemon.next(Heartbeat) and daemon.peer == parent)
    go_on(engine)
    assert engine.wait(LIMIT_S) == 0


def test_importing_the_client_imports_nothing_heavy() -> None:
    heavy = (
        "torch",
        "triton",
        "asyncio",
        "psutil",
        "click",
        "rich",
        "prefetchd.compilers",
        "prefetchd.daemon",
    )
    script = (
        f"import prefetchd.client, prefetchd.planner, sys; print([n for n in {heavy} if n in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_woken_thread_never_takes_the_interpreter_from_the_one_that_wakes_it() -> None:
    script = Path(__file__).parent / "wake_order.py"

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)

    assert done.stdout == "0 of 300\n"
