"""Automatic replay: what the engines of this node have compiled themselves is compiled for the next ones.

Each new kind of engine (a group: target, interpreter, fingerprint) gets all that the daemon's own log
directory holds, of every rank, at replay priority; whoever joins the group later gets it too, and `/ready`
waits. The logs are read by a process of their own (`replaying/select.py`). The promise: no log, however large
or damaged, delays the daemon's sockets, takes its memory or ends it; the worst is that nothing is replayed,
with one line that says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.base import Job
from prefetchd.node.allow import directory_problem
from prefetchd.node.groups import Group, Replay
from prefetchd.node.state import Node
from prefetchd.plain_text import printable
from prefetchd.protocol import Sweep, decode_sweeps
from prefetchd.replaying import select
from prefetchd.replaying.select import Question, Selected
from prefetchd.replaying.selection import KeyId
from prefetchd.replaying.tunings import Answer
from prefetchd.replaying.winners import COMPILER, seed, tunings_of, winners_beside, without_rivals
from prefetchd.shapelog import LogUnusable, log_directory, log_files
from prefetchd.store import StoreUnwritable
from prefetchd.tracer import HelperFailed
from prefetchd.winners import Winner
from prefetchd.workplace import in_thread

log = logging.getLogger("prefetchd.daemon")

# Reading the most that is read takes 10 s, importing Triton 1 s, and ten times that on a slow machine.
TIME_LIMIT_S = 180.0
# All logs together: a node's ranks at the limit of each (`log_max_mb`).
MAX_LOG_BYTES = 1 << 30
TAIL_CHARACTERS = 500
# Of a reason, which may quote what a stranger wrote.
SHOWN_REASON = 1000

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class LogReplay:
    """Listens for new groups. `replay` is the daemon's entry for what is found, `pump` starts it."""

    def __init__(
        self,
        node: Node,
        environment: Mapping[str, str],
        spawn: Spawn,
        replay: Callable[[Group, Replay], None],
        pump: Callable[[], None],
    ) -> None:
        self._node = node
        self._environment = environment
        self._spawn, self._replay, self._pump = spawn, replay, pump
        if node.settings.replay:
            node.group_made.append(self._group_made)

    def _group_made(self, group: Group) -> None:
        self._node.begin_expanding()
        self._spawn(self._serve(group))

    async def _serve(self, group: Group) -> None:
        try:
            await self._replay_to(group)
        except (LogUnusable, HelperFailed, StoreUnwritable, OSError) as error:
            self._complain(f"nothing is replayed: {error}")
        except Exception:
            self._node.problems["defect"] += 1
            log.exception("the replay of earlier runs failed; engines are served without it")
        finally:
            self._node.end_expanding()
            self._pump()

    async def _replay_to(self, group: Group) -> None:
        logs = await in_thread(self._logs)
        if not logs:
            return
        notes: list[str] = []
        winners = await in_thread(winners_beside, logs, notes)
        # Beside the reading of logs; it takes about as long.
        asking = asyncio.ensure_future(_tunings(group, winners))
        try:
            selected = await _ask(group, logs)
            self._tell(group, selected)
            jobs = {(job.compiler, job.key): job for job in selected.jobs}
            requests = {name: tuple(decode_sweeps(data)) for name, data in selected.requests.items()}
            tuned = {identity: job for identity, job in jobs.items() if identity[0] == COMPILER}
            # At once, whatever waits for an answer about tuners.
            self._replay_found(group, [jobs[each] for each in jobs if each not in tuned], requests)
            answer = await asking
            kept = await in_thread(self._without_rivals, group, tuned, answer, winners)
            self._replay_found(group, kept, {})
        finally:
            asking.cancel()
        await self._seed(group, winners, answer, notes)

    def _tell(self, group: Group, selected: Selected) -> None:
        self._node.replayed.update(selected.figures)
        for reason in selected.reasons:
            log.warning("replay: %s", printable(reason, SHOWN_REASON))
        figures = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in selected.figures.items())
        log.info("replay for %s: %s", group.name, figures)

    def _replay_found(
        self, group: Group, jobs: Sequence[Job], requests: dict[str, tuple[Sweep, ...]]
    ) -> None:
        if jobs or requests:
            self._replay(group, Replay(jobs=tuple(jobs), requests=requests))

    def _without_rivals(
        self, group: Group, jobs: dict[KeyId, Job], answer: Answer, winners: Sequence[Winner]
    ) -> list[Job]:
        """The jobs but for candidates that lost, where the group's engines will find who won."""
        roots = [Path(root) for root in group.default_roots(COMPILER)]
        kept = without_rivals(jobs, answer.tunings, winners, group.target, group.environment, roots)
        self._node.replayed["rivals"] = len(jobs) - len(kept)
        return list(kept.values())

    def _logs(self) -> list[Path]:
        """The logs in the daemon's own directory, the newest first as far as they are not too many."""
        directory = log_directory(self._node.settings.log_dir, self._environment)
        if not directory.is_dir():
            return []
        if problem := directory_problem(str(directory), os.getuid()):
            raise LogUnusable(f"logs in {directory} could be anybody's: {problem}; set PREFETCHD_LOG_DIR")
        try:
            found = log_files([directory])
        except LogUnusable:
            # No log, or no right to read: an engine will say so when it wants to write one.
            return []
        sizes = sorted(((path.stat().st_mtime, path.stat().st_size, path) for path in found), reverse=True)
        taken: list[Path] = []
        total = 0
        for _, size, path in sizes:
            total += size
            if total > MAX_LOG_BYTES:
                self._complain(
                    f"{len(sizes) - len(taken)} logs in {directory} are left out: all together have more "
                    f"than {MAX_LOG_BYTES >> 20} MiB; run `prefetchd log compact`"
                )
                break
            taken.append(path)
        return taken

    async def _seed(self, group: Group, winners: Sequence[Winner], answer: Answer, notes: list[str]) -> None:
        """Winners go to the directory in which the group's engines look for Triton's results."""
        # Those that join later, with a directory of their own, get them too.
        group.tunings.met(answer.tunings)
        roots = [Path(root) for root in group.default_roots(COMPILER)]
        seeded = await in_thread(seed, winners, answer.tunings, group.target, group.environment, roots)
        if seeded.figures is not None:
            self._node.replayed["winners_seeded"] = seeded.figures.seeded
        for note in (*notes, *answer.notes, *seeded.notes):
            log.info("replay: %s", printable(note, SHOWN_REASON))

    def _complain(self, text: str) -> None:
        self._node.problems["replay"] += 1
        log.warning("replay: %s", text)


async def _tunings(group: Group, winners: Sequence[Winner]) -> Answer:
    """Of these winners; none at all costs nothing. Raises `HelperFailed`."""
    return await tunings_of(winners, (), group.target, group.environment, interpreter=group.interpreter)


async def _ask(group: Group, logs: list[Path]) -> Selected:
    """What the process says. Raises `HelperFailed` with its last words when it says nothing."""
    process = await asyncio.create_subprocess_exec(
        group.interpreter, "-P", "-m", select.__name__, "--parent", str(os.getpid()),
        env=group.environment, start_new_session=True,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    question = Question(target=group.target, logs=[str(path) for path in logs])
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            data, said = await process.communicate(msgspec.msgpack.encode(question))
        return msgspec.msgpack.decode(data, type=Selected)
    except TimeoutError:
        raise HelperFailed(f"the logs were not read within {TIME_LIMIT_S:.0f} s") from None
    except msgspec.MsgspecError:
        text = said.decode("utf-8", "replace").strip()[-TAIL_CHARACTERS:]
        raise HelperFailed(f"reading the logs ended with status {process.returncode}: {text}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
