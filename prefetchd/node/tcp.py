"""The door for other nodes: TCP with CURVE keys, for public keys on the allow-list and nobody else.

ZeroMQ asks an authenticator in this process about each connection before a single message passes. The subtle
rule: without any allowed key nobody may come in; libzmq's own default would be everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
import zmq.utils.z85

from prefetchd.config import Settings
from prefetchd.curve import checked_key

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"


def allowed_peers(settings: Settings) -> frozenset[bytes]:
    """The public keys of the setting, as bytes of the wire. Raises `KeysError`."""
    checked = [checked_key(text.encode(), "allow_peers") for text in settings.allow_peers]
    return frozenset(bytes(zmq.utils.z85.decode(text)) for text in checked)


def server_options(keys: tuple[bytes, bytes]) -> Callable[[zmq.Socket[bytes]], None]:
    """Makes a socket a CURVE server."""

    def prepare(socket: zmq.Socket[bytes]) -> None:
        socket.curve_server = 1
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.setsockopt(zmq.ZAP_DOMAIN, b"prefetchd")

    return prepare


class Gatekeeper:
    """Answers ZeroMQ's question about each connection. Must exist before the door is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: frozenset[bytes]) -> None:
        self._allowed = allowed
        self.refused = 0
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._answer_all)

    def close(self) -> None:
        """Answers no more: nobody new comes in."""
        self._loop.remove_reader(self._fd)
        self._socket.close()

    def _answer_all(self) -> None:
        # The descriptor tells of a change once, so everything is taken each time.
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._socket.send_multipart(self._answer(self._socket.recv_multipart()))

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """ZAP (rfc.zeromq.org/spec/27): version, id, domain, address, identity, mechanism, credentials."""
        version, number, *_ = question
        known = (
            version == ZAP_VERSION
            and len(question) == 7
            and question[5] == b"CURVE"
            and question[6] in self._allowed
        )
        if known:
            return [ZAP_VERSION, number, b"200", b"OK", b"", b""]
        self.refused += 1
        return [ZAP_VERSION, number, b"400", b"this key is not in allow_peers", b"", b""]
