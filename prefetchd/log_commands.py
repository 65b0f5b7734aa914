"""The commands round shape logs: `log show`, `log merge`, `log stats`, `log compact`.

LOG is a file, or a directory for all logs in it; without one it is where this user's engines write. What a
log holds was written by strangers, so nothing of it reaches the terminal but what can be printed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path

import click
import msgspec

from prefetchd.config import load_settings
from prefetchd.plain_errors import plain_errors
from prefetchd.plain_text import printable
from prefetchd.shapelog import (
    LogUnusable,
    Merged,
    Record,
    Started,
    compact,
    encode_line,
    log_directory,
    log_files,
    write_merged,
)
from prefetchd.shapelog.stats import Count, log_stats

# What is over by then needs no progress, and later so often is enough.
PROGRESS_S = 2.0
# Shown of a line; keys and places may have thousands of characters.
SHOWN_LINE = 400
# Rows that a person reads; --limit changes it, --json has them all.
SHOWN_ROWS = 50
SHOWN_PROBLEMS = 10

logs_argument = click.argument("logs", nargs=-1, type=click.Path(path_type=Path), metavar="[LOG]...")
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on standard output."
)


@click.group("log")
def log_group() -> None:
    """What engines compiled themselves: their shape logs. LOG is a file or a directory of them."""


@log_group.command("show")
@logs_argument
@click.option(
    "--limit", type=click.IntRange(0), default=SHOWN_ROWS, show_default=True, help="Variants shown; 0: all."
)
@json_option
@plain_errors(LogUnusable)
def show_command(logs: tuple[Path, ...], limit: int, as_json: bool) -> int:
    """Show each variant once, the dearest first, and the compiles that never ended."""
    merged = read_merged(chosen_logs(logs), quiet=as_json)
    if as_json:
        for part in _show_json(merged):
            click.echo(part, nl=False)
        return 0
    for number, record in enumerate(merged):
        if limit and number >= limit:
            break
        click.echo("\n".join(printable(line, SHOWN_LINE) for line in _described(record)))
    shown = min(len(merged), limit) if limit else len(merged)
    click.echo(f"{shown} of {len(merged)} variants of {merged.records} records in {len(merged.files)} logs")
    for started in merged.unfinished[:SHOWN_PROBLEMS]:
        click.echo(printable(f"never ended: {describe_started(started)}", SHOWN_LINE))
    _tell_problems(merged.problems.count, merged.problems.first)
    return 0


@log_group.command("merge")
@logs_argument
@click.option("--out", "-o", type=click.Path(path_type=Path), required=True, help="File to write.")
@json_option
@plain_errors(LogUnusable)
def merge_command(logs: tuple[Path, ...], out: Path, as_json: bool) -> int:
    """Put logs of ranks, nodes and runs into one: each variant once, the dearest first."""
    files = chosen_logs(logs)
    if any(out.exists() and out.samefile(file) for file in files):
        raise LogUnusable(
            f"{out}: is one of the logs that are merged; name another file, or use `log compact`"
        )
    merged = read_merged(files, quiet=as_json)
    count = write_merged(merged, out)
    if as_json:
        figures = {
            "out": str(out),
            "files": len(files),
            "records": merged.records,
            "variants": count,
            "duplicates": merged.duplicates,
            "left_out": merged.left_out,
            "unreadable": merged.problems.count,
            "problems": merged.problems.first,
        }
        click.echo(msgspec.json.encode(figures))
    else:
        click.echo(
            f"wrote {out}: {count} variants of {merged.records} records in {len(files)} logs, "
            f"{merged.duplicates} duplicates dropped"
        )
        _tell_problems(merged.problems.count, merged.problems.first)
        if merged.left_out:
            click.echo(f"{merged.left_out} records left out: more variants than one log may have", err=True)
    return 1 if merged.left_out else 0


@log_group.command("stats")
@logs_argument
@json_option
@plain_errors(LogUnusable)
def stats_command(logs: tuple[Path, ...], as_json: bool) -> int:
    """Count what logs hold: by compiler, by rank and by fingerprint."""
    files = chosen_logs(logs)
    stats = log_stats(files, progress(files, quiet=as_json))
    if as_json:
        click.echo(msgspec.json.encode(stats))
        return 0
    for title, rows in (
        ("all", {"": stats.total}),
        ("compiler", stats.compilers),
        ("rank", stats.ranks),
        ("fingerprint", stats.fingerprints),
    ):
        ordered = sorted(rows.items(), key=lambda row: (-row[1].seconds, row[0]))
        for name, count in ordered[:SHOWN_ROWS]:
            click.echo(f"{title} {printable(name, SHOWN_LINE)}".rstrip() + f": {_counted(count)}")
        if len(ordered) > SHOWN_ROWS:
            click.echo(f"... and {len(ordered) - SHOWN_ROWS} more; --json lists all")
    span = f", {moment(stats.first)} to {moment(stats.last)}" if stats.last else ""
    click.echo(
        f"{stats.files} logs, {stats.bytes / (1 << 20):.1f} MiB{span}; {stats.published} publications, "
        f"{stats.unfinished} compiles that never ended"
    )
    _tell_problems(stats.unreadable, stats.problems)
    return 0


@log_group.command("compact")
@logs_argument
@json_option
@plain_errors(LogUnusable)
def compact_command(logs: tuple[Path, ...], as_json: bool) -> int:
    """Keep one record a variant in each log. A log that an engine has open is left as it is."""
    done, refused = [], []
    for path in chosen_logs(logs):
        try:
            done.append(compact(path))
        except LogUnusable as error:
            refused.append(str(error))
    if as_json:
        click.echo(msgspec.json.encode({"compacted": msgspec.to_builtins(done), "refused": refused}))
        return 1 if refused else 0
    for log in done:
        click.echo(
            f"{printable(log.path, SHOWN_LINE)}: {log.before:,} to {log.after:,} bytes, "
            f"{log.records} records; dropped {log.duplicates} duplicates, {log.unreadable} unreadable lines"
        )
    for text in refused:
        click.echo(f"prefetchd: {text}", err=True)
    return 1 if refused else 0


def chosen_logs(logs: Iterable[Path]) -> list[Path]:
    """The files that are meant, by default those of this user's engines. Raises `LogUnusable`."""
    named = list(logs)
    return log_files(named or [default_logs()])


def default_logs() -> Path:
    """The directory in which this user's engines write. Raises `LogUnusable` where none has written yet."""
    directory = log_place()
    if not directory.is_dir():
        raise LogUnusable(
            f"{directory}: no engine has written a shape log there yet; name a log, or set PREFETCHD_LOG_DIR"
        )
    return directory


def log_place() -> Path:
    """Where that directory is, or will be. Raises `LogUnusable` where it can be none."""
    directory = log_directory(load_settings().log_dir, os.environ)
    if directory.exists() and not directory.is_dir():
        raise LogUnusable(f"PREFETCHD_LOG_DIR: {directory} is no directory; name one, or give the log as LOG")
    return directory


def read_merged(files: list[Path], *, quiet: bool) -> Merged:
    """The logs as one, with progress where it takes long. Raises `LogUnusable`."""
    return Merged(files, progress(files, quiet=quiet))


def progress(files: Iterable[Path], *, quiet: bool) -> Callable[[int], None]:
    """Hears of bytes that were read, and says on standard error how far that is, if it takes long."""
    total = sum(path.stat().st_size for path in files)
    done, said = 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal done, said
        done += size
        if not quiet and time.monotonic() - said >= PROGRESS_S:
            said = time.monotonic()
            click.echo(f"reading: {done >> 20} of {total >> 20} MiB", err=True)

    return advance


def moment(at: float) -> str:
    """A time of a record, for people."""
    try:
        return datetime.fromtimestamp(at).isoformat(sep=" ", timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return f"at {at:g}"


def describe_started(started: Started) -> str:
    """A compile without an end, for people."""
    name = started.key or started.job_digest or "(no name)"
    return (
        f"{started.compiler} {name}, begun {moment(started.at)} in process {started.process} on "
        f"{started.host}:{started.rank}, called from {started.site or 'an unknown place'}"
    )


def _described(record: Record) -> Iterator[str]:
    """The two lines of a variant."""
    failed = "" if record.ok else ", failed"
    yield (
        f"{record.seconds:9.3f} s  {record.cause}{failed}  {record.compiler}  "
        f"{record.key or record.job_digest or '(no name)'}"
    )
    asked = f"  {request_text(record.request)}" if record.request else ""
    site = f"  from {record.site}" if record.site else ""
    yield f"{'':11}  {record.host}:{record.rank}  {moment(record.at)}{asked}{site}"


def request_text(request: dict[str, object]) -> str:
    """A request's fields in one line: `fp8_gemm_nt m=129 n=2112`."""
    others = " ".join(f"{name}={value}" for name, value in request.items() if name != "op")
    return f"{request.get('op', '?')} {others}"


def _show_json(merged: Merged) -> Iterator[bytes]:
    """One object, written as it is found: it may be larger than memory."""
    yield b'{"records":['
    for number, record in enumerate(merged):
        yield (b"," if number else b"") + encode_line(record).strip()
    unfinished = msgspec.json.encode(merged.unfinished)
    problems = msgspec.json.encode(merged.problems.first)
    yield b'],"unfinished":' + unfinished + b',"unreadable":%d' % merged.problems.count
    yield b',"problems":' + problems + b"}\n"


def _counted(count: Count) -> str:
    reasons = ", ".join(
        f"{getattr(count, name):,} {name}" for name in ("hits", "late", "unplanned", "mismatch", "failed")
    )
    return (
        f"{count.variants:,} variants ({count.replayable:,} replayable) in {count.records:,} records: "
        f"{reasons}; {count.seconds:,.1f} s of engine compiles"
    )


def _tell_problems(count: int, first: list[str]) -> None:
    for text in first[:SHOWN_PROBLEMS]:
        click.echo(f"skipped {printable(text, SHOWN_LINE)}", err=True)
    if count > SHOWN_PROBLEMS:
        click.echo(f"skipped {count} lines in all", err=True)
