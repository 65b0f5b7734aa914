"""Starts programs on the null device.

Everything is in the child's environment, because the dynamic linker reads it before the first line of the
program runs; a process that is already up cannot be moved. The program is started only after a small child
under the very same environment has proved that the null device is what it would get (guard.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from prefetchd.config import NULL_INTEGER_OPS_VARIABLE, NULL_TARGET_VARIABLE, NULL_VARIABLE
from prefetchd.null_device import guard
from prefetchd.null_device.guard import NullDeviceBroken
from prefetchd.targets import Target, TargetError

SITE = Path(__file__).resolve().parent / "site"

# Timings taken on the null device are made up, and a real engine believes what it finds in its cache: no
# library may keep any. site/sitecustomize.py closes the same doors inside Python, where a program asks for
# it explicitly.
KEEP_NO_TIMINGS = {
    "TRITON_CACHE_AUTOTUNING": "0",
    "FLA_CACHE_RESULTS": "0",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
    # Inductor's graphs hold decisions that it benchmarked (padding, the kernel of a matrix product).
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}
# The probe starts one Python and opens two libraries; on a loaded machine that is below a second.
PROBE_TIMEOUT_S = 30
# As the shell has it.
COMMAND_NOT_FOUND = 127
COMMAND_REFUSED = 126


def to_environment(target: Target) -> str:
    """The target as the C side reads it. Raises `TargetError` for a name that the form cannot carry."""
    if (
        not target.name.isprintable()
        or set(target.name) & set(";=")
        or not 0 < len(target.name.encode()) < 96
    ):
        raise TargetError(
            f"name = {target.name!r} cannot be given to the null device: use 1 to 95 bytes without "
            "';' and '='"
        )
    return ";".join(f"{field}={getattr(target, field)}" for field in Target.__struct_fields__)


def environment(target: Target, base: Mapping[str, str], *, integer_ops: bool = False) -> dict[str, str]:
    """`base` with what puts a child on the null device. Raises `NullDeviceBroken` if that is not built."""
    _require_built()
    child = dict(base)
    child["LD_PRELOAD"] = _in_front(guard.CUDA, base.get("LD_PRELOAD", "").replace(" ", ":"))
    child["LD_LIBRARY_PATH"] = _in_front(guard.LIBRARIES, base.get("LD_LIBRARY_PATH", ""))
    child["PYTHONPATH"] = _in_front(SITE, base.get("PYTHONPATH", ""))
    # An empty value would hide the device: torch parses the variable itself.
    child["CUDA_VISIBLE_DEVICES"] = "0"
    child[NULL_VARIABLE] = "1"
    child[NULL_TARGET_VARIABLE] = to_environment(target)
    if integer_ops:
        child[NULL_INTEGER_OPS_VARIABLE] = "1"
    child.update(KEEP_NO_TIMINGS)
    return child


def _in_front(ours: Path, existing: str) -> str:
    """A colon-separated list that begins with ours and keeps the rest; started twice, it does not grow."""
    return ":".join([str(ours), *(entry for entry in existing.split(":") if entry and entry != str(ours))])


def _require_built() -> None:
    for library in (guard.CUDA, guard.NVML):
        if not library.is_file():
            raise NullDeviceBroken(
                f"the null device is not built: {library} is missing. It is compiled when prefetchd is "
                "installed: run `pip install .` with gcc or clang present (in a checkout: "
                "`python setup.py build_ext --inplace`)"
            )
    if set(str(guard.CUDA)) & set(": "):
        raise NullDeviceBroken(
            f"the null device lies at {str(guard.CUDA)!r}, and the dynamic linker splits LD_PRELOAD at "
            "blanks and colons; install prefetchd in a directory without them"
        )


def verify(environment: Mapping[str, str]) -> None:
    """Raises `NullDeviceBroken` unless a child under this environment gets the null device and no other."""
    # -I -S: neither the child's packages nor its sitecustomize take part, and it starts in 20 ms.
    command = [sys.executable, "-I", "-S", guard.__file__]
    try:
        probe = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NullDeviceBroken(
            f"the probe of the null device did not end within {PROBE_TIMEOUT_S} s"
        ) from None
    except OSError as error:
        raise NullDeviceBroken(
            f"the probe of the null device cannot be started: {sys.executable!r}: {error.strerror}; run "
            "prefetchd with an interpreter that this user may run"
        ) from error
    if probe.returncode:
        reason = probe.stdout.strip() or f"the probe ended with status {probe.returncode}"
        raise NullDeviceBroken("\n".join(filter(None, (reason, probe.stderr.strip()))))


def run_on_null_device(target: Target, argv: Sequence[str], *, integer_ops: bool = False) -> NoReturn:
    """Becomes the program, on the null device: its exit status, output and signals are the program's own.

    Raises `NullDeviceBroken` and `TargetError` before anything is started; a command that is not there exits
    with status 127, one that the kernel does not start with 126.
    """
    child = environment(target, os.environ, integer_ops=integer_ops)
    if shutil.which(argv[0], path=child.get("PATH")) is None:
        print(f"prefetchd null: {argv[0]}: command not found or not executable", file=sys.stderr)
        sys.exit(COMMAND_NOT_FOUND)
    verify(child)
    # Python ignores these two, and what is ignored stays so across exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), child)
    except OSError as error:
        # A script without a first line that names its interpreter, or one that names a missing one.
        print(f"prefetchd null: {argv[0]}: cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(COMMAND_REFUSED)
