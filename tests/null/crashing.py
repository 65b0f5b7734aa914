"""A script for the null device: traces with the real library a sweep in which requests end the process.

`crashing.py SCRATCH` prints the keys and failures of three traces of it: one undisturbed, one in which two
requests crash, and a proof in which they do.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from prefetchd.compilers import load_compiler
from prefetchd.protocol import Request, sweeps
from prefetchd.requests.deep_gemm import Fp8GemmNt
from prefetchd.targets import load_target
from prefetchd.trace import Mode
from prefetchd.trace_child import Trace, TraceChild
from prefetchd_providers.deep_gemm import DeepGemmProvider

# The first two share a layout.
SWEEP = sweeps(Fp8GemmNt(m=m, n=512, k=512) for m in (1, 2, 64, 130))[0]
CRASHES = frozenset({2, 64})


class Crashing(DeepGemmProvider):
    """Dies as a library dies, in the middle of a request."""

    def __init__(self, at: frozenset[int]) -> None:
        super().__init__()
        self._at = at

    def run(self, request: Request) -> None:
        super().run(request)
        if isinstance(request, Fp8GemmNt) and request.m in self._at:
            # Without torch's handler, which would print for a second.
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)


def traced(mode: Mode, scratch: Path, at: frozenset[int]) -> dict[str, Any]:
    compiler = load_compiler("deep_jit", load_target("h200"), os.environ)
    child = TraceChild(Trace(0, mode, [SWEEP], Crashing(at), [compiler], scratch), 60)
    while True:
        select.select([child.fd], [], [], 60)
        report = child.finish()
        if report is not None:
            failures = [(failure.request, failure.kind, failure.text) for failure in report.failures]
            return {"keys": [job.key for job in report.jobs], "failures": failures}
        child.go_on()


def main() -> None:
    scratch = Path(sys.argv[1])
    DeepGemmProvider().warm_up()
    traces = {
        "whole": traced("capture", scratch / "whole", frozenset()),
        "broken": traced("capture", scratch / "broken", CRASHES),
        "proof": traced("forbid", scratch / "proof", CRASHES),
    }
    print(json.dumps(traces))


if __name__ == "__main__":
    main()
