"""What the tests of `replay` share: an observed engine with its cache and logs, and the command on them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warming import PREFETCHD, TIME_LIMIT_S, Bench

from prefetchd.shapelog import Merged, Record, log_files

HERE = Path(__file__).parent
# In the process of a machine without any provider package, nobody registers one.
NO_PROVIDERS = """\
import importlib.metadata as metadata
known = metadata.entry_points


def entry_points(**wanted):
    return () if wanted.get("group") == "prefetchd.providers" else known(**wanted)


metadata.entry_points = entry_points
"""


@dataclass(frozen=True)
class Replay:
    """How a replay ended."""

    status: int
    result: dict[str, Any]
    err: str

    def counts(self, *names: str) -> tuple[int, ...]:
        return tuple(self.result[name] for name in names)

    @property
    def reasons(self) -> list[str]:
        return [f"{each['kind']}: {each['text']}" for each in self.result["problems"]]


class Machine:
    """A bench on which engines are observed; one with another `cache` starts with an empty one."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.logs = bench.place / "logs"
        self.cache = "first"
        self.changes: dict[str, str] = {}

    def environment(self) -> dict[str, str]:
        root = self.bench.place / self.cache
        own = {
            "DG_JIT_CACHE_DIR": str(root / "deep_gemm"),
            "TRITON_CACHE_DIR": str(root / "triton"),
            "PREFETCHD_LOG_DIR": str(self.logs),
            "PREFETCHD_REPLAY_PACKAGES": "triton_kernels,observed_kernels,winners_kernels",
        }
        found = self.bench.environment({**own, **self.changes})
        found["PYTHONPATH"] = ":".join(filter(None, (found.get("PYTHONPATH"), str(HERE))))
        return found

    def without_providers(self) -> None:
        """From now on no provider is installed, for whatever is started."""
        shadow = self.bench.place / "no-providers"
        shadow.mkdir()
        (shadow / "sitecustomize.py").write_text(NO_PROVIDERS)
        earlier = self.bench.line.environment().get("PYTHONPATH", "")
        self.changes["PYTHONPATH"] = ":".join(filter(None, (str(shadow), earlier)))

    def engine(
        self, *calls: str, forbid: bool = False, measure: bool = False, **changes: str
    ) -> dict[str, Any]:
        """An engine's life: its calls, those that failed, and what was observed."""
        self.bench.nvcc.behave("exit 1" if forbid else "")
        result = self.bench.place / "engine.json"
        command = [
            str(PREFETCHD), "null", "--target", self.bench.target, "--",
            sys.executable, str(HERE / "replay_engine.py"), str(result), *calls,
            *(["--forbid"] if forbid else []), *(["--measure"] if measure else []),
        ]  # fmt: skip
        done = _run(command, {**self.environment(), **changes}, self.bench.place)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    def replay(self, *logs: Path, changes: Mapping[str, str] = {}) -> Replay:
        self.bench.nvcc.behave()
        command = [str(PREFETCHD), "replay", "--target", self.bench.target, "--json", *map(str, logs)]
        done = _run(command, {**self.environment(), **changes}, self.bench.place)
        assert done.stdout, done.stderr
        return Replay(done.returncode, json.loads(done.stdout), done.stderr)

    def records(self) -> list[Record]:
        return list(Merged(log_files([self.logs])))


def _run(command: list[str], environment: dict[str, str], place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, cwd=place, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
