"""Where engines and the daemon of one user and node meet, worked out by each alone and so the same for both.

A socket's path may have 107 bytes, and scratch directories are longer than that more often than one thinks.
The subtle rule: a path of our own choosing that would not fit gives way to a short one derived from it, while
a path that a user named is never moved, because someone has shared that very directory between containers.
A directory of our choosing is private: it belongs to this user, is no link, and nobody else can enter it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

# sockaddr_un holds 108 bytes, the last of them the end of the text.
MAX_SOCKET_PATH = 107
IPC = "ipc://"
SOCKET_NAME = "daemon"
LOCK_SUFFIX = ".lock"
# Writable on every system that runs containers, and short.
SHORT_BASE = Path("/tmp")


class EndpointError(ValueError):
    """The endpoint cannot be used; the text names it, the reason and the fix."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A ZeroMQ address. `directory` is where an ipc socket lies, `private` whether we chose it."""

    address: str
    directory: Path | None = None
    private: bool = False

    @property
    def socket_path(self) -> Path | None:
        """The socket in the file system; None for TCP."""
        return Path(self.address.removeprefix(IPC)) if self.directory else None

    @property
    def lock_path(self) -> Path | None:
        """Held by the daemon that owns the socket, because a second bind would take it over in silence."""
        path = self.socket_path
        return path.with_name(path.name + LOCK_SUFFIX) if path else None

    def prepare(self) -> None:
        """For the daemon: creates the socket's directory, for this user alone. Raises `EndpointError`."""
        if self.directory is None:
            return
        try:
            self.directory.mkdir(mode=0o700, parents=not self.private, exist_ok=True)
        except OSError as error:
            raise EndpointError(
                f"endpoint {self.address}: {self.directory} cannot be created: {error.strerror}; "
                "set PREFETCHD_ENDPOINT to a place you can write"
            ) from error
        self.check()

    def check(self) -> None:
        """For engines: raises `EndpointError` if somebody else may have put the socket there.

        A directory that is not there yet is fine; so is any that a user named.
        """
        if self.directory is None or not self.private:
            return
        try:
            found = self.directory.lstat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise EndpointError(f"endpoint directory {self.directory}: {error.strerror}") from error
        if problem := _not_private(found):
            raise EndpointError(
                f"endpoint directory {self.directory} {problem}; remove it, or set PREFETCHD_ENDPOINT"
            )


def find_endpoint(environment: Mapping[str, str] | None = None, named: str | None = None) -> Endpoint:
    """The endpoint of this user: the one `named` (the setting), else the default. Raises `EndpointError`."""
    environment = os.environ if environment is None else environment
    if named:
        return _named(named)
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_absolute():
        directory = Path(runtime) / "prefetchd"
    else:
        directory = _temporary(environment) / f"prefetchd-{os.getuid()}"
    if _too_long(directory / SOCKET_NAME):
        digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
        directory = SHORT_BASE / f"prefetchd-{os.getuid()}-{digest}"
    return Endpoint(address=f"{IPC}{directory / SOCKET_NAME}", directory=directory, private=True)


def _named(text: str) -> Endpoint:
    if not text.startswith(IPC):
        if text.startswith("tcp://"):
            return Endpoint(address=text)
        raise EndpointError(
            f"endpoint {text!r}: must start with ipc:// or tcp://; correct PREFETCHD_ENDPOINT"
        )
    path = Path(text.removeprefix(IPC))
    if not path.is_absolute():
        raise EndpointError(
            f"endpoint {text!r}: the path must be absolute, as in ipc:///run/prefetchd/daemon"
        )
    if _too_long(path):
        raise EndpointError(
            f"endpoint {text!r}: the path has {len(os.fsencode(path))} bytes and a socket's may have "
            f"{MAX_SOCKET_PATH}; name a shorter one"
        )
    return Endpoint(address=text, directory=path.parent)


def _temporary(environment: Mapping[str, str]) -> Path:
    """The temporary directory of that environment, which need not be this process's own."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        if (text := environment.get(name)) and Path(text).is_dir():
            return Path(text).absolute()
    return SHORT_BASE


def _too_long(path: Path) -> bool:
    return len(os.fsencode(path)) > MAX_SOCKET_PATH


def _not_private(found: os.stat_result) -> str | None:
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.getuid():
        return f"belongs to user {found.st_uid}, not to {os.getuid()}"
    if mode := stat.S_IMODE(found.st_mode) & 0o077:
        return f"lets others in (mode has {mode:#o})"
    return None
