"""What one process of an engine has of prefetchd: at most one handle, taken once, and a guard for all of it.

Engines run several processes, of which each may schedule, hold a device, or both; where both happen in one
process, the scheduler's batches go out by the worker's handle. The subtle rule: a forked child starts without
the parent's seat, since it is another process of the engine with another part to play.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from prefetchd.attaching import Handle
from prefetchd.config import load_settings
from prefetchd.guard import Guard
from prefetchd.profiles import Profile
from prefetchd.profiles.codec import encode_profile
from prefetchd.protocol import Batch

log = logging.getLogger("prefetchd")


class Seat:
    """`take` once, then `scheduled` before each step."""

    def __init__(self, attach: Callable[..., Handle]) -> None:
        self.guard = Guard()
        self._attach = attach
        self._pid = os.getpid()
        self._handle: Handle | None = None
        # Whether the user has named a profile: then whoever wrote it knows better than we.
        self._named = False

    @property
    def handle(self) -> Handle | None:
        """This process's, None before `take` and in a forked child."""
        return self._handle if self._pid == os.getpid() else None

    def take(self, profile: Profile | None, **how: Any) -> Handle:
        """Attaches this process, or answers what was attached before."""
        if (handle := self.handle) is None:
            self._named = bool(load_settings().profile)
            self._pid = os.getpid()
            handle = self._handle = self._attach(None if self._named else profile, **how)
        return handle

    def use_profile(self, profile: Profile, max_tokens: int) -> None:
        """What is known of the model now, unless its user has named a profile; told where it is new."""
        if (handle := self.handle) is not None and not self._named:
            handle.use_profile(profile, max_tokens)

    def profile(self) -> bytes:
        """What this process is planned by, as bytes; none where it is not attached. Raises nothing."""
        try:
            if (handle := self.handle) is not None and handle.profile is not None:
                return encode_profile(handle.profile)
        except Exception as error:
            self.guard.caught("encoding the profile", error)
        return b""

    def tell_state_slots(self, count: Callable[[], int]) -> None:
        """How many states the engine's pool holds, once it is made; 0 where it has none. Raises nothing."""
        if (handle := self.handle) is None:
            return
        try:
            if slots := count():
                handle.use_state_slots(slots)
        except Exception as error:
            self.guard.caught("reading the size of the pool of states", error)

    def refresh(self) -> None:
        """The engine has come to a point where its cache directories may have moved."""
        if (handle := self.handle) is not None and handle.client is not None:
            handle.client.refresh()

    def scheduled(self, batch_of: Callable[[Any], Batch | None], output: Any) -> None:
        """The engine's next step, on its scheduler's thread: microseconds, and raises nothing."""
        try:
            handle = self._handle
            if handle is None:
                return
            batch = batch_of(output)
            if batch is not None:
                handle.on_schedule(batch)
        except Exception as error:
            self.guard.caught("reading the scheduler's output", error)
