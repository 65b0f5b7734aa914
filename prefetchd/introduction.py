"""What an engine rank says of itself in its hello: the device, and all that enters a kernel's key.

It is asked in the client's background thread, never by the engine's. Two rules: nothing here initialises CUDA
in the engine's process, since an engine that forks its workers afterwards would find no device in them; and
nothing here imports a kernel library that the engine has not imported itself. An answer is kept until the
environment or the set of loaded libraries changes, because that is when cache directories move.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from prefetchd.config import ENABLED_VARIABLE
from prefetchd.protocol import Hello
from prefetchd.targets import Target, TargetError, probe_target

log = logging.getLogger("prefetchd")

# Compilers whose keys and directories an engine can be asked for before it has launched anything.
ASKED_AHEAD = ("deep_jit", "triton")
# Compilers whose fingerprint asks the library itself.
NEEDED_LIBRARY = {"triton": "triton"}
# A driver that must first wake its GPUs takes several seconds.
PROBE_TIMEOUT_S = 60.0
PROBE = """\
import sys, msgspec
from prefetchd.targets import probe_target
sys.stdout.buffer.write(msgspec.msgpack.encode(probe_target(int(sys.argv[1]))))
"""


class Introduction:
    """Called for each hello; `pid` and `generation` are filled in by the client."""

    def __init__(
        self,
        *,
        engine: str,
        compilers: Iterable[str],
        rank: int = 0,
        world: int = 1,
        device: int = 0,
        target: Target | None = None,
        state_slots: int = 0,
    ) -> None:
        self._engine, self._rank, self._world, self._device = engine, rank, world, device
        self._compilers = tuple(compilers)
        self._target, self._probed = target, target is not None
        # Of the pool of states; an engine may know it later than it attaches.
        self.state_slots = state_slots
        # The client's thread asks, and the observer's.
        self._lock = threading.Lock()
        self._basis: tuple[object, ...] | None = None
        self._hello: Hello | None = None

    def __call__(self) -> Hello:
        """The hello as things are now."""
        loaded = frozenset(name for name in NEEDED_LIBRARY.values() if name in sys.modules)
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        basis = (dict(os.environ), loaded, cpus, self.state_slots)
        with self._lock:
            if self._hello is None or basis != self._basis:
                self._basis, self._hello = basis, self._describe(cpus)
            return self._hello

    def _describe(self, cpus: tuple[int, ...]) -> Hello:
        if not self._probed:
            self._probed, self._target = True, _real_target(self._device)
        fingerprints, roots = {}, {}
        for name in self._compilers:
            if self._target is not None and (found := _ask_compiler(name, self._target)):
                fingerprints[name], roots[name] = found
        return Hello(
            engine=self._engine,
            pid=os.getpid(),
            generation="",
            rank=self._rank,
            world=self._world,
            target=self._target,
            fingerprints=fingerprints,
            cache_roots=roots,
            interpreter=sys.executable or "",
            library_directories=_library_directories(),
            cpus=cpus,
            state_slots=self.state_slots,
        )


def _ask_compiler(name: str, target: Target) -> tuple[dict[str, str], tuple[str, ...]] | None:
    library = NEEDED_LIBRARY.get(name)
    if library is not None and library not in sys.modules:
        return None
    try:
        from prefetchd.compilers import load_compiler

        compiler = load_compiler(name, target, dict(os.environ))
        return dict(compiler.fingerprint()), tuple(map(str, compiler.roots()))
    except Exception as error:
        # Whatever a library's own files hold: the hello goes out without it, and the daemon says so.
        log.info("prefetchd: compiler %s does not describe itself here: %s", name, error)
        return None


def _real_target(device: int) -> Target | None:
    try:
        return probe_target(device) if driver_is_up() else _probe_elsewhere(device)
    except TargetError as error:
        log.warning("prefetchd: the device is not known: %s", error)
        return None


def driver_is_up() -> bool:
    """Whether this process has initialised CUDA already; asking does not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) == 0)


def _probe_elsewhere(device: int) -> Target:
    """Asks in a process of its own, which sees the same devices."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, str(device)],
            env={**os.environ, ENABLED_VARIABLE: "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
        if done.returncode == 0:
            return msgspec.msgpack.decode(done.stdout, type=Target)
        reason = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        reason = str(error)
    raise TargetError(f"device {device}: {reason}")


def _library_directories() -> tuple[str, ...]:
    """Where this interpreter finds installed packages, in its order."""
    found = (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    return tuple(dict.fromkeys(found))
