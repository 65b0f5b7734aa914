"""The door for other nodes: TCP with CURVE keys, for public keys on the allow-list and nobody else.

ZeroMQ asks an authenticator in this process about each connection before a single message passes. The subtle
rule: without any allowed key nobody may come in; libzmq's own default would be everybody.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq
import zmq.utils.z85

from prefetchd.client.link import CurveKeys
from prefetchd.config import Settings

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
# A Z85 key is 40 characters for 32 bytes.
KEY_CHARACTERS = 40
PUBLIC_NAME, SECRET_NAME = "daemon.key", "daemon.key_secret"


class KeysError(ValueError):
    """Keys that are absent, open to others or malformed; the text names the file or setting and the fix."""


def keys_directory(settings: Settings, environment: Mapping[str, str]) -> Path:
    """Where the keys lie. Raises `KeysError` where no place is known."""
    if settings.keys:
        return Path(settings.keys)
    home = environment.get("HOME")
    base = environment.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else None)
    if base is None:
        raise KeysError("HOME is unset, so there is no place for keys; name a directory in PREFETCHD_KEYS")
    return Path(base) / "prefetchd" / "keys"


def generate_keys(directory: Path) -> str:
    """Writes a new pair and gives the public key. Raises `KeysError` rather than replace an old one."""
    public, secret = zmq.curve_keypair()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, key, mode in ((SECRET_NAME, secret, 0o600), (PUBLIC_NAME, public, 0o644)):
            file = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, mode)
            with os.fdopen(file, "wb") as writer:
                writer.write(key + b"\n")
    except FileExistsError as error:
        raise KeysError(
            f"{error.filename} is there already and other nodes may know it; remove it to make a new one"
        ) from None
    except OSError as error:
        raise KeysError(f"{directory}: {error.strerror}; name another directory in PREFETCHD_KEYS") from error
    return public.decode()


def read_keys(directory: Path) -> tuple[bytes, bytes]:
    """Public and secret key. Raises `KeysError`."""
    found = []
    for name in (PUBLIC_NAME, SECRET_NAME):
        path = directory / name
        try:
            text = path.read_bytes().strip()
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError as error:
            raise KeysError(f"{path}: {error.strerror}; make a pair with `prefetchd keygen`") from error
        if name == SECRET_NAME and mode & 0o077:
            raise KeysError(f"{path}: others may read it (mode {mode:#o}); chmod 600 it, or make a new pair")
        found.append(_checked(text, str(path)))
    return found[0], found[1]


def allowed_peers(settings: Settings) -> frozenset[bytes]:
    """The public keys of the setting, as bytes of the wire. Raises `KeysError`."""
    checked = [_checked(text.encode(), "allow_peers") for text in settings.allow_peers]
    return frozenset(bytes(zmq.utils.z85.decode(text)) for text in checked)


def client_keys(settings: Settings, environment: Mapping[str, str], server: str) -> CurveKeys:
    """What a client of another node's daemon needs, with the pair of this one. Raises `KeysError`."""
    public, secret = read_keys(keys_directory(settings, environment))
    return CurveKeys(_checked(server.encode(), "the daemon's public key"), public, secret)


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


def _checked(text: bytes, where: str) -> bytes:
    try:
        zmq.utils.z85.decode(text)
        if len(text) == KEY_CHARACTERS:
            return text
    except (ValueError, KeyError, TypeError):
        pass
    raise KeysError(f"{where}: {text[:60]!r} is no CURVE key of {KEY_CHARACTERS} characters in Z85")
