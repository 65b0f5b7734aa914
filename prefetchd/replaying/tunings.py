"""`python -m prefetchd.replaying.tunings`: asks the tuners of recorded kernels where they look for a result.

A process on the null device, since Triton's driver is needed and nothing of it may reach a GPU. It reads one
`Question` from standard input and writes one `Answer`; it launches, compiles, measures and writes nothing. A
winner's kernel is looked for in allowed packages only, as a record's is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.base import CompilerUnavailable, NotRebuildable
from prefetchd.null_device.guard import NullDeviceBroken, require_null_device
from prefetchd.parent_death import end_with_parent
from prefetchd.targets import Target
from prefetchd.winners import Tuning, Winner

# One reason may be about many winners; reasons beyond these say nothing new.
MAX_NOTES = 32


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """These winners' tunings, please."""

    target: Target
    winners: list[Winner]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The tunings found, and why others were not."""

    tunings: list[Tuning] = []
    notes: list[str] = []


class NoTuner(Exception):
    """A winner's tuner cannot be asked; the text says why."""


def tuning_of(winner: Winner, environment: dict[str, str]) -> Tuning:
    """The question that the winner answers. Raises `NoTuner`."""
    from prefetchd.compilers.triton_capture import Tuner
    from prefetchd.compilers.triton_winners import sighting

    tuner = _tuner(winner, environment)
    if tuner.early_config_prune is not None or tuner.perf_model is not None:
        raise NoTuner("its tuner picks candidates by the arguments of a call: warm, or trace its request")
    identity = Tuner(
        winner.module, winner.kernel, winner.source, bool(vars(tuner).get("cache_results")), tuner
    )
    found = sighting(identity, tuple(winner.key), tuner.configs)
    if found is None:
        raise NoTuner("its candidates cannot be written into a file")
    return found


def _tuner(winner: Winner, environment: dict[str, str]) -> Any:
    from triton.runtime.autotuner import Autotuner

    from prefetchd.compilers.triton_capture import jit_function
    from prefetchd.compilers.triton_records import check_dotted, check_module, named_within

    try:
        check_dotted("module", winner.module)
        check_dotted("kernel", winner.kernel)
        check_module("module", winner.module, environment)
        found: Any = named_within(winner.module, winner.kernel)
        function = jit_function(found)
        home = (function.fn.__module__, function.fn.__qualname__)
    except (NotRebuildable, CompilerUnavailable) as error:
        raise NoTuner(str(error)) from error
    except Exception as error:
        # Whatever a library raises when it is imported.
        raise NoTuner(f"its kernel is not found ({type(error).__name__}: {error})") from error
    if home != (winner.module, winner.kernel):
        raise NoTuner(f"its name leads to another kernel here, {'.'.join(home)}")
    while not isinstance(found, Autotuner):
        if found is function:
            raise NoTuner("its kernel has no tuner here")
        found = found.fn
    if function.cache_key != winner.source:
        raise NoTuner("its kernel has another source here: measure again")
    return found


def answer(question: Question, environment: dict[str, str]) -> Answer:
    """Every tuning that can be told, each once."""
    found: dict[tuple[str, ...], Tuning] = {}
    notes: Counter[str] = Counter()
    for winner in question.winners:
        try:
            tuning = tuning_of(winner, environment)
        except NoTuner as error:
            notes[f"{winner.module}.{winner.kernel}: its winner is not seeded: {error}"] += 1
        else:
            found.setdefault(tuning.identity, tuning)
    told = [f"{text} ({count} keys)" for text, count in notes.most_common(MAX_NOTES)]
    return Answer(tunings=list(found.values()), notes=told)


def main(argv: list[str] | None = None) -> int:
    """Exits 1 after saying on standard error why it cannot work."""
    from prefetchd.compilers.triton import Triton

    parser = argparse.ArgumentParser(prog="prefetchd.replaying.tunings")
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--scratch", required=True, type=Path)
    arguments = parser.parse_args(argv)
    end_with_parent(arguments.parent)
    # Libraries print; the answer alone goes where it is expected.
    output = os.dup(1)
    os.dup2(2, 1)
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question)
    environment = dict(os.environ)
    try:
        require_null_device()
        Triton(question.target, environment).prepare(arguments.scratch)
    except (CompilerUnavailable, NullDeviceBroken) as error:
        print(error, file=sys.stderr)
        return 1
    with os.fdopen(output, "wb") as stream:
        stream.write(msgspec.msgpack.encode(answer(question, environment)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
