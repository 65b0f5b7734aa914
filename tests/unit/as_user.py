"""Runs a function as another user, in a forked child: that user need not be able to read the interpreter."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import TypeVar

import pytest
from processes import start_child

# No account has this number: code that asks for its name fails.
NAMELESS = 12345

T = TypeVar("T")


def as_nameless_user(function: Callable[[], T]) -> T:
    """The function's result as uid 12345 with HOME unset; the test is skipped unless it runs as root."""
    if os.geteuid() != 0:
        pytest.skip("becomes another user, which only root can")
    read, write = os.pipe()

    def answer() -> None:
        try:
            os.setgroups([])
            os.setgid(NAMELESS)
            os.setuid(NAMELESS)
            os.environ.pop("HOME", None)
            result: tuple[bool, object] = (True, function())
        except BaseException:
            result = (False, traceback.format_exc())
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(result))

    child = start_child(answer)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        fine, value = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    assert fine, value
    return value
