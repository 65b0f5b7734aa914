"""Finding and starting the daemon for `prefetchd run`, with real processes, locks and sockets."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fake_daemon import FakeDaemon, until

from prefetchd import daemon_start
from prefetchd.daemon_start import NoDaemon, find_or_start
from prefetchd.endpoint import Endpoint, find_endpoint
from prefetchd.node.lock import is_held, sole_daemon
from prefetchd.protocol import Goodbye, Hello, Refused

DAEMON = str(Path(__file__).parent / "run_daemon.py")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """In a directory of its own; a daemon that was started in it is ended."""
    with TemporaryDirectory(prefix="pd") as folder:
        place = find_endpoint({}, named=f"ipc://{folder}/daemon")
        yield place
        given = Path(folder) / "given.json"
        if given.exists() and place.lock_path is not None and is_held(place.lock_path):
            os.kill(json.loads(given.read_text())["pid"], signal.SIGKILL)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Chooses what is started instead of `prefetchd serve`."""
    return lambda mode: monkeypatch.setattr(daemon_start, "SERVE", (DAEMON, mode))


def environment(endpoint: Endpoint, **more: str) -> Mapping[str, str]:
    path = os.pathsep.join((str(Path(DAEMON).parent), str(Path(__file__).parents[2])))
    return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "PREFETCHD_ENDPOINT": endpoint.address, **more}


def given(endpoint: Endpoint) -> dict[str, Any]:
    assert endpoint.directory is not None
    found: dict[str, Any] = json.loads((endpoint.directory / "given.json").read_text())
    return found


def test_a_daemon_is_started_and_answers(endpoint: Endpoint, serve: Callable[[str], None]) -> None:
    serve("answer")

    line = find_or_start(endpoint, environment(endpoint, MARK="1"))

    assert line == f"started a daemon at {endpoint.address}, its log is {endpoint.directory}/daemon.log"
    assert given(endpoint)["environment"]["MARK"] == "1"


def test_a_started_daemon_is_nobodys_child_and_has_its_own_session(
    endpoint: Endpoint, serve: Callable[[str], None]
) -> None:
    serve("answer")

    find_or_start(endpoint, environment(endpoint))

    daemon = given(endpoint)
    assert daemon["session"] == daemon["pid"]
    with pytest.raises(ChildProcessError):
        os.waitpid(daemon["pid"], os.WNOHANG)
    # Neither the test's standard streams nor the pipe that told of its life.
    streams = [str(Path(f"/proc/{daemon['pid']}/fd/{number}").readlink()) for number in range(3)]
    log = f"{endpoint.directory}/daemon.log"
    assert streams == ["/dev/null", log, log]


def test_a_daemon_that_is_there_is_found_and_no_second_one_started(
    endpoint: Endpoint, serve: Callable[[str], None]
) -> None:
    serve("answer")
    find_or_start(endpoint, environment(endpoint))
    first = given(endpoint)

    line = find_or_start(endpoint, environment(endpoint))

    assert line == f"found the daemon at {endpoint.address}"
    assert given(endpoint) == first


def test_asking_says_hello_without_a_target_and_goodbye(endpoint: Endpoint) -> None:
    heard: list[object] = []

    def answer() -> None:
        daemon = FakeDaemon(endpoint.address)
        heard.extend([daemon.next(Hello), daemon.next(Goodbye)])
        daemon.close()

    thread = threading.Thread(target=answer)
    with sole_daemon(endpoint):
        thread.start()
        find_or_start(endpoint, {})
        thread.join()

    hello, goodbye = heard
    assert isinstance(hello, Hello)
    assert (hello.target, hello.engine, hello.pid) == (None, "prefetchd run", os.getpid())
    assert isinstance(goodbye, Goodbye)


def test_a_daemon_that_ends_at_once_is_reported_with_its_last_words(
    endpoint: Endpoint, serve: Callable[[str], None]
) -> None:
    serve("die")
    assert endpoint.directory is not None
    (endpoint.directory / "daemon.log").write_text("of an earlier one\n")

    with pytest.raises(NoDaemon) as failure:
        find_or_start(endpoint, environment(endpoint))

    log = f"{endpoint.directory}/daemon.log"
    assert str(failure.value) == f"the daemon ended at once; {log}: prefetchd: a setting is wrong"


def test_losing_the_endpoint_to_another_start_is_no_failure(
    endpoint: Endpoint, serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ours ends, since the endpoint is taken by then; the one that took it answers a little later.
    serve("answer")
    ended = threading.Event()

    def answer() -> None:
        ended.wait()
        daemon = FakeDaemon(endpoint.address)
        daemon.next(Goodbye)
        daemon.close()

    thread = threading.Thread(target=answer)
    thread.start()
    held = daemon_start.is_held

    def is_held_now(path: Path) -> bool:
        ended.set()
        return held(path)

    monkeypatch.setattr(daemon_start, "is_held", is_held_now)
    with sole_daemon(endpoint):
        daemon_start.start_daemon(endpoint, environment(endpoint))
    thread.join()


def test_a_silent_daemon_is_given_up_in_time(
    endpoint: Endpoint, serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("silent")
    monkeypatch.setattr(daemon_start, "WAIT_S", 0.5)

    with pytest.raises(NoDaemon, match=r"has not answered; .* end the process that holds .*daemon\.lock"):
        find_or_start(endpoint, environment(endpoint))

    until(lambda: endpoint.lock_path is not None and is_held(endpoint.lock_path))


def test_a_refusal_is_told(endpoint: Endpoint) -> None:
    def refuse() -> None:
        daemon = FakeDaemon(endpoint.address)
        daemon.next(Hello, answering=False)
        daemon.send(Refused(text="another version"))
        stop.wait()
        daemon.close()

    stop = threading.Event()
    thread = threading.Thread(target=refuse)
    with sole_daemon(endpoint):
        thread.start()
        with pytest.raises(NoDaemon, match="refuses us: another version"):
            find_or_start(endpoint, {})
    stop.set()
    thread.join()


def test_noise_instead_of_an_answer_is_told(endpoint: Endpoint) -> None:
    def babble() -> None:
        daemon = FakeDaemon(endpoint.address)
        daemon.next(Hello, answering=False)
        daemon.send_frame(b"\xc1noise")
        stop.wait()
        daemon.close()

    stop = threading.Event()
    thread = threading.Thread(target=babble)
    with sole_daemon(endpoint):
        thread.start()
        with pytest.raises(NoDaemon, match="answer is not understood"):
            find_or_start(endpoint, {})
    stop.set()
    thread.join()


def test_none_is_started_where_none_is_wanted(endpoint: Endpoint, serve: Callable[[str], None]) -> None:
    serve("answer")

    with pytest.raises(NoDaemon, match="--no-start"):
        find_or_start(endpoint, environment(endpoint), start=False)

    assert endpoint.directory is not None
    assert not (endpoint.directory / "daemon.log").exists()


def test_an_endpoint_on_another_node_is_refused() -> None:
    with pytest.raises(NoDaemon, match="not on this node"):
        find_or_start(find_endpoint({}, named="tcp://10.0.0.1:9000"), {})


def test_a_large_log_begins_anew(
    endpoint: Endpoint, serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("answer")
    monkeypatch.setattr(daemon_start, "MAX_LOG_BYTES", 10)
    assert endpoint.directory is not None
    log = endpoint.directory / "daemon.log"
    log.write_text("more than ten bytes\n")

    find_or_start(endpoint, environment(endpoint))

    assert log.read_text() == ""


def test_a_link_in_place_of_the_log_is_not_followed(
    endpoint: Endpoint, serve: Callable[[str], None], tmp_path: Path
) -> None:
    serve("answer")
    assert endpoint.directory is not None
    (tmp_path / "precious").write_text("kept")
    (endpoint.directory / "daemon.log").symlink_to(tmp_path / "precious")

    with pytest.raises(OSError, match=r"daemon\.log"):
        find_or_start(endpoint, environment(endpoint))

    assert (tmp_path / "precious").read_text() == "kept"


def test_an_interpreter_that_cannot_be_started_is_told_with_the_reason(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    with pytest.raises(
        NoDaemon, match=r"could not be started; .*No such file or directory: '/nowhere/python'"
    ):
        find_or_start(endpoint, environment(endpoint))
