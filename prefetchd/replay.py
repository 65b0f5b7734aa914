"""`prefetchd replay`: what engines had to compile themselves, compiled ahead of their next start.

Exit status as `warm`'s: 0 everything in the logs that is meant for this target is published, 1 something was
refused, failed or is not covered (records of another fingerprint are not), 2 the command could not run. Where
no engine has written a log yet there is nothing to do, and that is done: a unit may replay before each start.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click
import msgspec

from prefetchd.config import Settings, compile_settings, load_settings
from prefetchd.log_commands import log_place
from prefetchd.model_options import named_target
from prefetchd.plain_errors import plain_errors
from prefetchd.plain_text import printable, printable_lines
from prefetchd.progress import Progress, progress_for
from prefetchd.provider import Provider, load_providers
from prefetchd.replaying.report import Replayed, lines
from prefetchd.replaying.run import ReplayPlan, replay
from prefetchd.shapelog import LogUnusable
from prefetchd.shapelog.reading import logs_in
from prefetchd.signals import cancel_on_signals
from prefetchd.targets import preset_names

# What a person reads at the end; the whole list is in --json.
SHOWN_PROBLEMS = 10
# Of one: a name may have a thousand characters, and nvcc tell as much.
SHOWN_TEXT = 4000


@click.command("replay")
@click.argument("logs", metavar="[LOG]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--target",
    help=f"Device to compile for: {', '.join(preset_names())}, or a TOML file. Default: this machine's GPU.",
)
@click.option(
    "--jobs",
    type=click.IntRange(0),
    help="Compile processes at a time. Default: what cgroup and affinity allow.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@plain_errors(LogUnusable)
def replay_command(logs: tuple[Path, ...], target: str | None, jobs: int | None, as_json: bool) -> int:
    """Compile ahead what the shape logs LOG (files or directories) say that engines compiled themselves.

    Without LOG: the logs of this machine's engines (PREFETCHD_LOG_DIR). Winners beside the logs are seeded.
    """
    settings = load_settings()
    if jobs is not None:
        settings = msgspec.structs.replace(settings, jobs=jobs)
    name, device = named_target(target or settings.target)
    if not logs and not _written(place := log_place()):
        return _nothing_to_do(name, place, as_json)
    plan = ReplayPlan(target_name=name, target=device, logs=logs or (place,))
    replayed = asyncio.run(_replay(plan, load_providers(), settings, progress_for(as_json)))
    if as_json:
        click.echo(msgspec.json.encode(replayed))
    else:
        _show(replayed)
    return 0 if replayed.complete else 1


def _written(directory: Path) -> bool:
    """Whether any engine has written a log there."""
    return directory.is_dir() and bool(logs_in(directory))


def _nothing_to_do(target: str, directory: Path, as_json: bool) -> int:
    text = f"nothing to replay: no engine has written a shape log in {directory} yet"
    click.echo(msgspec.json.encode(Replayed(target=target, notes=[text])) if as_json else text)
    return 0


async def _replay(
    plan: ReplayPlan, providers: dict[str, Provider], settings: Settings, progress: Progress
) -> Replayed:
    cancel_on_signals()
    return await replay(plan, providers, settings, compile_settings(settings, os.environ), progress)


def _show(replayed: Replayed) -> None:
    for line in lines(replayed):
        click.echo(printable(line, SHOWN_TEXT))
    for problem in replayed.problems[:SHOWN_PROBLEMS]:
        what = printable(problem.what, SHOWN_TEXT)
        click.echo(f"{what}: {problem.kind}: {printable_lines(problem.text, SHOWN_TEXT)}")
    if len(replayed.problems) > SHOWN_PROBLEMS:
        click.echo(f"... and {len(replayed.problems) - SHOWN_PROBLEMS} more; --json lists all")
