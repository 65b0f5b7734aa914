"""`prefetchd run -- CMD`: any Python engine with prefetchd beside it, and never without the engine.

Finds or starts the daemon, sets what the engine needs and has not set, says each of these things in a line on
standard error, and becomes the command: its output, signals and exit status are its own. The subtle rule:
whatever of ours is missing or broken, the command runs. Only a command that is not there is an error, and
a user who wants engine compiles to fail while the settings cannot be read or say not to observe: none would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

from prefetchd.config import ENABLED_VARIABLE, PREFIX, ConfigError, Settings, load_settings
from prefetchd.daemon_start import NoDaemon, find_or_start
from prefetchd.endpoint import EndpointError, find_endpoint
from prefetchd.engine_environment import (
    IDLE_EXIT_S,
    IDLE_EXIT_VARIABLE,
    Addition,
    daemon_environment,
    engine_environment,
    key_additions,
    observed_additions,
)

# As the shell has them.
COMMAND_NOT_FOUND, COMMAND_NOT_RUN, INTERRUPTED = 127, 126, 130
CANNOT_RUN = 2
# The setting `on_engine_compile` as a variable, and its values with which nothing is meant to fail.
GATE_VARIABLE, LENIENT = f"{PREFIX}ON_ENGINE_COMPILE", ("", "ignore", "warn")
OFF = ("", "0")


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--no-start", is_flag=True, help="Use a daemon that is there; start none.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(no_start: bool, command: tuple[str, ...]) -> None:
    """Run an engine with prefetchd: prefetchd run -- vllm serve MODEL."""
    try:
        run(command, os.environ, start=not no_start)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def run(argv: Sequence[str], environment: Mapping[str, str], *, start: bool = True) -> NoReturn:
    """Becomes the command; exits with 127 where there is none, with 2 where a gate could not close."""
    if shutil.which(argv[0], path=environment.get("PATH", os.defpath)) is None:
        _say(f"{argv[0]}: command not found or not executable")
        sys.exit(COMMAND_NOT_FOUND)
    child = dict(environment)
    if environment.get(ENABLED_VARIABLE, "1") in OFF:
        _say(f"{ENABLED_VARIABLE}={environment[ENABLED_VARIABLE]}: switched off, nothing is set or started")
    else:
        _check_gate(environment)
        child = _prepared(environment, start)
    _become(argv, child)


def _check_gate(environment: Mapping[str, str]) -> None:
    if environment.get(GATE_VARIABLE, "") in LENIENT:
        return
    problem = "PREFETCHD_OBSERVE=0: what is not observed cannot fail; unset one of the two"
    try:
        if load_settings(environment).observe:
            return
    except ConfigError as error:
        problem = str(error)
    _say(f"not started, since {GATE_VARIABLE} could not be kept: {problem}")
    sys.exit(CANNOT_RUN)


def _prepared(environment: Mapping[str, str], start: bool) -> dict[str, str]:
    """The engine's environment; with the daemon there, if it can be had."""
    additions: list[Addition] = []
    try:
        additions = key_additions(environment)
    except Exception as error:
        _say(f"no cache directory is set ({type(error).__name__}: {error})")
    observed = _observed(environment)
    child = engine_environment(environment, [*additions, *observed])
    reasons = {one.name: one.reason for one in (*additions, *observed)}
    for name in sorted({*(child.keys() - environment.keys()), *reasons}):
        reason = f"  ({reasons[name]})" if name in reasons else ""
        _say(f"{name}={child[name]}{reason}")
    if "PYTHONPATH" in environment:
        _say(f"PYTHONPATH={child['PYTHONPATH']}  (ours in front)")
    try:
        settings = load_settings(environment)
        endpoint = find_endpoint(environment, settings.endpoint)
        _say(find_or_start(endpoint, _of_daemon(environment, additions, settings), start=start))
    except (NoDaemon, EndpointError, OSError) as error:
        _say_alone(str(error))
    except Exception as error:
        # Whatever it is, an engine is not kept from starting by us.
        _say_alone(f"{type(error).__name__}: {error}")
    return child


def _observed(environment: Mapping[str, str]) -> list[Addition]:
    try:
        return observed_additions(environment, load_settings(environment))
    except Exception as error:
        # Without nvcc, or without deep_gemm: the rest is seen all the same.
        _say(f"what nvcc compiles is not observed: {error}")
        return []


def _of_daemon(
    environment: Mapping[str, str], additions: list[Addition], settings: Settings
) -> dict[str, str]:
    child = daemon_environment(environment, additions)
    if not settings.idle_exit_s:
        child.setdefault(IDLE_EXIT_VARIABLE, str(IDLE_EXIT_S))
    return child


def _become(argv: Sequence[str], environment: dict[str, str]) -> NoReturn:
    # Python ignores these two, and what is ignored stays so across exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), environment)
    except OSError as error:
        _say(f"{argv[0]}: {error.strerror}")
        sys.exit(COMMAND_NOT_RUN)


def _say_alone(reason: str) -> None:
    _say(f"no daemon: {reason}. The engine starts without it and uses one as soon as it is there")


def _say(text: str) -> None:
    if sys.stderr is None:
        return
    # Where nobody listens, the engine runs all the same.
    with contextlib.suppress(OSError, ValueError):
        print(f"prefetchd run: {text}", file=sys.stderr, flush=True)
