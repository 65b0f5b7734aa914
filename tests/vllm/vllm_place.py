"""A private home for one model's engines: starts them, replays and bakes for them, and counts from outside.

What an engine compiled is told by its shape log, and beside it by the entries that appeared in its caches and
that no process of ours has made: the engine's own word is not enough.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefetchd.shapelog import Record, log_files, read_log

BIN = Path(sys.executable).parent
ENGINE = Path(__file__).with_name("vllm_engine.py")
MODELS = Path(__file__).with_name("models")
# An engine is up in a minute on two cores and compiles for two; only a failed test waits this long.
LIMIT_S = 900
# torch.compile keeps what it generates in caches of its own, which the null device must not fill.
# FlashInfer compiles whole libraries, for minutes each and with headers that a bare compiler lacks; one test
# switches its sampler on.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
}


# On Blackwell vLLM prefers FlashInfer's ready-made kernels, which it would have to fetch from elsewhere.
BLACKWELL = {
    "attention_backend": "TRITON_MLA",
    "moe_backend": "triton",
}
WITHOUT_MLA = {"attention_backend": "TRITON_ATTN", "moe_backend": "triton"}
OPTIONS = {
    ("b200", "kimi-linear"): BLACKWELL,
    ("b200", "deepseek-v3-fp8"): {**BLACKWELL, "moe_backend": "deep_gemm", "linear_backend": "deep_gemm"},
    ("b200", "qwen3-next"): WITHOUT_MLA,
    ("b200", "nemotron-h"): WITHOUT_MLA,
}


@dataclass(frozen=True)
class Served:
    """How one engine went."""

    up_s: float
    tokens: list[int]
    prompt_s: list[float]
    log: str
    # What it compiled itself.
    records: list[Record]
    # Entries that its caches have more than before, by whomever.
    new_entries: int

    def compiles(self) -> list[tuple[str, str, str]]:
        """Where they were, and what was new in them."""
        return [(one.compiler, one.site, one.changed) for one in self.records]


class Place:
    """One model's private directories. `target` is the device that seems to be there.

    `variables` stand in the environment of every command.
    """

    def __init__(self, root: Path, model: str, target: str = "h200", **variables: str) -> None:
        self.root, self.model, self.target = root, MODELS / model, target
        self._variables = variables
        chosen = OPTIONS.get((target, model), {})
        self._options = [f"{name}={json.dumps(value)}" for name, value in chosen.items()]
        self._runs = 0
        (root / "run").mkdir(parents=True, mode=0o700)

    def environment(self, **variables: str) -> dict[str, str]:
        """Nothing of the user's but what a compiler needs, and where this prefetchd is."""
        kept = {name: os.environ[name] for name in ("PATH", "CUDA_HOME", "PYTHONPATH") if name in os.environ}
        return {
            **kept,
            **VARIABLES,
            **self._variables,
            "HOME": str(self.root),
            "XDG_RUNTIME_DIR": str(self.root / "run"),
            "PREFETCHD_METRICS": "off",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **variables,
        }

    def serve(self, *options: str, daemon: bool = True, **variables: str) -> Served:
        """The engine with `prefetchd run`, beside a daemon or without one. Fails if the engine fails."""
        self._runs += 1
        logs = self.root / f"logs-{self._runs}"
        environment = self.environment(PREFETCHD_LOG_DIR=str(logs), **variables)
        before = self.entries()
        command = [str(BIN / "prefetchd"), "run", *(() if daemon else ("--no-start",)), "--"]
        command += [str(BIN / "prefetchd"), "null", "--target", self.target, "--"]
        command += [sys.executable, str(ENGINE), str(self.model), *self._options, *options]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        log = done.stderr + done.stdout
        (self.root / f"engine-{self._runs}.log").write_text(log)
        assert done.returncode == 0, log[-4000:]
        # An engine's core that is a process of its own may have the last word.
        result = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
        new = len(self.entries() - before)
        return Served(**result, log=log, records=records_in(logs), new_entries=new)

    def entries(self) -> set[Path]:
        """What lies in the engine's caches: a directory a variant. Triton's own launcher is none."""
        triton, deep_gemm = self.root / ".triton/cache", self.root / ".cache/vllm/deep_gemm/cache"
        return {
            entry
            for root in (triton, deep_gemm)
            if root.is_dir()
            for entry in root.iterdir()
            if any(entry.glob("*.cubin"))
        }

    def prefetchd(self, command: str, *arguments: str) -> Any:
        """A command's JSON; any status but 2."""
        done = subprocess.run(
            [str(BIN / "prefetchd"), command, "--json", *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
        assert done.returncode != 2, done.stderr
        return json.loads(done.stdout)

    def replay(self, run: int) -> Any:
        """Compiles ahead what the engine of that number compiled itself."""
        return self.prefetchd("replay", "--target", self.target, str(self.root / f"logs-{run}"))

    def bake(self, *batches: str) -> Any:
        """Bakes this model's engine."""
        options = [part for batch in batches for part in ("--batch", batch)]
        command = [sys.executable, str(ENGINE), str(self.model), *self._options]
        manifest = self.root / "bake.json"
        limits = ("--target", self.target, "--manifest", str(manifest))
        return self.prefetchd("bake", *limits, *options, "--", *command)

    def start_daemon(self) -> subprocess.Popen[bytes]:
        """A daemon as `prefetchd run` would start it."""
        log = (self.root / "daemon.log").open("ab")
        return subprocess.Popen(
            [str(BIN / "prefetchd"), "serve"], env=self.environment(), stdout=log, stderr=log
        )

    def planned(self) -> int:
        """Variants that the running daemon knows from plans; 0 while there is none."""
        done = subprocess.run(
            [str(BIN / "prefetchd"), "stats", "--json"],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        figures = json.loads(done.stdout)["figures"] if done.returncode == 0 else {}
        return sum(
            int(value) for name, value in figures.items() if name.startswith("prefetchd_planned_total")
        )

    def daemon_pid(self) -> int:
        """The process that holds the endpoint."""
        return int((self.root / "run/prefetchd/daemon.lock").read_text())

    def end_daemon(self) -> None:
        """Ends it and waits until it is gone."""
        try:
            pid = self.daemon_pid()
            os.kill(pid, signal.SIGTERM)
        except (OSError, ValueError):
            return
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)

    def forget_kernels(self) -> None:
        """An empty cache again."""
        for entry in (".triton", ".cache"):
            shutil.rmtree(self.root / entry, ignore_errors=True)


def records_in(directory: Path) -> list[Record]:
    """Every compile that engines have logged there."""
    if not directory.is_dir():
        return []
    return [line for file in log_files([directory]) for line in read_log(file) if isinstance(line, Record)]
