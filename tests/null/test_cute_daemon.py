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

from cute_site import HERE, Site

from prefetchd.cute.artifacts import names

PREFETCHD = Path(sys.executable).with_name("prefetchd")
LIMIT_S = 120
PROFILE = HERE / "cute_pools.profile.toml"
# Aligned and ragged prefills, and decodes of one, two and four sequences.
VARIANTS = 5


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


@pytest.mark.slow
def test_an_attached_engines_universe_is_published_under_the_keys_it_looks_for(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "run").mkdir(mode=0o700)
    environment = {
        **site.environment,
        "PREFETCHD": "1",
        "PREFETCHD_ENDPOINT": f"ipc://{tmp_path}/run/daemon",
        "PREFETCHD_METRICS": "off",
    }
    script = [sys.executable, str(HERE / "cute_attach_process.py"), str(PROFILE), "h200", "4"]

    with (
        served(site, environment) as daemon,
        subprocess.Popen(
            script, env=environment, cwd=tmp_path, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as engine,
    ):
        assert engine.stdout is not None
        assert engine.stdout.readline() == "attached\n"
        until(lambda: len(names(site.root)) == VARIANTS, daemon)
        done = subprocess.run(
            [str(PREFETCHD), "stats", "--json"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            check=True,
        )
        engine.communicate("\n", timeout=LIMIT_S)

    assert json.loads(done.stdout)["tables"]["mismatches"] == {}
    answer = site.process("engine-forbidden", "prefill.aligned", "prefill.ragged", "decode")
    assert answer["counts"] == {"hit": 3}
