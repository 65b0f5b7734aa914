"""CURVE keys: where a node's pair lies, how it is made, and what a client of another node's daemon needs.

A daemon and its clients use the same files; a public key is what each tells the other. The subtle rule: a
secret that others may read is no secret, so it is refused rather than used.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import zmq
import zmq.utils.z85

from prefetchd.client.link import CurveKeys
from prefetchd.config import Settings

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
        found.append(checked_key(text, str(path)))
    return found[0], found[1]


def client_keys(settings: Settings, environment: Mapping[str, str]) -> CurveKeys:
    """What a client of another node's daemon needs: its public key, and our pair. Raises `KeysError`."""
    if not settings.server_key:
        raise KeysError(
            "a tcp:// endpoint needs the daemon's public key: `prefetchd keygen` prints it there; name it in "
            "PREFETCHD_SERVER_KEY, and the directory of this node's own pair in PREFETCHD_KEYS"
        )
    server = checked_key(settings.server_key.encode(), "server_key")
    public, secret = read_keys(keys_directory(settings, environment))
    return CurveKeys(server, public, secret)


def checked_key(text: bytes, where: str) -> bytes:
    """The key, if it is one. Raises `KeysError`."""
    try:
        zmq.utils.z85.decode(text)
        if len(text) == KEY_CHARACTERS:
            return text
    except (ValueError, KeyError, TypeError):
        pass
    raise KeysError(f"{where}: {text[:60]!r} is no CURVE key of {KEY_CHARACTERS} characters in Z85")
