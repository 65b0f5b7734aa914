"""The doctor's checks of prefetchd itself: its C parts, its settings, and what this machine gives it.

The subtle rule: that a file is there proves nothing. The null device is tried in a process of its own, as
every helper will start it, so a library built for another C library or blocked by the platform shows here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from prefetchd import config
from prefetchd.config import PREFIX, ConfigError, Settings, load_settings
from prefetchd.cores import usable_cores
from prefetchd.doctor.facts import Machine, Verdict, exists, fail, missing, ok, warn
from prefetchd.job_runner import JOB_RUNNER
from prefetchd.null_device.guard import NullDeviceBroken
from prefetchd.null_device.launcher import environment as null_environment
from prefetchd.null_device.launcher import verify
from prefetchd.targets import Target, TargetError, load_target, preset_names, probe_target

REINSTALL = "reinstall prefetchd with a C compiler present: pip install --force-reinstall --no-deps prefetchd"


def null_device(machine: Machine) -> Verdict:
    """Does a process started on the null device really see it, and nothing else?"""
    target = load_target(preset_names()[0])
    try:
        verify(null_environment(target, machine.environment, integer_ops=False))
    except NullDeviceBroken as error:
        startless = isinstance(error.__cause__, OSError)
        return fail(str(error), "give this user an interpreter it may run" if startless else REINSTALL)
    return ok(f"self-test passed ({target.name})")


def job_runner(machine: Machine, program: Path = JOB_RUNNER) -> Verdict:
    """Is the program there that every compile runs under?"""
    if not exists(program):
        return fail(f"{program} was not built", REINSTALL)
    if not os.access(program, os.X_OK):
        return fail(
            f"{program} is not executable", "chmod a+rx it; a file system mounted noexec forbids it too"
        )
    return ok(str(program))


def cores(machine: Machine) -> Verdict:
    """How many compiles may run at a time?"""
    usable, all_cores = usable_cores(), os.cpu_count() or 1
    found = f"{usable} usable of {all_cores}"
    return ok(found if usable == all_cores else f"{found} (affinity or control group)")


def gpu(machine: Machine, probe: Callable[[], Target] = probe_target) -> Verdict:
    """Is there a device that can say what it is?"""
    if machine.environment.get(config.NULL_VARIABLE) == "1":
        return ok("this process runs on the null device")
    try:
        target = probe()
    except TargetError as error:
        reason = str(error).partition("; ")[0]  # what follows is advice, ours is below
        return missing(f"none: {reason}", "none is needed: name the device with --target")
    return ok(f"{target.name}, sm_{target.capability}, {target.sm_count} SMs")


def settings(machine: Machine) -> Verdict:
    """Which settings are in effect?"""
    try:
        effective = load_settings(machine.environment)
    except ConfigError as error:
        return fail(str(error), "correct or remove it")
    changed = [
        f"{name}={value}"
        for name, value in msgspec.structs.asdict(effective).items()
        if value != getattr(Settings(), name)
    ]
    return ok(", ".join(changed) or "all at their defaults")


def variables(machine: Machine) -> Verdict:
    """Is every PREFETCHD_ variable one that somebody reads?"""
    known = known_variables()
    unknown = sorted(name for name in machine.environment if name.startswith(PREFIX) and name not in known)
    if not unknown:
        return ok("no unknown PREFETCHD_ variable")
    return warn(f"unknown: {', '.join(unknown)}", "; ".join(_hint(name, known) for name in unknown))


def known_variables() -> frozenset[str]:
    """Every variable that config declares: one a setting, and those prefetchd passes to its own processes."""
    of_settings = {PREFIX + field.upper() for field in Settings.__struct_fields__}
    internal = {value for name, value in vars(config).items() if name.endswith("_VARIABLE")}
    return frozenset(of_settings | internal)


def _hint(name: str, known: frozenset[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"{name} has no effect; did you mean {close[0]}?" if close else f"{name} has no effect: unset it"
