"""The store: one directory of compiled kernels, each in a directory of its own that appeared by one rename.

Loading an object file executes what is in it. So the rule that matters is whose it is: a store, an entry and
every file in it must belong to this user and be writable by nobody else, or the store is not used at all. An
entry is believed only as far as its own record, which names the object's digest; a file that is cut short or
changed does not load, it is reported and its kernel is compiled as ever.

What others can observe: an entry is complete or not there; looking one up changes nothing but the time of its
last use, by which the oldest are removed when the store is larger than its bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from prefetchd.cute.signatures import Signature
from prefetchd.store import PRIVATE, private_directory

OBJECT, RECORD = "kernel.o", "kernel.json"
VERSION = 1
# A record is a few hundred bytes; the largest known kernel 1.1 MB.
MAX_RECORD_BYTES = 1 << 16
MAX_OBJECT_BYTES = 64 << 20
DEFAULT_PLACE = "prefetchd/cute"

_NAME = re.compile(r"[0-9A-Za-z_]{1,48}-[0-9a-f]{40}")

Kind = Literal["tvm_ffi", "plain"]
Text = Annotated[str, msgspec.Meta(max_length=1 << 15)]


class StoreRefused(Exception):
    """The directory cannot be trusted; the text names it, what is wrong and the fix."""


class Unloadable(Exception):
    """An entry is there and cannot be used; the text says why."""


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry says of itself, beside its object file."""

    name: Text
    namespace: Text
    key: Text
    # A function of TVM-FFI, or one of the DSL's own; they are loaded differently.
    kind: Kind
    symbol: Text
    architecture: Text
    object_sha256: Text
    object_bytes: int
    # How it may be called; None where by position.
    signature: Signature | None = None
    version: int = VERSION


class Found(msgspec.Struct, frozen=True):
    """A usable entry: what it says, and where its object lies."""

    artifact: Artifact
    path: Path


def find_root(environment: Mapping[str, str], chosen: str | None) -> Path:
    """The store of an engine with this environment; `chosen` is the setting. Raises `ValueError`."""
    if chosen:
        place = Path(chosen)
    else:
        base = environment.get("XDG_CACHE_HOME") or (
            f"{environment['HOME']}/.cache" if environment.get("HOME") else ""
        )
        if not base:
            raise ValueError("neither XDG_CACHE_HOME nor HOME is set, so set cute_store to a directory")
        place = Path(base) / DEFAULT_PLACE
    if not place.is_absolute():
        raise ValueError(f"cute_store = {str(place)!r} is not an absolute path; name an absolute directory")
    return place


def entry_name(namespace: str, key: str, environment: str, source: str) -> str:
    """The directory of a kernel: its function's name for people, and the digest of all that it depends on."""
    function = namespace.rpartition(":")[2] or "kernel"
    readable = re.sub(r"[^0-9A-Za-z_]", "_", function)[:48]
    whole = hashlib.sha256("\0".join((environment, source, namespace, key)).encode()).hexdigest()
    return f"{readable}-{whole[:40]}"


def is_name(name: str) -> bool:
    """Whether this can be an entry's name, and above all no path."""
    return _NAME.fullmatch(name) is not None


def check_root(root: Path) -> None:
    """Raises `StoreRefused` unless only this user can put anything there; an absent root is in order."""
    with contextlib.suppress(FileNotFoundError):
        _check(root, root.stat(), directory=True)


def find(root: Path, name: str) -> Found | None:
    """The entry, checked in all that can be checked without loading it; None if there is none.

    Raises `Unloadable` for one that is there and unusable, `StoreRefused` where the store is not ours alone.
    """
    entry = root / name
    try:
        check_root(root)
        _check(entry, entry.lstat(), directory=True)
        record = _read(entry / RECORD, MAX_RECORD_BYTES)
        content = _read(entry / OBJECT, MAX_OBJECT_BYTES)
    except FileNotFoundError as missing:
        if not entry.exists():
            return None
        raise Unloadable(f"{entry}: incomplete: {missing.filename} is missing") from missing
    except OSError as error:
        raise Unloadable(f"{entry}: {error.strerror}") from error
    try:
        artifact = msgspec.json.decode(record, type=Artifact)
    except msgspec.DecodeError as error:
        raise Unloadable(f"{entry / RECORD}: {error}") from error
    if artifact.version != VERSION or artifact.name != name:
        raise Unloadable(f"{entry / RECORD}: it is version {artifact.version} of {artifact.name}")
    if hashlib.sha256(content).hexdigest() != artifact.object_sha256:
        raise Unloadable(f"{entry / OBJECT}: {len(content)} bytes, not those that were published")
    return Found(artifact, entry / OBJECT)


def write(entry: Path, artifact: Artifact, content: bytes) -> None:
    """Fills the empty directory of an entry in the making; the object's figures are set here."""
    complete = msgspec.structs.replace(
        artifact, object_sha256=hashlib.sha256(content).hexdigest(), object_bytes=len(content)
    )
    (entry / OBJECT).write_bytes(content)
    (entry / RECORD).write_bytes(msgspec.json.encode(complete))
    for path, mode in ((entry / OBJECT, 0o600), (entry / RECORD, 0o600), (entry, 0o700)):
        path.chmod(mode)


def mark_used(entry: Path) -> None:
    """Says that the entry was of use now; where that cannot be written it is not."""
    with contextlib.suppress(OSError):
        os.utime(entry / RECORD)


def evict(root: Path, limit_bytes: int, *, keep: frozenset[str] = frozenset()) -> list[str]:
    """Removes the entries used longest ago until the rest fits, and says which. Raises `OSError`."""
    entries = []
    for entry in root.iterdir():
        if is_name(entry.name):
            with contextlib.suppress(FileNotFoundError):
                size = sum(file.stat().st_size for file in entry.iterdir())
                entries.append(((entry / RECORD).stat().st_mtime_ns, size, entry))
    total = sum(size for _, size, _ in entries)
    removed = []
    for _, size, entry in sorted(entries):
        if total <= limit_bytes:
            break
        if entry.name in keep:
            continue
        # By a rename first: whoever looks meanwhile finds it whole or not at all.
        aside = private_directory(root) / f"evicted-{entry.name}"
        with contextlib.suppress(FileNotFoundError):
            entry.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            removed.append(entry.name)
            total -= size
    return removed


def names(root: Path) -> list[str]:
    """What the store holds, by name; nothing where it is absent."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(entry.name for entry in root.iterdir() if entry.name != PRIVATE and is_name(entry.name))
    return []


def _read(path: Path, limit: int) -> bytes:
    """An ordinary file of ours. Raises `OSError`, `Unloadable` and `StoreRefused`."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise Unloadable(f"{path}: not an ordinary file of at most {limit} bytes")
        _check(path, status, directory=False)
        return opened.read()


def _check(path: Path, status: os.stat_result, *, directory: bool) -> None:
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StoreRefused(
            f"{path}: owned by uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}: whoever may write "
            f"there would run code in this engine; it must belong to uid {os.getuid()} with mode 700 or 755"
        )
    if directory and not stat.S_ISDIR(status.st_mode):
        raise Unloadable(f"{path}: not a directory")
