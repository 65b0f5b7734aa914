"""`prefetchd report`: shape logs as one page."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from prefetchd.log_commands import chosen_logs, json_option, logs_argument, progress
from prefetchd.plain_errors import plain_errors
from prefetchd.report.gathering import gather
from prefetchd.report.page import page, seconds
from prefetchd.shapelog import LogUnusable
from prefetchd.toml_files import write_text


@click.command("report")
@logs_argument
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="File to write.",
)
@json_option
@plain_errors(LogUnusable)
def report_command(logs: tuple[Path, ...], out: Path, as_json: bool) -> int:
    """Write a page that shows when engines compiled, what was ready, and what it cost and saved."""
    files = chosen_logs(logs)
    found = gather(files, progress(files, quiet=as_json))
    try:
        write_text(out, page(found))
    except OSError as error:
        raise LogUnusable(
            f"{out}: cannot be written: {error.strerror}; name a file in a directory of your own"
        ) from error
    figures = {
        "out": str(out),
        "records": found.records,
        "compiles": found.compiles,
        "suffered_s": found.suffered,
        "hits": found.hits,
        "avoided_s": found.avoided,
        "unvalued_hits": found.unvalued,
        "unfinished": len(found.unfinished),
        "unreadable": found.problems.count,
    }
    if as_json:
        click.echo(msgspec.json.encode(figures))
    else:
        click.echo(
            f"wrote {out}: {found.compiles:,} engine compiles took {seconds(found.suffered)}, "
            f"{found.hits:,} times a variant was ready, which saved {seconds(found.avoided)}"
        )
    return 0
