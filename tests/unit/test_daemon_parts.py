"""The daemon's small parts: lock, probes, service manager, CPUs, allow-list, names of peers, key files."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from daemon_bench import hello
from hypothesis import given
from hypothesis import strategies as st
from processes import start_child

from prefetchd.broker.types import Check
from prefetchd.compilers.base import EntryState
from prefetchd.config import ConfigError, load_settings
from prefetchd.curve import KeysError, generate_keys, read_keys
from prefetchd.endpoint import find_endpoint
from prefetchd.node.affinity import least_claimed
from prefetchd.node.allow import compare, directory_problem
from prefetchd.node.compiles import look
from prefetchd.node.http import MAX_REQUEST_BYTES, AddressError, Page, parse_address, window
from prefetchd.node.lock import AlreadyRunning, is_held, sole_daemon
from prefetchd.node.peers import MAX_OPEN_ASKS, OpenPlan, Peer, Peers
from prefetchd.node.systemd import Notifier

CPUS = st.frozensets(st.integers(0, 7), min_size=1)


def test_lock_ends_with_its_holder_however_that_ends(tmp_path: Path) -> None:
    endpoint = find_endpoint({}, f"ipc://{tmp_path}/daemon")
    assert endpoint.lock_path is not None
    reader, writer = os.pipe()

    def hold() -> None:
        with sole_daemon(endpoint):
            os.write(writer, b"x")
            signal.pause()

    child = start_child(hold)
    assert os.read(reader, 1) == b"x"
    with pytest.raises(AlreadyRunning, match="another prefetchd daemon"), sole_daemon(endpoint):
        pass
    os.kill(child, 9)
    os.waitpid(child, 0)
    with sole_daemon(endpoint):
        assert is_held(endpoint.lock_path)
    assert not is_held(endpoint.lock_path)


# Probes.

PAGES = {"/here": lambda: Page(HTTPStatus.OK, "found\n")}


async def _ask(request: bytes) -> bytes:
    async with window(("127.0.0.1", 0), PAGES) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /here HTTP/1.1", b"200"),
        (b"GET /here?x=1 HTTP/1.1", b"200"),
        (b"HEAD /here HTTP/1.1", b"200"),
        (b"GET /elsewhere HTTP/1.1", b"404"),
        (b"POST /here HTTP/1.1", b"405"),
        (b"noise", b"400"),
        (b"GET /" + b"x" * (2 * MAX_REQUEST_BYTES) + b" HTTP/1.1", b"431"),
    ],
)
def test_window_answers_with_a_status(request_line: bytes, status: bytes) -> None:
    answer = asyncio.run(_ask(request_line + b"\r\nHost: x\r\n\r\n"))

    assert answer.split()[1] == status
    assert answer.endswith(b"found\n") is request_line.startswith(b"GET /here")


def test_address_in_use_is_named(tmp_path: Path) -> None:
    async def twice() -> None:
        async with window(("127.0.0.1", 0), PAGES) as port:
            with pytest.raises(AddressError, match=f"127.0.0.1:{port}.*PREFETCHD_METRICS"):
                async with window(("127.0.0.1", port), PAGES):
                    pass

    asyncio.run(twice())


def test_address_is_host_and_port_or_off() -> None:
    assert parse_address("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("off") is None
    for text in ("9464", "host:", "host:99999", ":80"):
        with pytest.raises(AddressError, match="PREFETCHD_METRICS"):
            parse_address(text)


# The service manager.


def test_manager_hears_ready_alive_and_stopping(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"}
        notifier = Notifier(environment, pid=7)
        notifier.ready("serving")
        notifier.alive("fine")
        notifier.stopping()
        said = [manager.recv(4096) for _ in range(3)]

    assert said == [b"READY=1\nSTATUS=serving", b"WATCHDOG=1\nSTATUS=fine", b"STOPPING=1"]
    assert notifier.watchdog_s == 3.0


def test_watchdog_of_another_process_is_not_ours() -> None:
    assert Notifier({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "8"}, pid=7).watchdog_s == 0.0


def test_without_a_manager_nothing_is_said_and_nothing_fails(tmp_path: Path) -> None:
    Notifier({}).ready("serving")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready("serving")


# CPUs.


@given(own=CPUS, engines=st.lists(CPUS, max_size=4))
def test_there_is_always_a_cpu_and_never_one_that_more_engines_claim(
    own: frozenset[int], engines: list[frozenset[int]]
) -> None:
    chosen = least_claimed(own, engines)

    claims = {cpu: sum(cpu in each for each in engines) for cpu in own}
    assert chosen
    assert chosen <= own
    assert max(claims[cpu] for cpu in chosen) == min(claims.values())


def test_engine_that_is_pinned_nowhere_keeps_us_from_nothing() -> None:
    assert least_claimed({0, 1, 2, 3}, [range(4)]) == {0, 1, 2, 3}
    assert least_claimed({0, 1, 2, 3}, [range(4), [0, 1]]) == {2, 3}


# The allow-list.


def test_own_directory_is_allowed_and_one_to_be_made_in_it(tmp_path: Path) -> None:
    assert directory_problem(str(tmp_path), os.getuid()) is None
    assert directory_problem(str(tmp_path / "to/be"), os.getuid()) is None


def test_nothing_is_made_deeper_than_a_librarys_default_lies(tmp_path: Path) -> None:
    problem = directory_problem(str(tmp_path / "to/be/made"), os.getuid())

    assert problem is not None
    assert "is not there" in problem


@pytest.mark.parametrize("place", ["/absent-cache", "/tmp/absent-cache"])
def test_nothing_is_made_where_everybody_or_nobody_is_at_home(place: str) -> None:
    problem = directory_problem(place, os.getuid())

    assert problem is not None
    assert not Path(place).exists()


def test_link_anywhere_on_the_way_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    problem = directory_problem(str(tmp_path / "link/cache"), os.getuid())

    assert problem == f"{tmp_path}/link is a symbolic link"


def test_absent_directory_in_somebody_elses_place_is_a_problem(tmp_path: Path) -> None:
    problem = directory_problem(str(tmp_path / "cache"), os.getuid() + 1)

    assert problem is not None


def test_variables_are_compared_both_ways_and_other_fields_only_where_reported() -> None:
    engine = {"c.version": "1", "c.env.A": "x", "triton.root": "/theirs"}
    helper = {"c.version": "1", "c.env.B": "y", "c.more": "z", "triton.root": "/ours"}

    found = {mismatch.field: mismatch.fix for mismatch in compare("c", engine, helper)}

    assert found == {
        "c.env.A": "add to the daemon's prefetchd.toml under [helper_environment]: A = 'x'",
        "c.env.B": "unset B in the daemon's environment, or set it in the engine's",
    }


# Peers.


def _peer(identity: bytes, generation: str, now: float = 0.0) -> Peer:
    return Peer(identity, local=True, hello=hello(generation=generation), now=now)


def test_longest_silent_peer_gives_way() -> None:
    peers = Peers(2)
    first, second, third = (_peer(bytes([n]), str(n)) for n in range(3))
    peers.add(first)
    peers.add(second)
    peers.heard(first, 1.0)

    assert peers.add(third) == [second]


def test_names_of_strangers_are_not_kept_for_ever() -> None:
    peers = Peers(4)
    for number in range(100):
        peer = Peer(b"x", local=True, hello=hello(engine=f"e{number}"), now=0.0)
        peers.add(peer)
        peers.name_rank(peer)
        peers.remove(peer)

    assert len(peers._generations) <= 9


def test_new_generation_of_a_rank_is_a_later_one() -> None:
    peers = Peers(4)
    first, second = _peer(b"a", "one"), _peer(b"b", "two")
    peers.add(first)
    peers.name_rank(first)
    peers.remove(first)
    peers.add(second)
    peers.name_rank(second)

    assert (first.rank, first.generation, second.rank, second.generation) == ("test/0", 1, "test/0", 2)


def test_open_plans_are_bounded_by_what_they_hold() -> None:
    peer = _peer(b"a", "one")
    half = [("p", None)] * (MAX_OPEN_ASKS // 2)
    for number in range(3):
        peer.add_plan(OpenPlan(number, half))  # type: ignore[arg-type]

    assert ([plan.id for plan in peer.plans], peer.forgotten_plans) == ([1, 2], 1)


# Keys of the TCP door, and settings.


def test_secret_key_is_for_its_owner_alone_and_never_replaced(tmp_path: Path) -> None:
    public = generate_keys(tmp_path / "keys")

    assert read_keys(tmp_path / "keys")[0].decode() == public
    assert stat.S_IMODE((tmp_path / "keys/daemon.key_secret").stat().st_mode) == 0o600
    with pytest.raises(KeysError, match="is there already"):
        generate_keys(tmp_path / "keys")
    (tmp_path / "keys/daemon.key_secret").chmod(0o644)
    with pytest.raises(KeysError, match="others may read it"):
        read_keys(tmp_path / "keys")


def test_list_of_a_variable_is_separated_by_commas() -> None:
    settings = load_settings({"PREFETCHD_ALLOW_CACHE_ROOTS": "/a, /b"})

    assert settings.allow_cache_roots == ("/a", "/b")


def test_table_of_variables_is_only_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prefetchd.toml"
    file.write_text('[helper_environment]\nDG_JIT_DEBUG = "1"\n')

    assert load_settings({}, file).helper_environment == {"DG_JIT_DEBUG": "1"}
    with pytest.raises(ConfigError, match="PREFETCHD_HELPER_ENVIRONMENT"):
        load_settings({"PREFETCHD_HELPER_ENVIRONMENT": "A=b"})


# The disk.


class _Everywhere:
    """A compiler that finds each key in each root."""

    def state(self, key: str, root: Path) -> EntryState:
        return EntryState.PUBLISHED


@pytest.mark.parametrize(
    ("key", "found"),
    [("kernel.x.1", True), ("0.7.4/90a/cached_ops/silu@0123456789abcdef", True),
     ("..", False), ("", False), ("/etc", False), ("a/../../b", False), ("a//b", False)],
)  # fmt: skip
def test_keys_that_are_paths_are_found_unless_they_lead_out_of_the_root(key: str, found: bool) -> None:
    compiler: Any = _Everywhere()

    assert look(Check(compiler="any", key=key, root="/root"), compiler, ()) is found
