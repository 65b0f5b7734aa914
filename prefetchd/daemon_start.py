"""For `prefetchd run`: find the daemon of this user and node, or start one, within seconds or not at all.

A daemon counts as there when it has answered a hello, not when a file or a process exists. The subtle rule: a
daemon we start is nobody's child and holds nothing of the engine's - no terminal, no pipe, no place in its
process group - or else the engine's `wait` would meet a stranger and `run ... | tee` would never end. What is
wrong becomes a text for people; the engine starts either way.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import zmq

from prefetchd.endpoint import Endpoint
from prefetchd.messages import MAX_MESSAGE_BYTES
from prefetchd.node.lock import is_held
from prefetchd.protocol import Goodbye, Hello, MalformedMessage, Refused, Welcome, decode, encode

# A daemon is up in half a second on an idle machine; an engine's start takes minutes, so this is not felt.
WAIT_S = 5.0
GOODBYE_MS = 100
LOG_NAME = "daemon.log"
# Runtime directories are memory. Beyond it the log begins anew with the next daemon.
MAX_LOG_BYTES = 8 << 20
# -P: a directory that happens to be the current one is no place to import from.
SERVE = ("-P", "-m", "prefetchd", "serve")


class NoDaemon(Exception):
    """The engine has no daemon for now; the text says why and what to do."""


def find_or_start(endpoint: Endpoint, environment: Mapping[str, str], *, start: bool = True) -> str:
    """A line that says which daemon is there. Raises `NoDaemon`, `EndpointError`, `OSError`."""
    if endpoint.directory is None or endpoint.lock_path is None:
        raise NoDaemon(f"endpoint {endpoint.address} is not on this node; name an ipc:// one")
    endpoint.check()
    if is_held(endpoint.lock_path):
        ask(endpoint, WAIT_S)
        return f"found the daemon at {endpoint.address}"
    if not start:
        raise NoDaemon(f"none serves {endpoint.address}, and --no-start says to start none")
    log = start_daemon(endpoint, environment)
    return f"started a daemon at {endpoint.address}, its log is {log}"


def start_daemon(endpoint: Endpoint, environment: Mapping[str, str]) -> Path:
    """Starts one and waits until it answers; gives its log file. Raises as `find_or_start`."""
    assert endpoint.directory is not None
    endpoint.prepare()
    path = endpoint.directory / LOG_NAME
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(log).st_size > MAX_LOG_BYTES:
            os.ftruncate(log, 0)
        begin = os.fstat(log).st_size
        try:
            life = _start_detached([sys.executable, *SERVE], environment, log)
            try:
                ask(endpoint, WAIT_S, life)
            finally:
                os.close(life)
        except NoDaemon as error:
            raise NoDaemon(f"{error}; {_last_line(path, begin)}") from None
    finally:
        os.close(log)
    return path


def ask(endpoint: Endpoint, seconds: float, life: int | None = None) -> None:
    """Returns when the daemon has answered. `life` is readable once the daemon we started has ended.

    Raises `NoDaemon` for one that refuses us, does not answer in time, or has ended.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        # Queue only for a daemon that is really there.
        peer.setsockopt(zmq.IMMEDIATE, 1)
        peer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        peer.connect(endpoint.address)
        _hear_welcome(peer, endpoint, time.monotonic() + seconds, life)
        peer.setsockopt(zmq.LINGER, GOODBYE_MS)
        with contextlib.suppress(zmq.Again):
            peer.send(encode(Goodbye()), zmq.DONTWAIT)


def _hear_welcome(peer: zmq.Socket[bytes], endpoint: Endpoint, deadline: float, life: int | None) -> None:
    poller = zmq.Poller()
    poller.register(peer, zmq.POLLIN | zmq.POLLOUT)
    if life is not None:
        poller.register(life, zmq.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        events = dict(poller.poll(int(left * 1000) + 1))
        if peer in events and events[peer] & zmq.POLLOUT:
            peer.send(encode(_hello()), zmq.DONTWAIT)
            poller.modify(peer, zmq.POLLIN)
        if peer in events and events[peer] & zmq.POLLIN and _is_welcome(peer.recv_multipart()[-1]):
            return
        if life in events:
            # One that was started at the same moment may hold the endpoint: then that one will answer.
            if endpoint.lock_path is None or not is_held(endpoint.lock_path):
                raise NoDaemon("the daemon ended at once")
            poller.unregister(life)
            life = None
    raise NoDaemon(
        f"the daemon at {endpoint.address} has not answered; if it stays silent, end the process that holds "
        f"{endpoint.lock_path}"
    )


def _is_welcome(frame: bytes) -> bool:
    try:
        message = decode(frame)
    except MalformedMessage as error:
        raise NoDaemon(f"the daemon's answer is not understood: {error}") from None
    if isinstance(message, Refused):
        raise NoDaemon(f"the daemon refuses us: {message.text}")
    return isinstance(message, Welcome)


def _hello() -> Hello:
    return Hello(engine="prefetchd run", pid=os.getpid(), generation=secrets.token_hex(8))


def _start_detached(command: list[str], environment: Mapping[str, str], log: int) -> int:
    """Starts it as nobody's child; gives a file that ends with it."""
    life, held = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(held,),
                )
                status = 0
            except OSError as error:
                os.write(log, f"{error}\n".encode())
            finally:
                os._exit(status)
    finally:
        os.close(held)
    _, status = os.waitpid(child, 0)
    if status:
        os.close(life)
        raise NoDaemon(f"{command[0]} could not be started")
    return life


def _last_line(path: Path, begin: int) -> str:
    """The end of what a daemon wrote since then, for people."""
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read(MAX_LOG_BYTES).decode("utf-8", "replace").strip().splitlines()
    return f"{path}: {lines[-1]}" if lines else f"{path} is empty"
