"""An engine that knows nothing of prefetchd, announced to the daemon from inside its own process.

`prefetchd run` gets us called (`engine_site/sitecustomize.py`) in a thread of our own, once torch has started
CUDA. The hello must name the device this rank really uses, and an engine chooses that a little later; so the
thread waits until the driver has a context on some device, which asking does not make. The subtle rule: an
engine that calls `attach` itself has said more than we could, and is left alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from prefetchd.client import Client
from prefetchd.config import Settings, load_settings
from prefetchd.endpoint import find_endpoint
from prefetchd.guard import Guard
from prefetchd.introduction import ASKED_AHEAD, Introduction
from prefetchd.protocol import Hello
from prefetchd.rank import environment_rank, torch_rank

log = logging.getLogger("prefetchd")

# Module names by which people know an engine; its own command may be any script.
ENGINES = ("vllm", "sglang", "tensorrt_llm")
# A device is chosen within milliseconds of CUDA's start, or never: a process that only asks what devices
# there are. Looking costs microseconds.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.02, 1.0


class NotAnnounced(Exception):
    """Why the daemon does not hear of this process; the text says what to do."""


def announce() -> Client | None:
    """Waits for the device, then connects; the client's own thread does the rest. Raises nothing."""
    guard = Guard()
    try:
        device = _wait_for_device()
        if "prefetchd.attaching" in sys.modules:
            return None
        client = _client(load_settings(), device)
        if client is None:
            return None
        client.hello = RankedHello(client.hello, device)
        _tell_observer(client, device)
        client.start()
    except Exception as error:
        guard.caught("announcing this process to the daemon", error)
        return None
    log.info("prefetchd: announced to %s with device %d", client.address, device)
    return client


class RankedHello:
    """A hello that says which rank this is as soon as torch knows, and its device's number until then."""

    def __init__(self, hello: Callable[[], Hello], device: int) -> None:
        self._hello, self._device = hello, device

    def __call__(self) -> Hello:
        """The hello as things are now."""
        rank, world = torch_rank() or environment_rank(os.environ) or (self._device, self._device + 1)
        return msgspec.structs.replace(self._hello(), rank=rank, world=max(world, rank + 1))


def engine_name() -> str:
    """What people call the program this process belongs to."""
    known = next((name for name in ENGINES if name in sys.modules), None)
    return known or Path(sys.argv[0] if sys.argv else "").name or "python"


def active_device(driver: ctypes.CDLL) -> int | None:
    """The last device on which this process has a primary context; asking makes none."""
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    # The last: a stray context on device 0 is common, one on a device that is not used is not.
    for device in reversed(range(count.value)):
        status = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if status == 0 and active.value:
            return device
    return None


def _tell_observer(client: Client, device: int) -> None:
    """What the engine compiles is told to the daemon from now on."""
    from prefetchd.observing.watch import watch

    found = watch()
    if found is not None:
        found.use(client, device=device)


def _wait_for_device() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError as error:
        raise NotAnnounced(f"torch has started CUDA, yet no libcuda.so.1 is loaded: {error}") from error
    pause = FIRST_PAUSE_S
    while (device := active_device(driver)) is None:
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_S)
    return device


def _client(settings: Settings, device: int) -> Client | None:
    if settings.profile:
        # With a profile the daemon can also be told all that the model may launch.
        from prefetchd.attaching import attach

        return attach(engine=engine_name(), device=device).client
    endpoint = find_endpoint(named=settings.endpoint)
    if endpoint.directory is None:
        raise NotAnnounced(
            f"endpoint {endpoint.address}: an engine needs a daemon of its own node, by ipc://"
        )
    endpoint.check()
    introduction = Introduction(engine=engine_name(), compilers=ASKED_AHEAD, device=device)
    return Client(endpoint.address, introduction, wait_ms=settings.wait_ms)
