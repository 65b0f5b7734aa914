"""Finds the real nvcc, the one the engine's library would start, and says plainly when there is none.

Which nvcc is found decides keys: its `--version` text enters every one of them. So the search follows the
library's own order, and a variable that names a missing program is an error, not a reason to look further:
the engine would fail with it too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.config import REAL_NVCC_VARIABLE
from prefetchd.jobs import compile_environment

# Started in nvcc's place while tracing; what it does is written at its top.
STAND_IN = Path(__file__).parent / "nvcc_stand_in.sh"
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
# `nvcc --version` takes milliseconds; a wrapper on a dead network mount would block for ever.
VERSION_TIMEOUT_S = 30.0

_RELEASE = re.compile(r"release (\d+)\.(\d+)")


class Nvcc(msgspec.Struct, frozen=True):
    """One nvcc: where it lies, the text by which it names itself, and the release read from that text."""

    path: Path
    version_text: str
    release: tuple[int, int]


def find_nvcc(
    environment: Mapping[str, str], *, minimum: tuple[int, int], compiler_variables: tuple[str, ...]
) -> Nvcc:
    """The nvcc that the library would start. Raises `CompilerUnavailable` for none, a broken or an old one.

    `compiler_variables` are the library's own, by which a user names the compiler.
    """
    path, origin = locate_nvcc(environment, compiler_variables)
    text = _version_text(path, origin, environment)
    match = _RELEASE.search(text)
    if match is None:
        raise CompilerUnavailable(
            f"{path} ({origin}) names no release in its --version text: {text.strip()!r}"
        )
    release = (int(match[1]), int(match[2]))
    if release < minimum:
        raise CompilerUnavailable(
            f"{path} ({origin}) is nvcc {release[0]}.{release[1]}; the installed deep_gemm needs "
            f"{minimum[0]}.{minimum[1]} or newer. Install one and set CUDA_HOME or {REAL_NVCC_VARIABLE} to it"
        )
    return Nvcc(path=path, version_text=text, release=release)


def locate_nvcc(environment: Mapping[str, str], compiler_variables: tuple[str, ...]) -> tuple[Path, str]:
    """Where the nvcc lies and what led there, without running it. Raises `CompilerUnavailable`."""
    for variable in (REAL_NVCC_VARIABLE, *compiler_variables):
        value = environment.get(variable, "")
        # A process that is being traced sees our stand-in under the library's variable.
        if value and not is_stand_in(Path(value)):
            return _executable(Path(value), variable), variable
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := environment.get(variable, ""):
            return _executable(Path(home) / "bin/nvcc", variable), variable
    if found := shutil.which("nvcc", path=environment.get("PATH", "")):
        return Path(found).absolute(), "PATH"
    default = DEFAULT_CUDA_HOME / "bin/nvcc"
    if os.access(default, os.X_OK):
        return default, "default"
    raise CompilerUnavailable(
        f"no nvcc was found: {', '.join((REAL_NVCC_VARIABLE, *compiler_variables))}, CUDA_HOME and CUDA_PATH "
        f"are unset, none is on PATH, and {default} does not exist. "
        "Install a CUDA compiler and set CUDA_HOME to its directory"
    )


def is_stand_in(path: Path) -> bool:
    """Whether this is the stand-in, by whatever link."""
    return path.exists() and path.samefile(STAND_IN)


def _executable(path: Path, variable: str) -> Path:
    path = path.absolute()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise CompilerUnavailable(
            f"{variable} leads to {path}, which is not an executable file. "
            f"Set {variable} to an installed CUDA compiler, or unset it to search further"
        )
    return path


def _version_text(path: Path, origin: str, environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            [path, "--version"], env=compile_environment(environment, Path("/tmp")), capture_output=True,
            text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=VERSION_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerUnavailable(f"{path} ({origin}) does not answer --version: {error}") from error
    return done.stdout
