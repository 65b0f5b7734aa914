"""A serving process's view: every request of a profile by the library's own ops on the device that is there.

Usage: deep_gemm_engine.py PROFILE MAX_TOKENS. Prints one JSON object: a row a site with its calls and its
worst call in milliseconds, device time included (each call is synchronised).
"""

from __future__ import annotations

import json
import sys
import time

import torch

from prefetchd.profiles import read_profile
from prefetchd.provider import Limits, load_providers
from prefetchd.targets import probe_target

# Kernels that really run must not read indices from memory that nobody wrote.
torch.empty = torch.zeros


def main(profile: str, max_tokens: str) -> None:
    """Runs the sweeps in order."""
    provider = load_providers(["deep_gemm"])["deep_gemm"]
    provider.warm_up()
    torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    rows = []
    limits = Limits(max_tokens=int(max_tokens), target=probe_target())
    for sweep in provider.universe_sweeps(read_profile(profile), limits):
        worst, begun = 0.0, time.perf_counter()
        for request in sweep.expand():
            start = time.perf_counter()
            provider.run(request)
            torch.cuda.synchronize()
            worst = max(worst, time.perf_counter() - start)
        seconds = time.perf_counter() - begun
        rows.append({"site": sweep.label(), "calls": len(sweep), "worst_ms": worst * 1e3, "seconds": seconds})
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
