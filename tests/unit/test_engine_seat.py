"""What a process of an engine has of prefetchd, across forks and failures."""

from __future__ import annotations

import os
from typing import Any

import pytest

from prefetchd.attaching import Handle
from prefetchd.engines.seat import Seat
from prefetchd.profiles import Profile
from prefetchd.protocol import Batch

PROFILE = Profile(
    model="m", architecture="A", quantization="bf16", context_tokens=1, tp=1, ep=1, dp=1
)  # fmt: skip


class Noting(Handle):
    def __init__(self, profile: Profile | None) -> None:
        super().__init__()
        self.profile = profile
        self.heard: list[Any] = []

    def on_schedule(self, batch: Batch) -> None:
        self.heard.append(batch)

    def use_state_slots(self, slots: int) -> None:
        self.heard.append(slots)


def attach(profile: Profile | None, **how: Any) -> Noting:
    return Noting(profile)


def test_seat_is_taken_once() -> None:
    seat = Seat(attach)

    assert seat.take(PROFILE) is seat.take(None) is seat.handle


def test_forked_worker_takes_a_seat_of_its_own() -> None:
    """An engine's core forks its workers; each attaches with its own rank and device."""
    seat = Seat(attach)
    parents = seat.take(PROFILE)

    pid = os.fork()
    if pid == 0:
        fresh = seat.handle is None
        os._exit(0 if fresh and seat.take(PROFILE) is not parents and seat.handle is not None else 1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert seat.handle is parents


def test_profile_that_a_user_has_named_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFETCHD_PROFILE", "/their.profile.toml")
    seat = Seat(attach)

    assert seat.take(PROFILE).profile is None


def test_batch_that_cannot_be_read_and_one_that_is_none_are_not_told() -> None:
    seat = Seat(attach)
    handle = seat.take(PROFILE)
    assert isinstance(handle, Noting)

    seat.scheduled(lambda output: None, object())
    seat.scheduled(lambda output: output.unknown, object())

    assert handle.heard == []
    assert seat.guard.errors == 1


def test_size_of_no_pool_is_not_told() -> None:
    seat = Seat(attach)
    seat.tell_state_slots(lambda: 1 // 0)
    handle = seat.take(PROFILE)
    assert isinstance(handle, Noting)

    seat.tell_state_slots(lambda: 0)
    seat.tell_state_slots(lambda: 3)

    assert handle.heard == [3]
    # Nobody to be told is no failure.
    assert seat.guard.errors == 0
