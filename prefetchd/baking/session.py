"""In a process of the engine that launches kernels: from here on its variants are named, or only loaded.

Entered before the process uses a kernel library. It is the same capture and the same ban on compiling by
which single requests are traced and proved; here they last as long as the engine. The subtle rule: what an
engine compiles in threads of its own is out of reach, so its own warm-up must run in one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from prefetchd.baking.order import Answer, Order, Phase, write_answer
from prefetchd.compilers import load_compiler
from prefetchd.compilers.base import (
    Capture,
    Compiler,
    CompilerUnavailable,
    NamingCompiler,
    TunedCompiler,
    TuningCapture,
)
from prefetchd.null_device.guard import require_null_device
from prefetchd.winners import Given

NAME = "worker"


class Session:
    """One process's share of a bake."""

    def __init__(self, directory: Path, order: Order) -> None:
        self._directory, self._order = directory, order
        self._stack = contextlib.ExitStack()
        self._captures: list[Capture] = []
        self._compilers: list[Compiler] = []
        self._notes: list[str] = []

    def enter(self) -> None:
        """Raises `NullDeviceBroken` where a real device could be reached: nothing is captured beside one."""
        require_null_device()
        # Below the private directory, which is removed as a whole.
        scratch = Path(tempfile.mkdtemp(prefix=f"scratch-{os.getpid()}-", dir=self._directory))
        for name in self._order.compilers:
            # Each with files of its own, since their names are the compilers' business.
            place = scratch / name
            place.mkdir()
            try:
                compiler = load_compiler(name, self._order.target, self._order.environment)
                if isinstance(compiler, TunedCompiler):
                    compiler.use_winners(Given())
                if isinstance(compiler, NamingCompiler):
                    compiler.leave_unnamed()
                compiler.prepare(place)
                block = compiler.capture if self._order.phase is Phase.CAPTURE else compiler.forbid
                self._captures.append(self._stack.enter_context(block(place)))
                self._compilers.append(compiler)
            except CompilerUnavailable as error:
                self._notes.append(f"{name}: {error}")

    def answer(self, rank: int, *, done: bool) -> None:
        """Writes what was found so far."""
        jobs = tuple(job for capture in self._captures for job in capture.jobs())
        captured = self._order.phase is Phase.CAPTURE
        write_answer(
            self._directory,
            NAME,
            Answer(
                pid=os.getpid(),
                rank=rank,
                captured=jobs if captured else (),
                missed=() if captured else jobs,
                tunings=tuple(
                    tuning
                    for capture in self._captures
                    if isinstance(capture, TuningCapture)
                    for tuning in capture.tunings()
                ),
                fingerprints={compiler.name: dict(compiler.fingerprint()) for compiler in self._compilers},
                notes=(*self._notes, *self._unnamed()),
                done=done,
            ),
        )

    def _unnamed(self) -> list[str]:
        naming = [compiler for compiler in self._compilers if isinstance(compiler, NamingCompiler)]
        return [note for compiler in naming for note in compiler.notes()]
