"""A program the tests start: traces sweeps on the null device, each in a forked child with an empty cache.

Reads sweeps from standard input and writes one JSON list: per sweep its variants, its seconds, and what was
raised or printed. Nothing of the tracing service is used, so that the provider is tested alone.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prefetchd.protocol import Sweep, decode_sweeps
from prefetchd_providers.deep_gemm import DeepGemmProvider


def trace(provider: DeepGemmProvider, sweep: Sweep, scratch: Path) -> dict[str, Any]:
    """What one child found; a child that dies leaves only its status."""
    printed, report = scratch / "printed", scratch / "report"
    pid = os.fork()
    if pid == 0:
        output = os.open(printed, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["DG_JIT_CACHE_DIR"] = str(scratch / "root")
        report.write_text(json.dumps(attempt(provider, sweep)))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    cache = scratch / "root" / "cache"
    variants = (
        sorted(entry.name.removeprefix("kernel.") for entry in cache.iterdir()) if cache.is_dir() else []
    )
    found = json.loads(report.read_text()) if report.exists() else {"raised": f"died with status {status}"}
    return {"variants": variants, "printed": printed.read_text(errors="replace"), **found}


def attempt(provider: DeepGemmProvider, sweep: Sweep) -> dict[str, Any]:
    """Runs the sweep until something raises."""
    # Of CPU: what else runs on this machine is no fault of it.
    begun = time.process_time()
    raised = ""
    try:
        for request in sweep.expand():
            provider.run(request)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return {"seconds": time.process_time() - begun, "raised": raised}


def main() -> None:
    sweeps = decode_sweeps(sys.stdin.buffer.read())
    provider = DeepGemmProvider()
    provider.warm_up()
    found = []
    for sweep in sweeps:
        with tempfile.TemporaryDirectory() as scratch:
            found.append(trace(provider, sweep, Path(scratch)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
