"""Triton's cache on disk: one directory a key, found by a group file that names its members absolutely.

`<root>/<key>/__grp__<kernel>.json` holds the absolute path of every file of a compiled kernel and is written
last; the library takes an entry when that file parses and every path in it exists. Two things follow. A group
made in one directory is worthless in another until its paths are rewritten. And an entry without a whole
group is no danger to an engine, which compiles again over it: so what may be an engine's compile in progress
is never touched.

The subtle rule: an engine that has looked a key up and not found it compiles, and then writes file by file
into the directory by its name, whatever lies there by then. So nothing of ours may come to lie there in the
meantime, or others would read a mixture of two groups; nor may what it has written be moved away. Its look-up
leaves an empty directory behind: a young empty one means an engine at work, and ours is dropped, as on one
with files in it. Only time tells an engine in the middle of a compile from one that was killed there.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ctypes
import errno
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.base import EntryState
from prefetchd.elf import NotACubin, cubin_architecture
from prefetchd.store import publish_directory

GROUP_PREFIX = "__grp__"
# A key is a sha256 digest.
DIGEST_BYTES = 32
# Between two files of one compile lies one stage of it; the longest known, ptxas on a large kernel, takes
# minutes on a loaded machine. A younger incomplete entry counts as missing, an older one as corrupt.
IN_PROGRESS_S = 300.0
# Between the look-up and the first file lies the making of the kernel's IR, which takes well below a second.
LOOKED_UP_S = 60.0
# Entries from the future that are remembered. Only incomplete ones are asked for their age, and an engine
# leaves one for each time that it was killed.
MOST_FROM_THE_FUTURE = 1024

_AT_FDCWD = -100  # fcntl.h
_RENAME_NOREPLACE = 1  # linux/fs.h


class _Group(msgspec.Struct):
    child_paths: dict[str, str]


class _Device(msgspec.Struct):
    arch: int | str


class _Metadata(msgspec.Struct):
    """The part of a kernel's metadata that every version writes."""

    hash: str
    target: _Device


class Incomplete(Exception):
    """The library would not take the entry; the text says why."""


class Unusable(Exception):
    """The library would take the entry and fail, or run something else; the text says why."""


def key_of(digest: str) -> str:
    """The directory name of a key from its hexadecimal digest."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def digest_of(key: str) -> str:
    """The hexadecimal digest behind a directory name. Raises `ValueError` for what is no such name."""
    try:
        digest = base64.b32decode(key + "=" * (-len(key) % 8))
    except binascii.Error as error:
        raise ValueError(f"{key!r} is no key of Triton's: {error}") from error
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"{key!r} is no key of Triton's: it holds {len(digest)} bytes, not {DIGEST_BYTES}")
    return digest.hex()


def entry_state(entry: Path, capability: int) -> EntryState:
    """What an engine for that architecture meets in `entry`, which bears its key's name."""
    try:
        if not any(entry.iterdir()):
            return EntryState.MISSING
    except FileNotFoundError:
        # A link that leads nowhere stands in the way of publishing.
        return EntryState.CORRUPT if entry.is_symlink() else EntryState.MISSING
    except NotADirectoryError:
        return EntryState.CORRUPT
    try:
        check_entry(entry, capability)
    except Unusable:
        return EntryState.CORRUPT
    except Incomplete:
        return EntryState.MISSING if _age(entry) < IN_PROGRESS_S else EntryState.CORRUPT
    return EntryState.PUBLISHED


def check_entry(entry: Path, capability: int) -> None:
    """Returns if an engine may load what `entry` holds; raises `Incomplete` or `Unusable` otherwise."""
    members = group_members(entry)
    metadata = _member(members, ".json", entry)
    cubin = _member(members, ".cubin", entry)
    try:
        described = msgspec.json.decode(metadata.read_bytes(), type=_Metadata)
        architecture = cubin_architecture(cubin)
    except (msgspec.DecodeError, NotACubin) as error:
        raise Unusable(f"{entry}: its metadata or its cubin is damaged: {error}") from error
    except OSError as error:
        raise Unusable(f"{error.filename} cannot be read: {error.strerror}") from error
    if key_of(described.hash) != entry.name:
        raise Unusable(f"{metadata} describes another key, {key_of(described.hash)}")
    if {str(described.target.arch), str(architecture)} != {str(capability)}:
        raise Unusable(
            f"{cubin} is compiled for sm_{architecture} and described as for {described.target.arch}, "
            f"not for sm_{capability}"
        )


def group_members(entry: Path) -> dict[str, Path]:
    """The files of the group in `entry`, where the library would read them. Raises `Incomplete`."""
    groups = list(entry.glob(f"{GROUP_PREFIX}*.json"))
    if len(groups) != 1:
        raise Incomplete(f"{entry} holds {len(groups)} group files; a compiled kernel has exactly one")
    try:
        group = msgspec.json.decode(groups[0].read_bytes(), type=_Group)
    except (msgspec.DecodeError, OSError) as error:
        raise Incomplete(f"{groups[0]} cannot be read: {error}") from error
    members = {name: Path(path) for name, path in group.child_paths.items()}
    for path in members.values():
        if not path.exists():
            raise Incomplete(
                f"{groups[0]} names {path}, which is not there: a file was removed, or the cache was moved"
            )
    return members


def metadata_of(entry: Path) -> Path:
    """The file in which the library describes the kernel of `entry`. Raises `Incomplete`."""
    # Not by the entry's listing: a kernel's own name may begin with underscores, as the group's file does.
    described = [path for name, path in group_members(entry).items() if name.endswith(".json")]
    if len(described) != 1:
        raise Incomplete(f"{entry} describes {len(described)} kernels instead of one")
    return described[0]


def relocate(entry: Path, final: Path) -> None:
    """Rewrites the group in `entry` as if the kernel had been compiled in `final`. Raises `Incomplete`."""
    members = group_members(entry)
    (path,) = entry.glob(f"{GROUP_PREFIX}*.json")
    group = _Group({name: str(final / member.name) for name, member in members.items()})
    path.write_bytes(msgspec.json.encode(group))


def move_to_absent(staged: Path, final: Path) -> None:
    """A rename that fails with `EEXIST` on anything but an absent or a long empty directory."""
    with contextlib.suppress(OSError):
        if _age(final) > LOOKED_UP_S:
            # Fails unless it is empty; whoever looks the key up from here on makes it anew.
            final.rmdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, bytes(staged), _AT_FDCWD, bytes(final), _RENAME_NOREPLACE) == 0:
        return
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS):
        # A file system without this kind of rename, as NFS: then only the moment between is not covered.
        if final.exists():
            error = errno.EEXIST
        else:
            staged.rename(final)
            return
    raise OSError(error, os.strerror(error), str(final))


def publish_entry(staged: Path, final: Path) -> bool:
    """Makes a finished entry visible in one step; False, and it is dropped, where an engine was first."""
    return publish_directory(staged, final, move_to_absent)


def _member(members: dict[str, Path], suffix: str, entry: Path) -> Path:
    for name, path in members.items():
        if name.endswith(suffix):
            return path
    raise Incomplete(f"{entry}: its group names no {suffix} file")


def _age(entry: Path) -> float:
    """Seconds since anything in `entry` was last written.

    One from the future was written before the clock was set back, or by a machine whose clock is ahead. It
    may be an engine's work of this moment, so it is as old as this process knows it: young, and not for ever.
    """
    written = max(path.lstat().st_mtime for path in (entry, *entry.iterdir()))
    age = time.time() - written
    if age >= 0:
        return age
    if len(_from_the_future) >= MOST_FROM_THE_FUTURE:
        del _from_the_future[next(iter(_from_the_future))]
    now = time.monotonic()
    return now - _from_the_future.setdefault((entry, written), now)


# By entry and its time of writing, when it was first met (monotonic).
_from_the_future: dict[tuple[Path, float], float] = {}


def reader(entry: Path) -> Any:
    """The library's own view of an entry, which reads it and cannot write: its constructor would."""
    return _manager(entry, None)


def writer(entry: Path) -> Any:
    """The library's own view of an entry that it is to make, in a directory of its own."""
    entry.mkdir(parents=True)
    return _manager(entry, str(entry / "lock"))


def _manager(entry: Path, lock: str | None) -> Any:
    from triton.runtime.cache import FileCacheManager

    manager = FileCacheManager.__new__(FileCacheManager)
    manager.key, manager.cache_dir, manager.lock_path = entry.name, str(entry), lock
    return manager
