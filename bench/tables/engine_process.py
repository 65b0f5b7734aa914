"""Starting an engine of a table in a process of its own, on the real device or, to try a script, on none.

With a `null` target the same program runs on the null device: every part of a script can be tried without a
GPU, but no kernel runs, so its times mean nothing and its runs are marked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from prefetchd.targets import TargetError, probe_target

BENCH = Path(__file__).parents[1]
# Nothing here takes longer; an engine that does hangs.
LIMIT_S = 1800.0


class EngineFailed(Exception):
    """The engine's process did not end well; the text has the end of what it said."""


def need_gpu(null: str) -> None:
    """Ends the program with status 2, before anything is prepared, where its engines would find no GPU."""
    if null:
        return
    try:
        probe_target()
    except TargetError as error:
        reason = str(error).partition(";")[0]
        print(f"needs a real GPU: {reason}; --null h200 tries the script without one", file=sys.stderr)
        sys.exit(2)


def start_engine(
    module: str, *arguments: object, variables: Mapping[str, str], log: Path, null: str = ""
) -> subprocess.Popen[bytes]:
    """Starts `python -m module arguments`."""
    path = [str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    if null:
        command = [
            sys.executable,
            "-m",
            "prefetchd",
            "null",
            "--target",
            null,
            "--integer-ops",
            "--",
            *command,
        ]
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


def wait_for_engine(engine: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when it has ended well. Raises `EngineFailed`."""
    try:
        status = engine.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        engine.kill()
        raise EngineFailed(f"the engine did not end within {LIMIT_S:.0f} s: {tail(log)}") from None
    if status:
        raise EngineFailed(f"the engine ended with status {status}: {tail(log)}")


def tail(log: Path) -> str:
    """The end of a log, for people."""
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""


def holders_of_gpu(pids: list[int]) -> list[int]:
    """Those of these processes that have opened an NVIDIA device."""
    found = []
    for pid in pids:
        try:
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        if any(link.startswith("/dev/nvidia") for link in links):
            found.append(pid)
    return found
