"""The daemon's figures for people: asked by its own socket, shown once or again and again.

The subtle rule: a daemon that is not there must be told from one that is slow, without waiting long, and a
tool must never start one. So its lock is looked at first.
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from prefetchd.endpoint import Endpoint
from prefetchd.node.lock import is_held
from prefetchd.plain_text import printable
from prefetchd.protocol import MAX_MESSAGE_BYTES, MalformedMessage, Stats, StatsQuery, decode, encode

# A healthy daemon answers within milliseconds, a busy one within a second.
ANSWER_LIMIT_S = 10.0
# Of a problem; the daemon's log has it whole.
SHOWN_TEXT = 400


class NoDaemon(Exception):
    """No daemon answers at the endpoint; the text says which and what to do."""


def ask_stats(endpoint: Endpoint, limit_s: float = ANSWER_LIMIT_S) -> Stats:
    """The daemon's figures. Raises `NoDaemon`, `EndpointError`."""
    endpoint.check()
    if endpoint.lock_path is not None and not is_held(endpoint.lock_path):
        raise NoDaemon(f"no daemon runs at {endpoint.address}; start one with `prefetchd serve`")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.connect(endpoint.address)
        socket.send(encode(StatsQuery(id=1)))
        deadline = time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0 and socket.poll(int(left * 1000)):
            message = decode(socket.recv_multipart()[-1])
            if isinstance(message, Stats):
                return message
    except (zmq.ZMQError, MalformedMessage) as error:
        raise NoDaemon(f"what answers at {endpoint.address} is no daemon of this version: {error}") from error
    finally:
        socket.close()
        context.term()
    raise NoDaemon(
        f"the daemon at {endpoint.address} did not answer within {limit_s:.0f} s: it is stopped or "
        "overloaded; look at its log"
    )


def show_stats(stats: Stats, console: Console) -> None:
    """Once, whole."""
    console.print(_view(stats))
    figures = _table("figures", "figure", "value")
    for name, value in sorted(stats.figures.items()):
        figures.add_row(_line(name), _number(value))
    console.print(figures)


def watch(endpoint: Endpoint, console: Console, interval_s: float) -> None:
    """Until interrupted; ends with `NoDaemon` when the daemon does."""
    with Live(_view(ask_stats(endpoint)), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(_view(ask_stats(endpoint)), refresh=True)


def _view(stats: Stats) -> RenderableType:
    parts: list[RenderableType] = [_summary(stats), _queues(stats), _helpers(stats), _ranks(stats)]
    problems = [f"problem: {_line(text)}" for text in stats.tables.get("problems", ()) if text]
    found = stats.tables.get("mismatches", {})
    mismatches = [f"mismatch: {_line(name.strip())} ({count} ranks)" for name, count in found.items()]
    return Group(*parts, *_replay(stats), *_helper_problems(stats), *mismatches, *problems)


def _replay(stats: Stats) -> list[str]:
    """One line about what earlier runs left, if they left anything."""
    found: dict[str, int] = stats.tables.get("replay", {})
    figures = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in found.items())
    return [f"replay of earlier runs: {figures}"] if figures else []


def _summary(stats: Stats) -> str:
    def figure(name: str) -> str:
        return _number(stats.figures.get(f"prefetchd_{name}", 0))

    ready = "ready" if stats.figures.get("prefetchd_ready") else "not ready"
    return (
        f"{ready}, up {figure('uptime_seconds')} s; {figure('ranks')} ranks, {figure('peers')} peers; "
        f"planned {figure('planned_total')}, hits {figure('prefetch_hits_total')}, "
        f"late {figure('late_total')}, unplanned {figure('unplanned_total')}, wasted {figure('wasted')}; "
        f"{figure('slots')} compile slots"
    )


def _queues(stats: Stats) -> Table:
    priorities = ("urgent", "batch", "replay", "universe")
    table = _table("work", "queue", *priorities, "running")
    for queue in ("trace", "compile", "publish"):
        depths = (
            stats.figures.get(f"prefetchd_queue_depth{{priority={priority},queue={queue}}}", 0)
            for priority in priorities
        )
        running = stats.figures.get(f"prefetchd_running{{what={queue}}}", 0)
        table.add_row(queue, *map(_number, depths), _number(running))
    return table


def _helpers(stats: Stats) -> Table:
    table = _table("helpers", "helper", "state", "pid", "ranks", "traces", "restarts", "memory")
    for helper in stats.tables.get("helpers", ()):
        table.add_row(
            _line(str(helper["name"])),
            str(helper["state"]),
            str(helper["pid"] or ""),
            ", ".join(map(_line, helper["ranks"])),
            str(helper["traces"]),
            str(helper["restarts"]),
            f"{helper['rss_bytes'] / (1 << 20):.0f} MiB",
        )
    return table


def _helper_problems(stats: Stats) -> list[str]:
    """Below the table, which has no room for sentences."""
    helpers = [helper for helper in stats.tables.get("helpers", ()) if helper["problem"]]
    return [f"{_line(str(helper['name']))}: {_line(str(helper['problem']))}" for helper in helpers]


def _ranks(stats: Stats) -> Table:
    names = ("planned", "hits", "late", "unplanned", "wasted")
    table = _table("ranks", "rank", "compiler", *names, "engine compiles", "engine seconds")
    accounts: dict[str, dict[str, Any]] = stats.tables.get("accounts", {})
    for rank, by_compiler in accounts.items():
        for compiler, counts in by_compiler.items():
            table.add_row(
                _line(rank),
                _line(compiler),
                *(str(counts[name]) for name in names),
                ", ".join(f"{reason} {count}" for reason, count in counts["engine_compiles"].items()),
                _number(sum(counts["engine_seconds"].values())),
            )
    return table


def _table(title: str, *headings: str) -> Table:
    """One that cuts nothing: what a narrow terminal has no room for goes on below, headings word by word."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold", min_width=max(map(len, heading.split())))
    return table


def _line(text: str) -> str:
    """The first line of what may be a compiler's or an engine's own words, or the name it gave itself."""
    return printable(text.partition("\n")[0], SHOWN_TEXT)


def _number(value: int | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else f"{value:,}"
