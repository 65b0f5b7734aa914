"""Which kernels an engine's warm-up pass used the last time: then the next start knows whether it needs one.

No table of ours says what an engine's own warm-up compiles; the observer has seen it. A start that went
through the pass leaves the keys in a file beside the shape log, and the next start of the same engine looks
each of them up on disk. The subtle rule: only a complete list of kernels counts, so there is none where the
pass failed, used a kernel without a name of ours, or had a tuner measure; and a key that is gone, corrupt or
of a compiler that is not here makes the pass necessary again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prefetchd.compilers import load_compiler
from prefetchd.compilers.base import CompilerUnavailable, EntryState
from prefetchd.engines.hooks import wrap
from prefetchd.targets import Target

if TYPE_CHECKING:
    from prefetchd.observer import Observer

LEDGER_VERSION = 1
# An engine's pass uses some hundred kernels; a list beyond this is no pass.
MAX_KEYS = 65536
# What nvcc makes is seen only when it is over, and belongs to passes that are judged without a list.
SEEN_LATER = frozenset({"deep_jit", "nvcc"})

Keys = dict[str, tuple[str, ...]]


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of one engine's pass, by compiler."""

    keys: Keys
    version: int = LEDGER_VERSION


class Collected:
    """Keys that a pass uses, told by any thread."""

    def __init__(self) -> None:
        # Whether the keys are all that a next pass would need.
        self.complete = True
        self._lock = threading.RLock()
        self._keys: dict[str, dict[str, None]] = {}

    def add(self, compiler: str, key: str) -> None:
        """One that was found or compiled."""
        if compiler in SEEN_LATER:
            return
        if not key:
            self.complete = False
            return
        with self._lock:
            self._keys.setdefault(compiler, {})[key] = None

    def keys(self) -> Keys:
        """All, in the order of first use."""
        with self._lock:
            return {compiler: tuple(keys) for compiler, keys in self._keys.items()}


@contextlib.contextmanager
def told(observer: Observer, collected: Collected) -> Iterator[None]:
    """What the observer hears of kernels and tuners meanwhile."""

    def around_hit(original: Callable[..., Any], compiler: str, key: str) -> Any:
        collected.add(compiler, key)
        return original(compiler, key)

    def around_started(original: Callable[..., Any], compiler: str, **how: Any) -> Any:
        collected.add(compiler, how.get("key", ""))
        return original(compiler, **how)

    def around_benchmarked(original: Callable[..., Any], *args: Any, **how: Any) -> Any:
        collected.complete = False
        return original(*args, **how)

    wrap(observer, "hit", around_hit)
    wrap(observer, "started", around_started)
    wrap(observer, "benchmarked", around_benchmarked)
    try:
        yield
    finally:
        for name in ("hit", "started", "benchmarked"):
            delattr(observer, name)


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


def forget_ledger(path: Path) -> None:
    """The pass of that list is needed from now on. Raises `OSError`."""
    path.unlink(missing_ok=True)


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
    except (CompilerUnavailable, LookupError, OSError, ValueError):
        return False
