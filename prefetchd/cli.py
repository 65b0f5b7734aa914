"""The command line. Thin: each command reads its options, calls one module and turns the result into text.

Exit status: 0 done (for `warm`: all covered), 1 done but not all covered or not all right, 2 the command
could not run as asked (the text on standard error says what to change), 130 interrupted. `null` ends with
the status of the program it ran.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click
import msgspec
from rich.console import Console

from prefetchd import __version__
from prefetchd.baking.command import bake_command
from prefetchd.collect import Collected, collect
from prefetchd.config import Settings, compile_settings, load_settings
from prefetchd.coverage import Coverage
from prefetchd.doctor import examine, render
from prefetchd.explain import explain_command
from prefetchd.learned_profile import profile_command
from prefetchd.log_commands import log_group
from prefetchd.model_options import ModelChoice, model_options, named_target
from prefetchd.null_device.launcher import run_on_null_device
from prefetchd.plain_errors import plain_errors
from prefetchd.profiles import Profile, ProfileError, write_profile
from prefetchd.progress import Progress, progress_for
from prefetchd.provider import Provider, load_providers
from prefetchd.replay import replay_command
from prefetchd.report.command import report_command
from prefetchd.run import run_command
from prefetchd.serve_commands import keygen_command, serve_command, stats_command, top_command
from prefetchd.signals import cancel_on_signals
from prefetchd.warm import WarmPlan, uncovered_lines, warm
from prefetchd.winners import append_winners, read_winners

# What a person reads at the end; the whole list is in --json.
SHOWN_PROBLEMS = 10


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="prefetchd")
def main() -> None:
    """Compiles the kernels an LLM serving engine will launch before it launches them, without a GPU."""


@main.command("warm")
@model_options
@click.option(
    "--jobs",
    type=click.IntRange(0),
    help="Compile processes at a time. Default: what cgroup and affinity allow.",
)
@click.option(
    "--libcuda-dir",
    help="Where the engine finds libcuda.so.1 (directories, colons between): builds Triton's module too.",
)
@click.option("--dry-run", is_flag=True, help="Trace and count the variants, compile nothing.")
@click.option(
    "--winners",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Measured autotune winners (`winners collect`): compile only these, where known, and seed them.",
)
@click.option(
    "--fla-config-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --winners: fill the FLA_CONFIG_DIR of an engine that runs with FLA_CACHE_MODE=strict.",
)
@click.option(
    "--write-profile", type=click.Path(path_type=Path), help="Write the model's profile there and stop."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@plain_errors()
def warm_command(
    choice: ModelChoice,
    jobs: int | None,
    libcuda_dir: str | None,
    dry_run: bool,
    winners: Path | None,
    fla_config_dir: Path | None,
    write_profile: Path | None,
    as_json: bool,
) -> int:
    """Trace all that a model can launch, compile what the cache lacks, and prove that nothing is missing."""
    settings = _overridden(load_settings(), max_tokens=choice.max_tokens, jobs=jobs, libcuda_dir=libcuda_dir)
    sites = choice.sites()
    if write_profile is not None:
        _write_profile(sites, write_profile, as_json)
        return 0
    name, device = choice.device(settings)
    if fla_config_dir is not None and winners is None:
        raise click.UsageError("--fla-config-dir is filled from measured winners: give --winners FILE too")
    known, skipped = read_winners(winners) if winners else (None, [])
    plan = WarmPlan(
        target_name=name,
        target=device,
        profile=sites,
        max_tokens=settings.max_tokens,
        dry_run=dry_run,
        winners=None if known is None else tuple(known),
        fla_config_dir=fla_config_dir.absolute() if fla_config_dir else None,
    )
    coverage = asyncio.run(_warm(plan, load_providers(choice.providers), settings, progress_for(as_json)))
    coverage.notes[:0] = skipped
    if as_json:
        click.echo(msgspec.json.encode(coverage))
    else:
        _show(coverage)
    return 0 if coverage.complete else 1


@main.group("winners")
def winners_group() -> None:
    """Autotune winners: what an engine measured, to be used where it has not measured yet."""


@winners_group.command("collect")
@model_options
@click.option(
    "--cache",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The cache an engine has filled. Default: where Triton looks (TRITON_CACHE_DIR).",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("winners.jsonl"),
    show_default=True,
    help="File to add the winners to.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@plain_errors()
def collect_command(
    choice: ModelChoice,
    cache: Path | None,
    out: Path,
    as_json: bool,
) -> int:
    """Export the winners that an engine measured on the target: trace the model, read its tuners' results.

    The engine's files do not say on which GPU they were measured: the target does, so name the engine's own.
    """
    settings = _overridden(load_settings(), max_tokens=choice.max_tokens)
    sites = choice.sites()
    name, device = choice.device(settings)
    plan = WarmPlan(
        target_name=name, target=device, profile=sites, max_tokens=settings.max_tokens, dry_run=True
    )
    environment = compile_settings(settings, os.environ)
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache.absolute())
    found = asyncio.run(
        collect(plan, load_providers(choice.providers), settings, environment, progress_for(as_json))
    )
    added = append_winners(out, found.winners)
    if as_json:
        click.echo(msgspec.json.encode({"out": str(out), "added": added, **msgspec.to_builtins(found)}))
    else:
        _show_collected(found, out, added)
    return 0 if not found.problems and not found.damaged else 1


@main.command("null", context_settings={"allow_interspersed_args": False})
@click.option("--target", help="Device that seems to be there. Default: this machine's GPU.")
@click.option("--integer-ops", is_flag=True, help="Compute small integer operators for real.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@plain_errors()
def null_command(target: str | None, integer_ops: bool, command: tuple[str, ...]) -> int:
    """Run any program on the null device: prefetchd null --target h200 -- python script.py."""
    _, device = named_target(target or load_settings().target)
    run_on_null_device(device, command, integer_ops=integer_ops)


for command in (
    run_command,
    replay_command,
    serve_command,
    stats_command,
    top_command,
    keygen_command,
    explain_command,
    log_group,
    profile_command,
    report_command,
    bake_command,
):
    main.add_command(command)


@main.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@plain_errors()
def doctor_command(as_json: bool) -> int:
    """Check each thing that must be right on this machine, with what was found and what to do."""
    findings = examine(os.environ)
    if as_json:
        click.echo(msgspec.json.encode({"ok": findings.ok, "checks": findings.checks}))
    else:
        render(findings, Console())
    return 0 if findings.ok else 1


async def _warm(
    plan: WarmPlan, providers: dict[str, Provider], settings: Settings, progress: Progress
) -> Coverage:
    cancel_on_signals()
    return await warm(plan, providers, settings, compile_settings(settings, os.environ), progress)


def _overridden(settings: Settings, **values: int | str | None) -> Settings:
    return msgspec.structs.replace(
        settings, **{name: value for name, value in values.items() if value is not None}
    )


def _write_profile(profile: Profile, path: Path, as_json: bool) -> None:
    try:
        write_profile(profile, path)
    except OSError as error:
        raise ProfileError(
            f"{path}: cannot be written: {error.strerror}; name a file in a directory of your own"
        ) from error
    gemms, kernels = len(profile.gemms), len(profile.kernels)
    if as_json:
        click.echo(msgspec.json.encode({"out": str(path), "gemms": gemms, "kernels": kernels}))
    else:
        click.echo(f"wrote {path}: {gemms} GEMM sites, {kernels} sites of other kernels", err=True)


def _show(coverage: Coverage) -> None:
    for name, provider in coverage.providers.items():
        done = "would compile" if coverage.dry_run else "compiled"
        count = provider.variants - provider.hits if coverage.dry_run else provider.compiled
        click.echo(
            f"{name}: {provider.requests} requests, {provider.variants} variants: "
            f"{provider.hits} in the cache, {done} {count}, failed {provider.failed}; "
            f"{provider.uncovered} requests not covered"
        )
        if figures := provider.winners:
            click.echo(
                f"{name}: tuners: {figures.known} answered by measured winners, {figures.seeded} seeded now; "
                f"{figures.missing} will be measured by the engine"
            )
    for note in coverage.notes:
        click.echo(f"note: {note}")
    for path in coverage.quarantined:
        click.echo(f"quarantined a corrupt entry: {path}")
    lines = list(uncovered_lines(coverage))
    for line in lines[:SHOWN_PROBLEMS]:
        click.echo(line)
    if len(lines) > SHOWN_PROBLEMS:
        click.echo(f"... and {len(lines) - SHOWN_PROBLEMS} more; --json lists all")


def _show_collected(found: Collected, out: Path, added: int) -> None:
    click.echo(
        f"{found.cache}: {len(found.winners)} winners measured on {found.gpu} ({found.sm_count} SMs), "
        f"{added} new in {out}; {found.unmeasured} of {found.tunings} tunings not measured yet"
    )
    if found.unasked:
        click.echo(
            f"{found.unasked} result files belong to nothing that this model launches with these limits, "
            "flags and environment variables; they are left out"
        )
    for note in found.notes:
        click.echo(f"note: {note}")
    for problem in found.problems[:SHOWN_PROBLEMS]:
        click.echo(f"{problem.what}: {problem.kind}: {problem.text}")
