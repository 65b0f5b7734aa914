"""One daemon an endpoint: a second bind of the same ipc path would take it over in silence.

The lock is the kernel's and ends with its holder. The file stays: removing it would let two daemons hold
locks on two files of the same name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from prefetchd.endpoint import Endpoint, EndpointError


class AlreadyRunning(Exception):
    """Another daemon holds the endpoint; the text names it."""


@contextlib.contextmanager
def sole_daemon(endpoint: Endpoint) -> Iterator[None]:
    """Inside it no other daemon of this node has the endpoint. Raises `AlreadyRunning`, `EndpointError`."""
    path = endpoint.lock_path
    if path is None:
        yield
        return
    endpoint.prepare()
    try:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EndpointError(
            f"endpoint {endpoint.address}: lock file {path}: {error.strerror}; "
            "set PREFETCHD_ENDPOINT to a place you can write"
        ) from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(
                f"another prefetchd daemon{_holder(file)} serves {endpoint.address}; use it, end it, or set "
                "PREFETCHD_ENDPOINT to another address"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(file)


def is_held(path: Path) -> bool:
    """Whether a daemon holds the lock now."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _holder(file: int) -> str:
    """The number that the holder wrote, for people alone."""
    text = os.pread(file, 32, 0).decode("ascii", "replace").strip()
    return f" (process {text})" if text.isdigit() else ""
