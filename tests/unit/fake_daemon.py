"""A daemon of a test: a real ROUTER on a real ipc path, that the test makes answer as it likes."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import zmq

from prefetchd.protocol import (
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    KeyName,
    Message,
    Welcome,
    decode,
    encode,
)

# Only a failed test waits this long.
LIMIT_S = 20.0
# Heartbeats of a client in a test.
BEAT_S = 0.02

M = TypeVar("M", bound=Message)

NAME = KeyName("deep_jit", "kernel.gemm.0123")


class FakeDaemon:
    """Answers hellos and heartbeats while the test waits for a message of some kind."""

    def __init__(self, address: str, instance: str = "first", **options: int) -> None:
        self.instance, self.peer = instance, b""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for name, value in {"linger": 0, **options}.items():
            setattr(self._socket, name, value)
        self._socket.bind(address)

    def frame(self) -> bytes:
        """The next frame of anybody."""
        assert self._socket.poll(LIMIT_S * 1000), "no message came"
        self.peer, frame = self._socket.recv_multipart()
        return frame

    def next(self, kind: type[M], *, answering: bool = True) -> M:
        """The next message of this kind; the others are answered and left out."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < deadline, f"no {kind.__name__} came"
            message = decode(self.frame())
            if answering:
                self.answer(message)
            if isinstance(message, kind):
                return message

    def answer(self, message: Message) -> None:
        """What every daemon answers."""
        if isinstance(message, Hello):
            self.send(Welcome(instance=self.instance, pid=1))
        elif isinstance(message, Heartbeat):
            self.send(HeartbeatAnswer(sequence=message.sequence, instance=self.instance))

    def send(self, message: Message) -> None:
        """To whoever spoke last."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """The same for what is no message."""
        self._socket.send_multipart([self.peer, frame])

    def is_quiet(self) -> bool:
        """Whether nothing has arrived."""
        return not self._socket.poll(0)

    def close(self) -> None:
        """Gone, as if killed."""
        self._socket.close()
        self._context.term()


def until(condition: Any) -> None:
    """Polls until the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)
