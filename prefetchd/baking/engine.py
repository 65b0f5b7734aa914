"""One start of a command under an order: until its batches are through, then it is ended.

The command is whatever a user serves with, so nothing is asked of it but the answers its processes leave. It
runs in a session of its own, and whatever happens here, none of its processes is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefetchd.baking.order import Answer, read_answers

# Answers are looked for so often; a start takes minutes.
POLL_S = 0.2
# An engine that is asked to end has until then.
ENDING_S = 30.0
# What is shown of the log of an engine that failed.
LAST_LINES, LONGEST_LINE = 15, 400
NOT_DRIVEN = "; is it an engine that can be driven (vLLM), with prefetchd installed in its environment?"


class EngineFailed(Exception):
    """The engine ended, or hung, before its batches were through; the text has its last words."""


async def run_engine(
    command: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path, timeout_s: float
) -> list[Answer]:
    """The answers of all its processes. Raises `EngineFailed`; cancelling it ends the engine."""
    with log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineFailed(f"{command[0]}: {error.strerror}; name a command that can be run") from error
    try:
        async with asyncio.timeout(timeout_s):
            while not through(read_answers(directory)):
                if process.returncode is not None:
                    raise EngineFailed(
                        f"{command[0]} ended with status {process.returncode} before its batches were "
                        f"through{'' if process.returncode else NOT_DRIVEN}{last_words(log)}"
                    )
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise EngineFailed(
            f"{command[0]}: its batches were not through after {timeout_s:.0f} s; give --timeout more, or "
            f"see what it waits for{last_words(log)}"
        ) from None
    finally:
        await _end(process)
    return read_answers(directory)


def through(answers: Sequence[Answer]) -> bool:
    """Whether every scheduler of the engine has served its batches; their workers have answered by then."""
    cores = [answer for answer in answers if answer.schedulers]
    return bool(cores) and len(cores) >= cores[0].schedulers and all(answer.done for answer in cores)


def last_words(log: Path) -> str:
    """The end of a log, for people, as the end of a message; nothing where the log is empty."""
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    text = "".join(f"\n{line[:LONGEST_LINE]}" for line in lines)
    return text and f":{text}"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Asks the command to end, then ends all of its session."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
