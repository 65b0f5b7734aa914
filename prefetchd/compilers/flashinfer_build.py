"""Builds one module of FlashInfer's in a staging directory, and moves what was built to where it is used.

The library's generator is called again and must describe the very module that was named; then ninja runs
what it wrote, in an environment without the null device. The subtle rule: commands and logs name absolute
paths, so a finished directory is rewritten for its final place (`ninja_logs`), and the sources that the
generator wrote go there before it, never over existing ones. No input may be younger than the outputs: all of
these get one time, taken when the sources are in place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.compilers.flashinfer_calls import Module, generate
from prefetchd.compilers.flashinfer_specs import elsewhere, embeds, library_directories, made, module_of
from prefetchd.compilers.ninja_logs import MANIFEST, inputs_of, relocate
from prefetchd.cores import usable_cores
from prefetchd.cute.calls import Undescribable
from prefetchd.jobs import SHELL_SIGNAL_BASE, compile_environment
from prefetchd.null_device import guard

JOBS_VARIABLE = "MAX_JOBS"
GENERATED = "generated"
# How far a library lies below the cache directory, and far more than the library's longest build file.
BELOW_ROOT = 4
MAX_MANIFEST_BYTES = 16 << 20
# Ninja itself, or by its newer releases a command.
KILLED = (-signal.SIGKILL, SHELL_SIGNAL_BASE + signal.SIGKILL)


def describe_again(module: Module, root: Path) -> Path:
    """Has the library write build file and generated sources below `root`; where the module will lie there.

    Raises `CompilerUnavailable` where it does not describe the module that was named.
    """
    if module.call is None:
        raise CompilerUnavailable(f"{module.key}: {module.refused}")
    own, _ = library_directories()
    with elsewhere(root), made() as specs:
        try:
            generate(module.call)
        except (Undescribable, ImportError, TypeError) as error:
            raise CompilerUnavailable(f"{module.key}: it cannot be described again: {error}") from error
        keys = [module_of(spec, own).key for spec in specs if not embeds(spec)]
        if module.key not in keys:
            raise CompilerUnavailable(
                f"the engine builds {module.key}; the same call describes {', '.join(keys) or 'none'} here: "
                "this is another FlashInfer, compiler or environment than the engine's"
            )
        spec = specs[keys.index(module.key)]
        spec.write_ninja()
        return Path(spec.build_dir)


def build(ninja: str, directory: Path) -> None:
    """Raises `subprocess.CalledProcessError` where a command failed; what it said was printed.

    A process whose ninja, or a command of it, is killed ends so too: that is no fault of the sources.
    """
    ended = subprocess.run(
        [ninja, "-C", str(directory), "-f", str(directory / MANIFEST), "-j", str(parallel(os.environ))],
        env=build_environment(os.environ), check=False,
    )  # fmt: skip
    if ended.returncode in KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    ended.check_returncode()


def build_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A compile's, in which the linker finds a driver's library on a machine that has none."""
    found = compile_environment(environment, Path(environment.get("TMPDIR", "/tmp")))
    # Last: where there is a real one, or a stub of it, that is taken.
    found["LIBRARY_PATH"] = ":".join(filter(None, (found.get("LIBRARY_PATH"), str(guard.LIBRARIES))))
    return found


def parallel(environment: Mapping[str, str]) -> int:
    """Commands of one build at once: as the user tells the library, else a share of the machine."""
    named = environment.get(JOBS_VARIABLE, "")
    return int(named) if named.isdecimal() and int(named) else max(1, usable_cores() // 4)


def move_sources(directory: Path, old: Path, new: Path) -> bool:
    """The sources generated for a build, from one cache directory to another; False if others are there.

    One that is there already with the same content stays, with its time. Raises `OSError`, `UnknownNinja`.
    """
    for number, source in enumerate(generated_sources(directory, old)):
        final = new / source.relative_to(old)
        final.parent.mkdir(parents=True, exist_ok=True)
        # Beside the build: what a killed process leaves there is removed by the next start.
        staged = directory.with_name(f"source-{number}")
        shutil.copy2(source, staged)
        with contextlib.suppress(FileExistsError):
            os.link(staged, final)
        if final.read_bytes() != source.read_bytes():
            return False
    return True


def generated_sources(directory: Path, root: Path) -> list[Path]:
    """Files that a finished build has read and the library's generators have written below `root`."""
    prefix = f"{root}/"
    return [
        path
        for path in map(Path, inputs_of(directory))
        if str(path).startswith(prefix) and _is_generated(path.relative_to(root).parts)
    ]


def _is_generated(below: tuple[str, ...]) -> bool:
    # The log of headers is in no digest: a path in it may lead anywhere.
    return below[2:3] == (GENERATED,) and ".." not in below


def manifest_in(directory: Path) -> str:
    """The text of a build file. Raises `OSError`, and `ValueError` for what is none."""
    path = directory / MANIFEST
    status = path.stat()
    # Reading a pipe would wait for its writer.
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
        raise ValueError(f"{path} is no build file")
    return path.read_text()


def root_of(directory: Path) -> Path:
    """The cache directory that a build was made for, from its own text. Raises `ValueError` for none."""
    for line in manifest_in(directory).splitlines():
        # version/architectures/cached_ops/module/library
        above = Path(line.removeprefix("default ")).parents if line.startswith("default /") else ()
        if len(above) > BELOW_ROOT:
            return above[BELOW_ROOT]
    raise ValueError(f"{directory / MANIFEST} names no library")


def settle(ninja: str, directory: Path, old: Path, new: Path, environment: Mapping[str, str]) -> None:
    """Makes a finished directory one for its final place. Raises `UnknownNinja`, `OSError`."""
    relocate(ninja, directory, build_environment(environment), str(old), str(new), time.time_ns())
