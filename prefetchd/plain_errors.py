"""How a command ends: an expected error is one line and status 2, an interrupt status 130.

Each expected error says in its text what was wrong and what to do; a traceback would only hide it. What is
not expected is a defect and keeps its traceback.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import click

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.config import ConfigError
from prefetchd.null_device.guard import NullDeviceBroken
from prefetchd.profiles import ProfileError
from prefetchd.provider import UnknownProvider
from prefetchd.store import StoreUnwritable
from prefetchd.targets import TargetError
from prefetchd.tracer import HelperFailed
from prefetchd.winners import WinnersUnreadable

# What any command may meet; one that can meet more names it.
EXPECTED: tuple[type[Exception], ...] = (
    CompilerUnavailable,
    ConfigError,
    HelperFailed,
    NullDeviceBroken,
    ProfileError,
    StoreUnwritable,
    TargetError,
    UnknownProvider,
    WinnersUnreadable,
)
CANNOT_RUN, INTERRUPTED = 2, 130

Parameters = ParamSpec("Parameters")


def plain_errors(
    *more: type[Exception],
) -> Callable[[Callable[Parameters, int]], Callable[Parameters, None]]:
    """Decorates a command that returns its exit status; `more` are the errors expected of it alone."""
    expected = (*EXPECTED, *more)

    def decorate(command: Callable[Parameters, int]) -> Callable[Parameters, None]:
        @wraps(command)
        def wrapped(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
            try:
                status = command(*arguments, **options)
            except expected as error:
                click.echo(f"prefetchd: {error}", err=True)
                status = CANNOT_RUN
            except BrokenPipeError:
                # Whoever read our output has ended; click knows what to do.
                raise
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                click.echo(f"prefetchd: {where}{error.strerror or error}", err=True)
                status = CANNOT_RUN
            except (KeyboardInterrupt, asyncio.CancelledError):
                click.echo("prefetchd: interrupted; what is published stays", err=True)
                status = INTERRUPTED
            sys.exit(status)

        return wrapped

    return decorate
