"""Which kernels an engine's warm-up pass used the last time: then the next start knows whether it needs one.

No table of ours says what an engine's own warm-up compiles; the observer has seen it. A start that went
through the pass leaves the keys in a file beside the shape log, and the next start of the same engine looks
each of them up on disk. The subtle rule: only a complete list counts, so nothing is written where the pass
failed, and a key that is gone, corrupt or of a compiler that is not here makes the pass necessary again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from prefetchd.compilers import load_compiler
from prefetchd.compilers.base import CompilerUnavailable, EntryState
from prefetchd.targets import Target

LEDGER_VERSION = 1
# An engine's pass uses some hundred kernels; a list beyond this is no pass.
MAX_KEYS = 65536

Keys = dict[str, tuple[str, ...]]


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of one engine's pass, by compiler."""

    keys: Keys
    version: int = LEDGER_VERSION


class Collected:
    """Keys that a pass uses, told by any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._keys: dict[str, dict[str, None]] = {}

    def add(self, compiler: str, key: str) -> None:
        """One that was found or compiled."""
        if key:
            with self._lock:
                self._keys.setdefault(compiler, {})[key] = None

    def keys(self) -> Keys:
        """All, in the order of first use."""
        with self._lock:
            return {compiler: tuple(keys) for compiler, keys in self._keys.items()}


def ledger_path(directory: Path, identity: Iterable[str]) -> Path:
    """The file of an engine that all of these texts identify."""
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    return directory / f"warmup.{digest}.json"


def write_ledger(path: Path, keys: Keys) -> None:
    """In one step. Raises `OSError`; a pass that used nothing leaves nothing."""
    if not any(keys.values()) or sum(map(len, keys.values())) > MAX_KEYS:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.encode(Ledger(keys=keys)))
    temporary.replace(path)


def is_covered(path: Path, target: Target, environment: Mapping[str, str]) -> bool:
    """Whether every key of the last pass lies where the engine will look; False without a readable list."""
    try:
        ledger = msgspec.json.decode(path.read_bytes(), type=Ledger)
    except (OSError, msgspec.MsgspecError):
        return False
    if ledger.version != LEDGER_VERSION or not ledger.keys:
        return False
    try:
        return all(
            compiler.look_up(key) is EntryState.PUBLISHED
            for compiler, keys in (
                (load_compiler(name, target, environment), keys) for name, keys in ledger.keys.items()
            )
            for key in keys
        )
    except (CompilerUnavailable, LookupError, ValueError):
        return False
