"""Why a variant was ready or not: its story, from the logs and from the daemon that runs here.

Told for each variant: what it is, who asked for it, when it was compiled where, what that cost, why it was
not ready, and what to do. The subtle rule: a log tells only what the engine knew *then*. What holds now is
the daemon's to say, and its answer is kept apart.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import msgspec
import zmq

from prefetchd.config import load_settings
from prefetchd.endpoint import Endpoint, EndpointError, find_endpoint
from prefetchd.log_commands import chosen_logs, json_option, moment, request_text
from prefetchd.node.lock import is_held
from prefetchd.plain_errors import plain_errors
from prefetchd.plain_text import printable
from prefetchd.protocol import (
    MAX_MESSAGE_BYTES,
    Answer,
    Hello,
    KeyName,
    MalformedMessage,
    Query,
    State,
    decode,
    encode,
)
from prefetchd.shapelog import Ended, LogUnusable, Merged, Problems, Published, Record, Started, read_log
from prefetchd.shapelog.record import Run, run_of

# Variants that one beginning of a key may mean before it is too short to be told.
MAX_MATCHES = 20
# Variants and ranks kept while the logs are read, and compiles that run at once.
MAX_KEPT, MAX_RUNNING = 400, 10_000
# Of one variant, the compiles that are listed; all are counted.
MAX_TOLD = 20
# Variants of a whole log, the dearest first; --limit changes it.
SHOWN_VARIANTS = 10
# Of a line, and of one value of what rebuilds a variant.
SHOWN_LINE, SHOWN_VALUE = 400, 80
# A daemon that lives answers within milliseconds; explaining goes on without it.
ANSWER_LIMIT_S = 3.0

# Why it was not ready, and what to do, by the record's cause.
WHY = {
    "unplanned": "nobody had asked for it: no provider names it for this model",
    "late": "it was asked for and not published yet when the engine reached it. Start earlier "
    "(`prefetchd warm`, replay), give it more compile slots (PREFETCHD_JOBS), or let the engine wait "
    "(PREFETCHD_WAIT_MS)",
    "mismatch": "it was published for this engine and not found by it: their keys differ. `prefetchd stats` "
    "names the field that differs, `prefetchd doctor` what to change",
    "planned": "it was ready: published before the engine reached it",
}
NOW = {
    State.UNKNOWN: "does not know it, or no engine is attached that would need it",
    State.QUEUED: "is going to compile it",
    State.COMPILING: "is compiling it",
    State.PUBLISHED: "has published it",
    State.FAILED: "could not make it; its log says why",
}


class NotFound(Exception):
    """No variant of the logs, or too many, are meant; the text says which there are."""


class Story(msgspec.Struct, kw_only=True):
    """What the logs hold of one variant."""

    compiler: str
    # The library's key, or the job digest where only the compiler's run was seen.
    key: str
    compiles: int = 0
    seconds: float = 0.0
    hits: int = 0
    publications: int = 0
    causes: dict[str, int] = {}
    ranks: dict[str, int] = {}
    fingerprints: tuple[str, ...] = ()
    provider: str = ""
    request: dict[str, Any] | None = None
    rebuild: dict[str, Any] | None = None
    # The first sightings in the order of the logs, and compiles without an end.
    sightings: list[Record] = []
    unfinished: list[Started] = []
    # What the daemon says now; None: it was not asked, or did not answer.
    state: str | None = None

    def add(self, record: Record) -> None:
        """One sighting more."""
        if record.cause == "planned":
            self.hits += 1
        else:
            self.compiles += 1
            self.seconds += record.seconds
        _count(self.causes, record.cause)
        _count(self.ranks, f"{record.host}:{record.rank}")
        if record.fingerprint not in self.fingerprints and len(self.fingerprints) < MAX_TOLD:
            self.fingerprints += (record.fingerprint,)
        if self.request is None and record.request is not None:
            self.provider, self.request = record.provider, record.request
        if self.rebuild is None:
            self.rebuild = record.rebuild
        if len(self.sightings) < MAX_TOLD:
            # Without what is told above of all of them.
            self.sightings.append(msgspec.structs.replace(record, request=None, rebuild=None))


def stories(files: Iterable[Path], start: str, problems: Problems) -> list[Story]:
    """The variant whose key begins so, under each compiler that knows it. Raises `NotFound`."""
    found = _collect(files, lambda key: key.startswith(start), problems)
    exact = [story for story in found if story.key == start]
    return _unambiguous(exact or found, start)


def dearest(files: Sequence[Path], limit: int, problems: Problems) -> list[Story]:
    """The variants whose compile never ended, and those with the dearest ones. Raises `NotFound`."""
    merged = Merged(files)
    names = [started.key or started.job_digest for started in merged.unfinished[:limit]]
    for record in islice(merged, limit):
        names.append(record.key or record.job_digest)
    wanted = dict.fromkeys(name for name in names if name)
    if not wanted:
        raise NotFound("the log names no variant; `prefetchd log stats` says what is in it")
    found = _collect(files, wanted.__contains__, problems)
    order = list(wanted)
    return sorted(found, key=lambda story: order.index(story.key))[:limit]


def _collect(files: Iterable[Path], wanted: Callable[[str], bool], problems: Problems) -> list[Story]:
    found: dict[tuple[str, str], Story] = {}
    running: dict[Run, Started] = {}
    for path in files:
        for line in read_log(path, problems):
            if isinstance(line, Ended):
                running.pop(run_of(line), None)
                continue
            key = line.key if isinstance(line, Published) else line.key or line.job_digest
            if not wanted(key):
                continue
            story = _story(found, line.compiler, key)
            if isinstance(line, Record):
                story.add(line)
            elif isinstance(line, Published):
                story.publications += 1
            elif len(running) < MAX_RUNNING:
                running[run_of(line)] = line
    for started in running.values():
        _story(found, started.compiler, started.key or started.job_digest).unfinished.append(started)
    return list(found.values())


def ask_states(endpoint: Endpoint, keys: Sequence[KeyName]) -> list[State] | None:
    """What the daemon knows of these keys; None without a daemon that answers in time."""
    try:
        endpoint.check()
    except EndpointError:
        return None
    if endpoint.lock_path is not None and not is_held(endpoint.lock_path):
        return None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.connect(endpoint.address)
        # Without a target: a tool that only asks.
        socket.send(
            encode(Hello(engine="prefetchd explain", pid=os.getpid(), generation=secrets.token_hex(8)))
        )
        socket.send(encode(Query(id=1, keys=tuple(keys))))
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while (left := deadline - time.monotonic()) > 0 and socket.poll(int(left * 1000)):
            message = decode(socket.recv_multipart()[-1])
            if isinstance(message, Answer) and len(message.keys) == len(keys):
                return list(message.keys)
    except (zmq.ZMQError, MalformedMessage):
        return None
    finally:
        socket.close()
        context.term()
    return None


def tell(story: Story) -> Iterator[str]:
    """The story, line by line."""
    yield f"{story.compiler} {story.key or '(no name)'}"
    yield f"  what: {_what(story)}"
    yield f"  asked: {_asked(story)}"
    yield (
        f"  cost: {story.compiles} engine compiles on {len(story.ranks)} ranks, {story.seconds:.3f} s; "
        f"{story.hits} times ready, {story.publications} times published ahead"
    )
    for record in story.sightings:
        yield f"  {_sighting(record)}"
    others = story.compiles + story.hits - len(story.sightings)
    if others > 0:
        yield f"  ... and {others} more"
    for started in story.unfinished[:MAX_TOLD]:
        yield (
            f"  never ended: begun {moment(started.at)} on {started.host}:{started.rank} in process "
            f"{started.process}, called from {started.site or 'an unknown place'}: it hangs there, or the "
            "process was killed in it"
        )
    worst = [cause for cause in ("mismatch", "late", "unplanned", "planned") if story.causes.get(cause)]
    for cause in worst:
        advice = _advice(story) if cause == "unplanned" else ""
        yield f"  why ({cause}, {story.causes[cause]}): {WHY[cause]}{advice}"
    yield f"  replay: {_replay(story)}"
    if len(story.fingerprints) > 1:
        yield f"  seen under {len(story.fingerprints)} fingerprints: {', '.join(story.fingerprints)}"
    yield f"  now: {'no daemon answers here' if story.state is None else f'the daemon {story.state}'}"


@click.command("explain")
@click.argument("what", metavar="KEY|LOG")
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Where to look for KEY: logs or directories. Default: where this user's engines write.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=SHOWN_VARIANTS,
    show_default=True,
    help="Variants told of a LOG, the dearest first.",
)
@json_option
@plain_errors(LogUnusable, NotFound, EndpointError)
def explain_command(what: str, logs: tuple[Path, ...], limit: int, as_json: bool) -> int:
    """Tell what a variant is, who asked for it, when, what it cost, and why it was or was not ready.

    The beginning of a KEY is enough if no other begins so; of a LOG the dearest variants are told.
    """
    problems = Problems()
    if Path(what).exists() and not logs:
        found = dearest(chosen_logs([Path(what)]), limit, problems)
    else:
        files = chosen_logs(logs)
        found = stories(files, what, problems)
    _ask_daemon(found)
    if as_json:
        click.echo(msgspec.json.encode({"variants": found, "unreadable": problems.count}))
        return 0
    for story in found:
        for line in tell(story):
            click.echo(printable(line, SHOWN_LINE))
    if problems.count:
        click.echo(f"{problems.count} lines could not be read; `prefetchd log stats` says which", err=True)
    return 0


def _ask_daemon(found: Sequence[Story]) -> None:
    if not found:
        return
    endpoint = find_endpoint(os.environ, load_settings().endpoint)
    states = ask_states(endpoint, [KeyName(story.compiler[:1024], story.key[:1024]) for story in found])
    for story, state in zip(found, states or (), strict=False):
        story.state = NOW[state]


def _story(found: dict[tuple[str, str], Story], compiler: str, key: str) -> Story:
    story = found.get((compiler, key))
    if story is None:
        if len(found) > MAX_KEPT:
            raise NotFound(f"more than {len(found) - 1} variants begin so; give more of the key")
        story = found[(compiler, key)] = Story(compiler=compiler, key=key)
    return story


def _unambiguous(found: list[Story], start: str) -> list[Story]:
    if not found:
        raise NotFound(
            f"no variant in the logs has a key that begins with {printable(start, SHOWN_VALUE)!r}; "
            "`prefetchd log show` lists what there is, and --log names other logs"
        )
    if len({story.key for story in found}) > 1:
        names = sorted(f"{story.compiler} {story.key}" for story in found)
        shown = "\n".join(f"  {printable(name, SHOWN_LINE)}" for name in names[:MAX_MATCHES])
        raise NotFound(f"{len(names)} variants begin so; give more of the key:\n{shown}")
    return found


def _what(story: Story) -> str:
    if story.request is not None:
        return request_text(story.request)
    if story.rebuild is None:
        return "only its key is known"
    told = (
        f"{name}={value}"
        for name, value in story.rebuild.items()
        if isinstance(value, (str, int, float)) and len(str(value)) <= SHOWN_VALUE
    )
    return f"a kernel without a known request: {' '.join(told) or 'see --json'}"


def _asked(story: Story) -> str:
    """Who wanted it before the engine did."""
    if any(story.causes.get(cause) for cause in ("planned", "late", "mismatch")):
        return (
            f"ahead of the engine, by provider {story.provider}" if story.provider else "ahead of the engine"
        )
    if story.provider:
        return f"by nobody; provider {story.provider} knows the request and did not name it for this model"
    return "by nobody, and no provider is known for it"


def _sighting(record: Record) -> str:
    where = f"{record.host}:{record.rank} {moment(record.at)}"
    if record.cause == "planned":
        return f"{where}: found ready"
    ended = (
        f"compiled by the engine in {record.seconds:.3f} s"
        if record.ok
        else "failed to compile in the engine"
    )
    site = f", called from {record.site}" if record.site else ""
    changed = f"; against the nearest known: {record.changed}" if record.changed else ""
    return f"{where}: {record.cause}, {ended}{site}{changed}"


def _advice(story: Story) -> str:
    """What to do about a variant that nobody plans; only what its records allow."""
    if story.request is not None:
        return (
            ". Replay this log (`prefetchd replay`), or plan with the profile that "
            "`prefetchd profile --from-log` learns from it"
        )
    return ". Replay this log (`prefetchd replay`)" if story.rebuild is not None else ""


def _replay(story: Story) -> str:
    if story.request is not None and story.rebuild is not None:
        return f"by its request (provider {story.provider}), or without it from the record alone"
    if story.request is not None:
        return f"by its request, where provider {story.provider} is installed"
    if story.rebuild is not None:
        return "from the record alone, under the same fingerprint"
    return "cannot be: the records hold neither its request nor what rebuilds it"


def _count(table: dict[str, int], name: str) -> None:
    if name in table or len(table) < MAX_KEPT:
        table[name] = table.get(name, 0) + 1
