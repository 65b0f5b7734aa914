"""What a doctor's check is given and what it answers.

A check must be testable for machines nobody has at hand: no nvcc, an NFS home, a user without a name. So it
never reads the process it runs in; everything it may look at comes in a `Machine`, and paths in it may lie in
a temporary directory. The one subtle rule: a package is found and measured by its files, never imported,
because importing torch costs seconds and may take a GPU.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Literal

import msgspec
import psutil  # type: ignore[import-untyped]

from prefetchd.jobs import compile_environment

State = Literal["ok", "warn", "fail", "missing"]

# A compiler answers its version in 10 ms, over a slow network disk in a second; later than this it hangs.
PROGRAM_TIMEOUT_S = 5.0


class Check(msgspec.Struct, frozen=True):
    """One line of the findings. `missing` is fine unless something needs it; `warn` works, but read it."""

    name: str
    state: State
    found: str
    advice: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """A check's answer, before it is given its name."""

    state: State
    found: str
    advice: str = ""


class Mount(msgspec.Struct, frozen=True):
    """One mounted file system: where, and its type as the kernel spells it."""

    point: str
    kind: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the checks may look at.

    `user` and `passwd_home` are None for a user id without a passwd entry.
    """

    environment: Mapping[str, str]
    packages: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    uid: int = 0
    user: str | None = None
    passwd_home: str | None = None

    def which(self, program: str) -> str | None:
        """The program a shell with this environment would start; None if there is none."""
        # An empty string would make shutil.which fall back on this process's own PATH.
        return shutil.which(program, path=self.environment.get("PATH") or os.defpath)

    def version(self, distribution: str) -> str | None:
        """The installed version of a distribution, None if it is not installed."""
        found = self.distribution(distribution)
        return found.version if found else None

    def distribution(self, name: str) -> Distribution | None:
        """The metadata of the installed distribution that an import would use."""
        return next(iter(Distribution.discover(name=name, path=list(self.packages))), None)

    def package(self, name: str) -> Path | None:
        """The directory of a top-level package, found without importing it."""
        places = (Path(root) / name for root in self.packages)
        return next((place for place in places if exists(place / "__init__.py")), None)

    def run(self, *command: str) -> str:
        """What a program prints in the environment of a compile. Raises `ProgramFailed` if it fails."""
        try:
            done = subprocess.run(
                command,
                env=compile_environment(self.environment, Path(tempfile.gettempdir())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=PROGRAM_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ProgramFailed(f"{command[0]} gave no answer within {PROGRAM_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise ProgramFailed(f"{command[0]} cannot be started: {error.strerror}") from error
        output = done.stdout.decode(errors="replace")
        if done.returncode != 0:
            raise ProgramFailed(f"{command[0]} ended with status {done.returncode}: {_ending(output)}")
        return output


class ProgramFailed(Exception):
    """A program could not be run to its end; the text says which and how it ended."""


def this_machine(environment: Mapping[str, str]) -> Machine:
    """The machine this process runs on, under the given environment."""
    uid = os.getuid()
    entry = _passwd_entry(uid)
    return Machine(
        environment=environment,
        packages=tuple(sys.path),
        mounts=_mounts(),
        uid=uid,
        user=entry.pw_name if entry else None,
        passwd_home=entry.pw_dir if entry else None,
    )


def ok(found: str) -> Verdict:
    """Right as it is."""
    return Verdict("ok", found)


def warn(found: str, advice: str) -> Verdict:
    """Works, but the reader should know."""
    return Verdict("warn", found, advice)


def fail(found: str, advice: str) -> Verdict:
    """Installed or configured, and will not work."""
    return Verdict("fail", found, advice)


def missing(found: str, advice: str = "") -> Verdict:
    """Not there; only a user who wants it has to do something."""
    return Verdict("missing", found, advice)


def problem_and_fix(error: Exception, fix: str) -> tuple[str, str]:
    """An error's text parted into what is wrong and what to do; `fix` stands in where it names none."""
    problem, _, advice = str(error).partition(". ")
    return problem, advice or fix


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing: `2.14.1+cu130` is (2, 14, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def exists(path: Path) -> bool:
    """As `Path.exists`, and False for a place this user may not look into."""
    try:
        return path.exists()
    except OSError:
        return False


def _mounts() -> tuple[Mount, ...]:
    """Empty where /proc is hidden; the kind of file system is then reported as unknown."""
    try:
        return tuple(Mount(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True))
    except OSError:
        return ()


def _passwd_entry(uid: int) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return None


def _ending(output: str) -> str:
    """The last lines: a compiler's driver says that it failed, the line before it says why."""
    lines = output.strip().splitlines()
    return " / ".join(lines[-3:]) or "no output"
