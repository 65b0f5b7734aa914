"""What `bake` tells the engine's processes, and what each of them answers, as files in one directory.

The engine is somebody else's program with any number of processes; a directory named in its environment is
the one thing all of them share. An answer appears whole or not at all: a process that dies leaves none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.base import Job
from prefetchd.config import BAKE_VARIABLE
from prefetchd.targets import Target
from prefetchd.winners import Tuning

ORDER, ANSWERS = "order.json", "answers"


class Phase(StrEnum):
    """Capture: every variant is named, none compiled. Prove: every variant is loaded, or the engine ends."""

    CAPTURE = "capture"
    PROVE = "prove"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the engine."""

    phase: Phase
    target: Target
    compilers: tuple[str, ...]
    # Prompt lengths, batch by batch; a batch's prompts are scheduled together.
    batches: tuple[tuple[int, ...], ...]
    # Tokens that each request is given before it ends.
    steps: int
    # The environment of the engine that will be served: where its libraries look for kernels.
    environment: dict[str, str]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of the engine found out. Missed are variants that were asked for and not there."""

    pid: int
    rank: int = 0
    captured: tuple[Job, ...] = ()
    missed: tuple[Job, ...] = ()
    tunings: tuple[Tuning, ...] = ()
    fingerprints: dict[str, dict[str, str]] = {}
    notes: tuple[str, ...] = ()
    # Of a process that schedules: how many of its kind the engine has.
    schedulers: int = 0
    # What was served: how many batches were brought to their end, by how many steps of the scheduler.
    batches: int = 0
    scheduler_steps: int = 0
    # Whether every batch is through; the engine may be ended then.
    done: bool = False


def write_order(directory: Path, order: Order) -> None:
    """To be read by processes started afterwards."""
    (directory / ANSWERS).mkdir(parents=True, exist_ok=True)
    (directory / ORDER).write_bytes(msgspec.json.encode(order))


def read_order(environment: Mapping[str, str]) -> tuple[Path, Order] | None:
    """The order this process stands under, None where nobody bakes."""
    named = environment.get(BAKE_VARIABLE)
    if not named:
        return None
    directory = Path(named)
    return directory, msgspec.json.decode((directory / ORDER).read_bytes(), type=Order)


def write_answer(directory: Path, name: str, answer: Answer) -> None:
    """In one step, under a name of the process's own; a later answer of the same name takes its place."""
    final = directory / ANSWERS / f"{name}.{answer.pid}.json"
    temporary = final.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.encode(answer))
    temporary.replace(final)


def read_answers(directory: Path) -> list[Answer]:
    """All that are there now."""
    return [
        msgspec.json.decode(path.read_bytes(), type=Answer)
        for path in sorted((directory / ANSWERS).glob("*.json"))
    ]


def answer_fields(answers: list[Answer], field: str) -> list[Any]:
    """One field of all answers, each value once."""
    found: dict[Any, Any] = {}
    for answer in answers:
        for value in getattr(answer, field):
            found.setdefault((value.compiler, value.key) if isinstance(value, Job) else value, value)
    return list(found.values())
