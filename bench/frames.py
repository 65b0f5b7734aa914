"""A million frames of noise at a running daemon: it must go on serving, and must not grow.

A frame is random bytes, or a valid message with bytes changed, cut, doubled, or one of its values replaced by
an odd one of another type or size. They come by many connections, some of which never read. Memory is taken
after ten thousand frames, when every table has met its kinds of junk, and after the last.

A hello may name any cache directory that the daemon's user could make, and the daemon makes it. So as root it
is run as a user who owns nothing else here, unless `--as-root` says otherwise.

    python bench/frames.py [--frames 1000000] [--seed 1] [--as-root] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from live_daemon import ANSWER_MS, Failed, LiveDaemon

from prefetchd.protocol import (
    Event,
    Goodbye,
    Heartbeat,
    Hello,
    KeyName,
    Plan,
    Priority,
    Query,
    Stats,
    StatsQuery,
    Sweep,
    Universe,
    decode,
    encode,
    encode_sweeps,
)
from prefetchd.requests.deep_gemm import Fp8GemmNt
from prefetchd.targets import load_target

SETTLED_FRAMES = 10_000
# The bar: growth between the two looks at the daemon's memory.
BAR_BYTES = 16 << 20
CONNECTIONS = 50
# A connection is given up and made again after so many frames, as peers come and go. Few enough that each has
# come and gone at the first look: answers that half of them never read are memory too, while they are there.
FRAMES_A_CONNECTION = 150
# After so many frames every connection that reads asks something and waits for the answer: a daemon takes the
# frames of a connection in order, and all connections in turn, so it is never far behind.
FRAMES_A_QUESTION = 5_000
# A user without a name, who may read what root may, for the interpreter may lie anywhere.
USER = 12345
CAPABILITY = "-all,+dac_read_search"
AS_USER = (
    "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", f"--inh-caps={CAPABILITY}",
    f"--ambient-caps={CAPABILITY}",
)  # fmt: skip
# No noise asks by this number.
QUESTION = 987_654_321
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, -(2**63), 1e308, float("nan"), "", "x" * 5000, "\x00", "../../etc", b"",
    b"\xff", [], [[]] * 100, {}, {"": None}, {"a": {"a": {"a": {}}}},
)  # fmt: skip


def valid_frames(root: Path) -> list[bytes]:
    """One of each kind that an engine sends, with every field filled."""
    requests = {"deep_gemm": encode_sweeps([Sweep(Fp8GemmNt(m=1, n=512, k=512))])}
    hello = Hello(
        engine="noise",
        pid=1,
        generation="first",
        target=load_target("h200"),
        fingerprints={"deep_jit": {"deep_jit.version": "1"}},
        cache_roots={"deep_jit": (str(root),)},
        interpreter="/usr/bin/python3",
        library_directories=("/usr/lib/python3/dist-packages",),
        cpus=(0, 1),
    )
    key = KeyName("deep_jit", "kernel.x")
    return [
        encode(message)
        for message in (
            hello,
            Hello(engine="tool", pid=1, generation="first"),
            Plan(id=1, requests=requests, priority=Priority.URGENT, deadline_s=1.0),
            Universe(profile=b"\x80", providers=("deep_gemm",), max_tokens=8),
            Event(what="started", compiler="deep_jit", key="kernel.x", digest="d", request=b"x", site="a:1"),
            Event(what="ended", compiler="deep_jit", digest="d", seconds=1.0),
            Query(id=1, keys=(key,), requests=requests, priority=Priority.URGENT, deadline_s=0.5),
            StatsQuery(id=1),
            Heartbeat(sequence=1, figures={"queued": 1}),
            Goodbye(text="bye"),
        )
    ]


def noise(chance: random.Random, valid: list[bytes]) -> Iterator[bytes]:
    """Frames without end."""
    bodies = [msgspec.msgpack.decode(frame) for frame in valid]
    while True:
        kind = chance.random()
        if kind < 0.2:
            yield chance.randbytes(chance.choice((0, 1, 7, 60, 900)))
        elif kind < 0.6:
            yield _bytes_changed(chance, chance.choice(valid))
        elif kind < 0.9:
            yield _value_changed(chance, chance.choice(bodies))
        else:
            # Unchanged, so that the daemon gets past the door and has state to be confused in.
            yield chance.choice(valid)


def _bytes_changed(chance: random.Random, frame: bytes) -> bytes:
    made = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(made)) if made else 0
        match chance.randrange(4):
            case 0:
                made[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del made[place:]
            case 2:
                made[place:place] = made[: chance.randint(1, 64)]
            case _:
                made[place : place + 4] = chance.randbytes(4)
    return bytes(made)


def _value_changed(chance: random.Random, body: dict[str, Any]) -> bytes:
    made = dict(body)
    name = chance.choice(list(made))
    value = made[name]
    if isinstance(value, dict) and value and chance.random() < 0.5:
        made[name] = {**value, chance.choice([*value, "odd"]): chance.choice(ODD)}
    else:
        made[name] = chance.choice(ODD)
    return msgspec.msgpack.encode(made)


class Crowd:
    """Connections that send in turn; every other one reads what it is answered."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._address = address
        self._sockets = [self._new() for _ in range(CONNECTIONS)]
        self._sent = [0] * CONNECTIONS

    def send(self, number: int, frame: bytes) -> None:
        """By the next connection. Raises `Failed` where the daemon no longer takes anything."""
        place = number % CONNECTIONS
        socket = self._sockets[place]
        if not socket.poll(ANSWER_MS, zmq.POLLOUT):
            raise Failed("the daemon takes no more frames")
        socket.send(frame)
        self._sent[place] += 1
        if place % 2:
            while socket.poll(0):
                socket.recv()
        if self._sent[place] > FRAMES_A_CONNECTION:
            socket.close()
            self._sockets[place], self._sent[place] = self._new(), 0

    def catch_up(self) -> None:
        """Returns when all that was sent by the connections that read has been taken. Raises `Failed`."""
        for socket in self._sockets[1::2]:
            socket.send(encode(StatsQuery(id=QUESTION)))
        for socket in self._sockets[1::2]:
            while not _is_answer(socket):
                pass

    def close(self) -> None:
        """What was sent still arrives."""
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def _new(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, ANSWER_MS)
        socket.connect(self._address)
        return socket


def _is_answer(socket: zmq.Socket[bytes]) -> bool:
    if not socket.poll(ANSWER_MS):
        raise Failed("the daemon no longer answers")
    message = decode(socket.recv())
    return isinstance(message, Stats) and message.id == QUESTION


def run(place: Path, count: int, seed: int, *, as_root: bool) -> dict[str, Any]:
    """Sends them all. Raises `Failed` when the daemon ends or no longer answers."""
    root = place / "cache"
    root.mkdir()
    as_user = os.geteuid() == 0 and not as_root
    daemon = LiveDaemon(place, {"DG_JIT_CACHE_DIR": str(root)}, AS_USER if as_user else ())
    if as_user:
        for path in (place, root, daemon.temporary):
            os.chown(path, USER, USER)
    chance = random.Random(seed)
    frames = noise(chance, valid_frames(root))
    settled = 0
    try:
        daemon.start()
        first = daemon.rss_bytes()
        crowd = Crowd(daemon.address)
        begun = time.monotonic()
        for number in range(count):
            crowd.send(number, next(frames))
            if number % FRAMES_A_QUESTION == FRAMES_A_QUESTION - 1:
                crowd.catch_up()
            if number + 1 == SETTLED_FRAMES:
                settled = daemon.rss_bytes()
        seconds = time.monotonic() - begun
        figures = daemon.stats().figures
        last = daemon.rss_bytes()
        crowd.close()
        status = daemon.stop()
        defects = [
            line for line in daemon.log.read_text().splitlines() if "ERROR" in line or "Error:" in line
        ]
    finally:
        daemon.close()
    return {
        "frames": count,
        "uid": USER if as_user else os.geteuid(),
        "seed": seed,
        "frames_per_s": round(count / seconds),
        "rss_begin": first,
        "rss_after_10000": settled,
        "rss_end": last,
        "growth": last - settled,
        "bar_growth": BAR_BYTES,
        "exit_status": status,
        "load_average": os.getloadavg(),
        "errors_in_log": defects[:20],
        "answered": {name: value for name, value in figures.items() if "messages_" in name},
    }


def main() -> int:
    """Prints the figures as JSON; 1 if the daemon failed, grew, or counts a defect of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--as-root", action="store_true", help="keep root's own uid for the daemon")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pf") as folder:
        try:
            found = run(Path(folder), arguments.frames, arguments.seed, as_root=arguments.as_root)
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    defects = found["answered"].get("prefetchd_messages_bad_total{problem=defect}", 0)
    good = found["growth"] <= BAR_BYTES and not defects and found["exit_status"] == 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
