"""CuTe kernels beside a running engine: it attaches to a daemon, and its universe fills the store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("cutlass.cute")

from cute_site import HERE, VARIABLE, Site, read_only_store

from prefetchd.cute.artifacts import names

PREFETCHD = Path(sys.executable).with_name("prefetchd")
LIMIT_S = 120
PROFILE = HERE / "cute_pools.profile.toml"
# Aligned and ragged prefills, and decodes of one, two and four sequences.
VARIANTS = 5
# As many as the engine's pool of states has.
SLOTS = 8


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, "the daemon ended"
        assert time.monotonic() < limit, "it takes too long"
        time.sleep(0.05)


@contextmanager
def served(site: Site, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with (site.place / "daemon.log").open("w") as log:
        daemon = subprocess.Popen(
            [str(PREFETCHD), "serve"], env=environment, cwd=site.place, stdout=log, stderr=log, text=True
        )
        try:
            stats = [str(PREFETCHD), "stats", "--json"]
            until(
                lambda: (
                    subprocess.run(
                        stats, env=environment, cwd=site.place, capture_output=True, check=False
                    ).returncode
                    == 0
                ),
                daemon,
            )
            yield daemon
        finally:
            daemon.terminate()
            daemon.wait(LIMIT_S)


def environment_of(site: Site) -> dict[str, str]:
    """Of the daemon and its engine."""
    (site.place / "run").mkdir(mode=0o700)
    return {
        **site.environment,
        "PREFETCHD": "1",
        "PREFETCHD_ENDPOINT": f"ipc://{site.place}/run/daemon",
        "PREFETCHD_METRICS": "off",
        # A home that no known library has is imported by leave of the daemon's settings only.
        "PREFETCHD_REPLAY_PACKAGES": "cute_kernels",
    }


@contextmanager
def attached(site: Site, environment: dict[str, str], profile: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine that has attached; it stays until it is given a line."""
    script = [sys.executable, str(HERE / "cute_attach_process.py"), str(profile), "h200", "4", str(SLOTS)]
    with subprocess.Popen(
        script, env=environment, cwd=site.place, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "attached\n"
        yield engine


def mismatches(site: Site, environment: dict[str, str]) -> dict[str, int]:
    """What the daemon counts as different, by compiler and field."""
    command = [str(PREFETCHD), "stats", "--json"]
    done = subprocess.run(command, env=environment, cwd=site.place, capture_output=True, check=True)
    found: dict[str, int] = json.loads(done.stdout)["tables"]["mismatches"]
    return found


@pytest.mark.slow
def test_an_attached_engines_universe_is_published_under_the_keys_it_looks_for(tmp_path: Path) -> None:
    site = Site(tmp_path)
    environment = environment_of(site)
    # Only the engine knows how many slots it has.
    profile = tmp_path / "any_pool.profile.toml"
    profile.write_text(PROFILE.read_text().replace(f"pool = {SLOTS}\n", "pool = 1\n"))

    with served(site, environment) as daemon, attached(site, environment, profile) as engine:
        until(lambda: len(names(site.root)) == VARIANTS, daemon)
        found = mismatches(site, environment)
        engine.communicate("\n", timeout=LIMIT_S)

    assert found == {}
    answer = site.process("engine-forbidden", "prefill.aligned", "prefill.ragged", "decode")
    assert answer["counts"] == {"hit": 3}


@pytest.mark.slow
def test_the_daemon_names_a_read_only_store_and_the_setting(tmp_path: Path) -> None:
    site = Site(tmp_path)
    environment = environment_of(site)
    (tmp_path / "nothing").mkdir()

    with (
        read_only_store(site, tmp_path / "nothing"),
        served(site, environment) as daemon,
        attached(site, environment, PROFILE) as engine,
    ):
        until(lambda: mismatches(site, environment), daemon)
        found = mismatches(site, environment)
        engine.communicate("\n", timeout=LIMIT_S)

    assert found == {"cute_dsl cache_root": 1}
    log = (tmp_path / "daemon.log").read_text()
    assert f"{site.root}: nothing can be published in this cache directory (Read-only" in log
    assert f"set {VARIABLE} to a directory that is" in log
