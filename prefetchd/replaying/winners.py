"""Winners that engines have measured, given to the next engine though nothing was traced.

A tuner's result file has a name that only the library can compute, from its own tuner object. Where a request
was traced, the trace has told it. A log without requests still holds the winners, and a winner names its
kernel; so a process on the null device imports the kernels' modules and asks their tuners (`tunings.py`).
Files are written here, by a process that measures nothing, and only for the GPU model of the measurement.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from prefetchd.compilers.base import Job
from prefetchd.compilers.triton import payload_of
from prefetchd.compilers.triton_results import Answers, given_for
from prefetchd.compilers.triton_rivals import Answered, rivals
from prefetchd.coverage import Ledger, WinnerFigures
from prefetchd.null_device import launcher
from prefetchd.replaying.selection import KeyId
from prefetchd.replaying.tunings import Answer, Question
from prefetchd.shapelog.reading import WINNERS_NAME
from prefetchd.store import Staging
from prefetchd.targets import Target
from prefetchd.tracer import private_root
from prefetchd.tuned import TuningBooks
from prefetchd.winners import Tuning, Winner, WinnersUnreadable, merge, read_winners

COMPILER = "triton"
# Importing torch and kernel libraries takes 3-10 s here, and ten times that from a cold network disk.
TIME_LIMIT_S = 180.0
# A model has some hundred tunings.
MAX_WINNERS = 10_000
# As tuned kernels that were not traced are called in the account of them.
RECORDED = "recorded"
TAIL_CHARACTERS = 500


class Seeded(msgspec.Struct, kw_only=True):
    """What became of the winners, with remarks for people."""

    figures: WinnerFigures | None = None
    notes: list[str] = []


def winners_beside(logs: Iterable[Path], notes: list[str]) -> tuple[Winner, ...]:
    """The winners in the directories of these logs; lines and files that are none become notes."""
    found: list[Winner] = []
    for directory in dict.fromkeys(path if path.is_dir() else path.parent for path in logs):
        path = directory / WINNERS_NAME
        if path.is_file():
            try:
                winners, problems = read_winners(path)
            except WinnersUnreadable as error:
                notes.append(str(error))
                continue
            found += winners
            notes += problems
    return tuple(merge(found))


def valid_on(winners: Iterable[Winner], target: Target) -> list[Winner]:
    """Those that were measured on this GPU model."""
    return [each for each in winners if (each.gpu, each.sm_count) == (target.name, target.sm_count)]


async def tunings_of(
    winners: Sequence[Winner],
    met: Sequence[Tuning],
    target: Target,
    environment: Mapping[str, str],
    *,
    interpreter: str = sys.executable,
) -> Answer:
    """The tunings that traces have `met`, and those that the other winners' tuners tell.

    Raises `HelperFailed` where no temporary files can be kept.
    """
    known = {_question(each) for each in met}
    valid = valid_on(winners, target)[:MAX_WINNERS]
    unmet = [each for each in valid if _question(each) not in known]
    answer = await _ask(unmet, target, environment, interpreter) if unmet else Answer()
    return msgspec.structs.replace(answer, tunings=[*met, *answer.tunings])


def without_rivals(
    jobs: Mapping[KeyId, Job],
    tunings: Iterable[Tuning],
    winners: Sequence[Winner],
    target: Target,
    environment: Mapping[str, str],
    roots: Iterable[Path],
) -> dict[KeyId, Job]:
    """The jobs, but for candidates that no engine compiles which finds the winners of these tunings.

    Each of the roots must be one that `seed` is given.
    """
    given = given_for(environment, tuple(winners) or None)
    answers = [Answers(given, target, root) for root in roots]
    answered = []
    for tuning in tunings:
        chosen = {each.choose(tuning) for each in answers}
        if len(chosen) == 1 and (index := chosen.pop()) is not None:
            answered.append(Answered(tuning, index))
    variants = {job.key: payload_of(job) for job in jobs.values() if job.compiler == COMPILER}
    left_out = {(COMPILER, key) for key in rivals(variants, answered)} if answered else set()
    return {identity: job for identity, job in jobs.items() if identity not in left_out}


def seed(
    winners: Sequence[Winner],
    tunings: Sequence[Tuning],
    target: Target,
    environment: Mapping[str, str],
    roots: Iterable[Path],
) -> Seeded:
    """Writes what is known of these tunings into each of the cache roots. Raises `StoreUnwritable`."""
    seeded = Seeded()
    if not tunings:
        return seeded
    given = given_for(environment, tuple(winners) or None)
    for root in roots:
        ledger = Ledger(target.name, 0, dry_run=False)
        ledger.add_provider(RECORDED)
        books = TuningBooks(Answers(given, target, root), root, ledger)
        books.met(RECORDED, tunings)
        books.seed()
        books.close()
        seeded.figures = ledger.winners(RECORDED)
        seeded.notes += [note for note in ledger.coverage.notes if note not in seeded.notes]
    return seeded


def _question(of: Winner | Tuning) -> tuple[str, str, bytes]:
    return (of.module, of.kernel, msgspec.json.encode(of.key))


async def _ask(
    winners: list[Winner], target: Target, environment: Mapping[str, str], interpreter: str
) -> Answer:
    """The tunings that these winners answer. A process that fails costs the winners, and says so."""
    with Staging(private_root(), variable="TMPDIR") as staging:
        log = staging.directory / "tunings.log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                interpreter, "-P", "-m", "prefetchd.replaying.tunings",
                *("--parent", str(os.getpid()), "--scratch", str(staging.directory)),
                env=launcher.environment(target, environment, integer_ops=True),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        question = msgspec.msgpack.encode(Question(target=target, winners=winners))
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                data, _ = await process.communicate(question)
            return msgspec.msgpack.decode(data, type=Answer)
        except (TimeoutError, msgspec.MsgspecError):
            said = log.read_text(encoding="utf-8", errors="replace").strip()[-TAIL_CHARACTERS:]
            reason = said or f"it did not answer within {TIME_LIMIT_S:.0f} s"
            return Answer(
                notes=[f"{len(winners)} winners are not seeded, their tuners cannot be asked: {reason}"]
            )
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
