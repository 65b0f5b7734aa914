"""Where artifacts are made, and the one step in which they become visible in an engine's cache.

The engine takes no lock of ours, so no lock protects it: what protects it is that an entry appears by one
`rename` of a finished directory. What any other process can observe of a cache root, at any moment and after
any crash of ours, is:

- under a key, either nothing (or the empty directory that was there), or a complete entry whose content had
  reached the disk; a non-empty entry is never written into, changed or replaced;
- beside the cache, only `<root>/.prefetchd/`: one directory an owner, whose lock the owner holds while it
  lives, so that the next start can tell and removes what a killed one left; `quarantine/`, with the corrupt
  entries that were moved out of the engine's way; `keys.lock`, by which two of our processes agree who
  compiles a key.

The subtle rule: locks are the kernel's (flock, open-file-description byte ranges), never files whose mere
existence means something; they end with their holder, whatever ends it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

PRIVATE = ".prefetchd"
# Corrupt entries are kept for whoever wants to know why; more than these help nobody and fill the disk.
QUARANTINE_LIMIT = 16

_OWNER_PREFIX = "owner-"
# The target of a directory rename holds something already: EEXIST on some file systems, ENOTEMPTY on most.
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)
# `struct flock` of a 64-bit kernel: type, whence, start, length, pid (which must be 0 for these locks).
_FLOCK = struct.Struct("hhqqi4x")
# The lock file is never written, so offsets cost nothing; 62 bits keep start + length within the signed 64.
_LOCK_OFFSETS = 1 << 62


class StoreUnwritable(Exception):
    """Nothing can be published in a cache root; the text names the directory, the reason and the fix."""

    def __init__(self, root: Path, variable: str, error: OSError) -> None:
        super().__init__(
            f"{root}: nothing can be published in this cache directory ({error.strerror}: "
            f"{error.filename or root}); make it writable for uid {os.getuid()}, or set "
            f"{variable} to a directory that is"
        )


class Staging:
    """A private working place inside a cache root, on the same file system, for the life of this context.

    Entering creates the root if it is absent, removes what dead owners left, and raises `StoreUnwritable`.
    Leaving removes the place and all that is in it.
    """

    def __init__(self, root: Path, *, variable: str) -> None:
        self.root = root
        self._variable = variable
        self._count = itertools.count()
        self._lock = -1
        self.directory = root / PRIVATE / f"{_OWNER_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def __enter__(self) -> Self:
        try:
            private = private_directory(self.root)
            with _exclusive(private / "start.lock"):
                _remove_dead_owners(private)
                self.directory.mkdir(mode=0o700)
                self._lock = os.open(self.directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreUnwritable(self.root, self._variable, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)

    @contextlib.contextmanager
    def entry(self, key: str) -> Iterator[Path]:
        """An empty directory for the making of `key`, removed when the block ends, however it ends."""
        # The key's digest and a count, not the key: names have length limits, and retries need a fresh place.
        directory = self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:12]}-{next(self._count)}"
        directory.mkdir(mode=0o700)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


class KeyLocks:
    """Agreement among processes on one cache root about who works on a key. Nobody ever waits in here.

    A key is a byte of one lock file, locked by this object's open file description: the kernel releases it
    when the process ends. Two keys that fall on the same byte (62 bits) exclude each other; that costs time,
    not correctness. Do not hold one across a fork without exec: the child would share it.
    """

    def __init__(self, root: Path, *, variable: str) -> None:
        self._held: set[str] = set()
        try:
            self._file = _open_lock_file(private_directory(root) / "keys.lock")
        except OSError as error:
            raise StoreUnwritable(root, variable, error) from error

    def try_acquire(self, key: str) -> bool:
        """Takes the key unless another process, or another `KeyLocks` of this one, holds it."""
        try:
            self._set(key, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        self._held.add(key)
        return True

    def release(self, key: str) -> None:
        """Gives a held key back; a key that is not held is left alone."""
        if key in self._held:
            self._held.discard(key)
            self._set(key, fcntl.F_UNLCK)

    def close(self) -> None:
        """Gives every key back."""
        self._held.clear()
        os.close(self._file)

    def _set(self, key: str, kind: int) -> None:
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        offset = int.from_bytes(digest, "little") % _LOCK_OFFSETS
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))


def publish_directory(staged: Path, final: Path, move: Callable[[Path, Path], object] = Path.rename) -> bool:
    """Moves a complete directory to its final name in one step; False, and `staged` dropped, if it was taken.

    An absent or empty `final` is replaced, anything else is left untouched; a `move` that is stricter than
    `rename` says so by the same errors. Raises `OSError` (full disk,
    read-only, `final` is a file); then nothing is visible under `final` that was not there before.
    """
    _sync_tree(staged)
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        move(staged, final)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        shutil.rmtree(staged, ignore_errors=True)
        return False
    _sync(final.parent)
    return True


def quarantine(root: Path, entry: Path) -> Path:
    """Moves a corrupt entry out of the cache and says where it lies now; the oldest ones go.

    Raises `FileNotFoundError` when someone else moved it first. Hold the entry's key, and judge the entry
    while holding it: otherwise a good one that was published in between is what gets moved.
    """
    place = private_directory(root) / "quarantine"
    place.mkdir(mode=_directory_mode(root), exist_ok=True)
    target = place / f"{entry.name}.{uuid.uuid4().hex[:8]}"
    try:
        entry.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # A directory that came with a container image cannot be renamed on its overlay. What is removed
        # piece by piece was unusable before, so whoever meets it half removed is no worse off.
        shutil.copytree(entry, target, symlinks=True)
        shutil.rmtree(entry)
    os.utime(target, follow_symlinks=False)
    kept = sorted(place.iterdir(), key=lambda path: path.lstat().st_mtime_ns, reverse=True)
    for old in kept[QUARANTINE_LIMIT:]:
        _remove(old)
    return target


def private_directory(root: Path) -> Path:
    """`<root>/.prefetchd`, created with its root, open to whoever may write to the root. Raises `OSError`."""
    root.mkdir(parents=True, exist_ok=True)
    private = root / PRIVATE
    if not private.is_dir():
        with contextlib.suppress(FileExistsError):
            private.mkdir()
            private.chmod(_directory_mode(root))
    return private


def _directory_mode(root: Path) -> int:
    return root.stat().st_mode & 0o777


def _open_lock_file(path: Path) -> int:
    """Opens a lock file that everyone who may write to its directory can open, whatever the umask says."""
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    mode = path.parent.stat().st_mode & 0o666
    status = os.fstat(file)
    if status.st_uid == os.getuid() and status.st_mode & 0o777 != mode:
        os.fchmod(file, mode)
    return file


def _remove_dead_owners(private: Path) -> None:
    """Removes every owner's directory whose lock is free. Under `start.lock`, so none is half created."""
    for directory in private.glob(f"{_OWNER_PREFIX}*"):
        try:
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            shutil.rmtree(directory, ignore_errors=True)
            continue
        except OSError:
            # Another user's: not ours to judge or to remove.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    file = _open_lock_file(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _sync_tree(directory: Path) -> None:
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
