"""The engine's socket, owned by one thread: connect, send, receive, and know when the daemon comes and goes.

Nothing here blocks but `wait`, whose end is bounded and which `Wakeup` ends at once. The subtle rule: with
`IMMEDIATE` libzmq queues only for a daemon that has finished its handshake, so a message meant for one daemon
never waits in a queue to surprise the next one. That a connection is there is learned from the socket's
monitor, since sending tells only that a queue had room.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

import zmq

from prefetchd.client.wakeup import Wakeup
from prefetchd.messages import MAX_MESSAGE_BYTES

# Messages libzmq may hold for a daemon that does not read (stopped, swapped out); beyond it sending fails and
# is counted. With heartbeats of a second a healthy daemon is never this far behind.
SEND_QUEUE = 256
RECEIVE_QUEUE = 4096
# A daemon that starts beside the engine is found in a tenth of a second; one that never comes costs a look
# every two.
RECONNECT_MS = 100
RECONNECT_MAX_MS = 2000
# How long a goodbye may take to leave; an interpreter that exits waits no longer.
LINGER_MS = 20

# Monitor events that mean: now somebody speaks ZMTP with us, and: not any more.
_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN = zmq.EVENT_DISCONNECTED
# How a monitor's first frame begins. pyzmq's own parser would import asyncio, which engines need not pay for.
_EVENT = struct.Struct("=H")


class CurveKeys(NamedTuple):
    """What a TCP endpoint needs: the daemon's public key, and our own pair."""

    server: bytes
    public: bytes
    secret: bytes


class Link:
    """A DEALER to the endpoint. Every method must be called by the thread that made it."""

    def __init__(self, address: str, wakeup: Wakeup, curve: CurveKeys | None = None) -> None:
        # A context of our own: the engine's may be closed by the engine at any time, or inherited by a fork.
        self._context = zmq.Context(io_threads=1)
        self._wakeup = wakeup
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.RCVHWM, RECEIVE_QUEUE),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
        ):
            self._socket.setsockopt(option, value)
        if curve is not None:
            self._socket.curve_serverkey = curve.server
            self._socket.curve_publickey, self._socket.curve_secretkey = curve.public, curve.secret
        self._monitor = self._socket.get_monitor_socket(_UP | _DOWN)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        self._socket.connect(address)

    def wait(self, seconds: float, *, to_send: bool = False) -> None:
        """Until a frame arrives, the connection changes, somebody wakes us, or there is room to send."""
        self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if to_send else 0))
        self._poller.poll(max(int(seconds * 1000), 0))
        self._wakeup.clear()

    def changes(self) -> list[bool]:
        """How the connection changed since the last call, in order: True for up."""
        found = []
        with contextlib.suppress(zmq.Again):
            while True:
                (event,) = _EVENT.unpack_from(self._monitor.recv_multipart(zmq.DONTWAIT)[0])
                found.append(event == _UP)
        return found

    def send(self, frame: bytes) -> bool:
        """False when there is no daemon, or one that does not read."""
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self, limit: int) -> list[bytes]:
        """The frames that are here, at most so many; only the last part of a message is a frame of ours."""
        found: list[bytes] = []
        with contextlib.suppress(zmq.Again):
            while len(found) < limit:
                found.append(self._socket.recv_multipart(zmq.DONTWAIT)[-1])
        return found

    def close(self) -> None:
        """Within `LINGER_MS`."""
        self._socket.disable_monitor()
        # Before the context, which waits for every socket that is open.
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
