"""The variables by which libraries start nvcc's stand-in instead of nvcc, and the stand-in the real one.

Which nvcc is the real one decides keys, so it is what the library would have started: the user's own choice,
else CUDA's home, else the one on PATH. The subtle rule: where none can be told for certain nothing is set,
and the library finds its nvcc, or complains of having none, as it would without us.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.compilers.deep_jit import LAYOUTS
from prefetchd.compilers.nvcc import STAND_IN, is_stand_in, locate_nvcc
from prefetchd.config import REAL_NVCC_VARIABLE, STAND_IN_MODE_VARIABLE

NVRTC_VARIABLE = "DG_JIT_USE_NVRTC"
OBSERVE = "observe"
# Every name under which a line of the library takes its compiler; the first is set.
COMPILER_VARIABLES = tuple(
    dict.fromkeys(name for layout in LAYOUTS.values() for name in layout.compiler_variables)
)
# The library puts the path into a shell's command without quotes.
_SHELL_SAFE = re.compile(r"[\w./+,@%=-]+")


class NotObservable(Exception):
    """nvcc's stand-in cannot take its place here; the text says why and what to do."""


def uses_nvrtc(environment: Mapping[str, str]) -> bool:
    """Whether the library compiles in itself."""
    return environment.get(NVRTC_VARIABLE, "").lower() not in ("", "0", "false", "no")


def stand_in_variables(environment: Mapping[str, str], others: tuple[str, ...] = ()) -> dict[str, str]:
    """What to set, `others` among it where unset. Raises `NotObservable`."""
    if not _SHELL_SAFE.fullmatch(str(STAND_IN)):
        raise NotObservable(
            f"deep_gemm cannot start {STAND_IN}, whose path a shell would split; install prefetchd elsewhere"
        )
    try:
        real, _ = locate_nvcc(environment, COMPILER_VARIABLES)
    except CompilerUnavailable as error:
        raise NotObservable(str(error)) from error
    found = {REAL_NVCC_VARIABLE: str(real), STAND_IN_MODE_VARIABLE: OBSERVE}
    if not any(is_stand_in(Path(environment[name])) for name in COMPILER_VARIABLES if environment.get(name)):
        # Of those that are set the library reads the first; a user's choice runs behind the stand-in.
        found[next((name for name in COMPILER_VARIABLES if name in environment), COMPILER_VARIABLES[0])] = (
            str(STAND_IN)
        )
    return found | {name: str(STAND_IN) for name in others if not environment.get(name)}
