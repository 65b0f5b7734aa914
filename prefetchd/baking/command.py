"""`prefetchd bake`: thin over `bake.py`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click
import msgspec

from prefetchd.baking.bake import BakePlan, bake
from prefetchd.baking.engine import EngineFailed
from prefetchd.baking.manifest import Manifest, write_manifest
from prefetchd.config import compile_settings, load_settings
from prefetchd.model_options import named_target
from prefetchd.plain_errors import plain_errors
from prefetchd.progress import progress_for
from prefetchd.signals import cancel_on_signals
from prefetchd.targets import preset_names

# Kernels differ by the number of tokens: tiles by its size, specializations by whether 16 divides it. So each
# power of two and one beyond it, whole chunks of 64 and ragged ones; several prompts together, whose decodes
# then run together; and one that most schedulers prefill in pieces, so that a recurrence begins with a state.
LADDER = (
    "1",
    "2",
    "4",
    "8",
    "9",
    "16",
    "17",
    "32",
    "33",
    "48",
    "64",
    "65",
    "96",
    "128",
    "129",
    "192",
    "256",
    "300",
)
LONG = ("512", "513", "1024", "1025", "1536", "2048", "3000", "4096")
TOGETHER = ("128,128", "300,17,64,1", "1x2", "1x4", "1x8", "1x16", "1x24", "1x32", "1x64", "1x128", "1x256")
DEFAULT_BATCHES = (*LADDER, *LONG, *TOGETHER)


@click.command("bake", context_settings={"allow_interspersed_args": False})
@click.option("--target", help=f"Device to bake for: {', '.join(preset_names())}, or a TOML file.")
@click.option(
    "--batch",
    "batches",
    multiple=True,
    default=DEFAULT_BATCHES,
    help="Prompt lengths served together, with commas (1x64: 64 of length 1); may be repeated. "
    "Default: 1 to 4096 tokens in powers of two, whole and ragged, alone and together.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=4, show_default=True, help="Tokens each request is given."
)
@click.option(
    "--manifest",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("prefetchd-bake.json"),
    show_default=True,
    help="File that says what was made.",
)
@click.option(
    "--timeout", type=click.FloatRange(1), default=3600.0, show_default=True, help="Of each start, s."
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the engine's private directories and logs there; must not exist.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest on standard output.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@plain_errors(EngineFailed)
def bake_command(
    target: str | None,
    batches: tuple[str, ...],
    steps: int,
    manifest: Path,
    timeout: float,
    keep: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Make all kernels of an engine with no GPU: prefetchd bake --target h200 -- vllm serve MODEL."""
    if keep is not None and keep.exists():
        raise click.UsageError(f"--keep {keep}: is there already; name a directory that is not")
    if not manifest.absolute().parent.is_dir():
        # Found out now, and not after an hour of work.
        raise click.UsageError(f"--manifest {manifest}: its directory is not there; make it, or name another")
    settings = load_settings()
    name, device = named_target(target or settings.target)
    plan = BakePlan(
        target_name=name,
        target=device,
        command=command,
        batches=tuple(map(lengths, batches)),
        steps=steps,
        timeout_s=timeout,
        keep=keep,
    )

    async def run() -> Manifest:
        cancel_on_signals()
        return await bake(plan, settings, compile_settings(settings, os.environ), progress_for(as_json))

    baked = asyncio.run(run())
    write_manifest(baked, manifest)
    if as_json:
        click.echo(msgspec.json.encode(baked))
    else:
        show(baked, manifest)
    return 0 if baked.complete else 1


def lengths(text: str) -> tuple[int, ...]:
    """The prompts of one batch. Raises `click.UsageError`."""
    found: list[int] = []
    for part in text.split(","):
        length, _, count = part.strip().partition("x")
        numbers = (length, count or "1")
        if not all(number.isdecimal() and int(number) for number in numbers):
            raise click.UsageError(
                f"--batch {text}: give prompt lengths above 0 with commas, such as 300,17,1 or 1x64"
            )
        found += [int(length)] * int(count or 1)
    return tuple(found)


def show(baked: Manifest, path: Path) -> None:
    """For people."""
    size = sum(artifact.bytes for artifact in baked.artifacts) / 1e6
    click.echo(
        f"{baked.target}: {len(baked.artifacts)} variants, {size:.1f} MB: {baked.hits} were in the cache, "
        f"{baked.compiled} compiled; " + ("proved by a second start" if baked.proved else "NOT proved")
    )
    for compiler, directory in baked.directories.items():
        count = sum(artifact.compiler == compiler for artifact in baked.artifacts)
        click.echo(f"{compiler}: {count} in {directory}")
    for note in baked.notes:
        click.echo(f"note: {note}")
    if baked.unanswered:
        calls = ", ".join(f"{name} ({count})" for name, count in baked.unanswered.items())
        click.echo(f"note: the null device does not answer: {calls}")
    for problem in baked.problems:
        click.echo(f"{problem.what}: {problem.kind}: {problem.text}")
    click.echo(f"manifest: {path}")
