"""The commands round the daemon: `serve`, `stats`, `top` and `keygen`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

import click
import msgspec
from rich.console import Console

from prefetchd.config import load_settings
from prefetchd.curve import KeysError, generate_keys, keys_directory
from prefetchd.daemon import serve
from prefetchd.endpoint import EndpointError, find_endpoint
from prefetchd.node.door import DoorError
from prefetchd.node.http import AddressError
from prefetchd.node.lock import AlreadyRunning
from prefetchd.plain_errors import plain_errors
from prefetchd.top import NoDaemon, ask_stats, show_stats, watch

EXPECTED = (AddressError, AlreadyRunning, DoorError, EndpointError, KeysError, NoDaemon)


@click.command("serve")
@click.option("--verbose", is_flag=True, help="Say more of what happens, on standard error.")
@plain_errors(*EXPECTED)
def serve_command(verbose: bool) -> int:
    """Run the daemon of this node: engines attach to it, it compiles ahead for them."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s: %(message)s",
        stream=sys.stderr,
    )
    serve(load_settings(), os.environ)
    return 0


@click.command("stats")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@plain_errors(*EXPECTED)
def stats_command(as_json: bool) -> int:
    """Show the figures of the running daemon."""
    stats = ask_stats(find_endpoint(os.environ, load_settings().endpoint))
    if as_json:
        click.echo(msgspec.json.encode(msgspec.to_builtins(stats)))
    else:
        show_stats(stats, Console(markup=False))
    return 0


@click.command("top")
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds.")
@plain_errors(*EXPECTED)
def top_command(interval: float) -> int:
    """Watch the running daemon, until Ctrl-C."""
    endpoint = find_endpoint(os.environ, load_settings().endpoint)
    # There is no other way to end it, so it is no failure.
    with contextlib.suppress(KeyboardInterrupt):
        watch(endpoint, Console(markup=False), interval)
    return 0


@click.command("keygen")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@plain_errors(*EXPECTED)
def keygen_command(as_json: bool) -> int:
    """Make this node's pair of CURVE keys, for daemons and clients that meet by TCP."""
    directory = keys_directory(load_settings(), os.environ)
    public = generate_keys(directory)
    if as_json:
        click.echo(msgspec.json.encode({"directory": str(directory), "public_key": public}))
        return 0
    click.echo(f"wrote {directory}/daemon.key and daemon.key_secret")
    click.echo("add to prefetchd.toml of those who may talk to it:")
    click.echo(f'allow_peers = ["{public}"]')
    click.echo("and, where this node's daemon listens, to that of engines on other nodes:")
    click.echo(f'server_key = "{public}"')
    return 0
