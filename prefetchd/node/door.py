"""A socket of the daemon: frames in, frames out, never blocked by a peer that does not read.

The subtle rule is libzmq's: its file descriptor only tells that *something* changed, and any call on the
socket may swallow that. So after every call the socket is looked at again before the loop sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

import zmq

from prefetchd.protocol import MAX_MESSAGE_BYTES

# Messages in a row before other work of the loop gets its turn.
FRAMES_AT_ONCE = 256
# For each peer. Most messages are below a kilobyte; a peer that does not read loses the rest and asks anew.
SEND_QUEUE = 4096
# A stranger may send messages of the largest size: so many of them are taken into memory for each.
RECEIVE_QUEUE = 64
# A bound on what strangers may open, and far more than engines need.
MAX_SOCKETS = 65536
# What is still to be said when the daemon ends (goodbyes) may take this long.
LINGER_MS = 200


class Sent(Enum):
    """What became of a message."""

    OK = auto()
    # The peer does not read what it was sent before.
    FULL = auto()
    # There is no such connection any more.
    GONE = auto()


class DoorError(Exception):
    """The address cannot be bound; the text names it, the reason and the fix."""


class Visitor(Protocol):
    """Who hears what comes in."""

    def frame(self, door: Door, identity: bytes, frame: bytes) -> None:
        """One message. Raises nothing."""
        ...

    def pause(self) -> None:
        """Nothing more is here now, or enough has been heard for once."""
        ...


class Door:
    """A bound ROUTER. `local`: only this user's processes of this node can come in."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        visitor: Visitor,
        *,
        local: bool,
        prepare: Callable[[zmq.Socket[bytes]], None] = lambda _: None,
    ) -> None:
        self.local = local
        self._visitor = visitor
        self._socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.RCVHWM, RECEIVE_QUEUE),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self._socket.setsockopt(option, value)
        prepare(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise DoorError(
                f"{address} cannot be bound: {error.strerror}; end what uses it, or name another address"
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.look)
        self._again = False
        self._look_again()

    def send(self, identity: bytes, frame: bytes) -> Sent:
        """Sends without waiting."""
        try:
            self._socket.send_multipart((identity, frame), zmq.DONTWAIT)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError:
            return Sent.GONE
        finally:
            self._look_again()
        return Sent.OK

    def look(self) -> None:
        """Hears what is here."""
        self._again = False
        for _ in range(FRAMES_AT_ONCE):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            except zmq.ZMQError:
                return
            # Of several parts, which no client of ours sends, the last is the message.
            self._visitor.frame(self, identity, frames[-1] if frames else b"")
        else:
            self._look_again()
        self._visitor.pause()

    def close(self) -> None:
        """Hears and says no more, apart from what is being said."""
        self._loop.remove_reader(self._fd)
        self._socket.close()

    def _look_again(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self._look_if_open)

    def _look_if_open(self) -> None:
        if not self._socket.closed:
            self.look()
