"""Run on the null device: makes requests by the provider and reads each call back as a request.

Reads a JSON list of requests' fields and prints one of what was read: for each request the fields of the call
of its own op, null where the call is no request, or a text where the library refused.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefetchd.observing.deep_gemm_calls import Call, entry_points
from prefetchd.observing.deep_gemm_requests import ALIASES, Library, request_of_call
from prefetchd.protocol import request_from_fields
from prefetchd_providers.deep_gemm import DeepGemmProvider


def read_calls(deep_gemm: Any, found: list[tuple[str, Any]]) -> None:
    """Has each entry point note what its call says before it is made."""
    import torch

    library = Library(
        deep_gemm,
        lambda: torch.cuda.get_device_capability()[0],
        lambda: torch.cuda.get_device_properties().multi_processor_count,
    )

    def noting(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            arguments = Call("deep_gemm", op, function, args, named, "", False).arguments()
            found.append((ALIASES.get(op, op), request_of_call(op, arguments, library)))
            return function(*args, **named)

        return call

    for op, function in list(entry_points(deep_gemm)):
        setattr(deep_gemm, op, noting(op, function))


def attempt(provider: DeepGemmProvider, fields: dict[str, Any]) -> Any:
    found: list[tuple[str, Any]] = []
    import deep_gemm

    read_calls(deep_gemm, found)
    try:
        provider.run(request_from_fields(fields))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    # The provider's own call is the last; a schedule that it needs was asked for before.
    outer = [
        request for op, request in found if op == fields["op"] or (request and request["op"] == fields["op"])
    ]
    return outer[-1] if outer else None


def main() -> None:
    provider = DeepGemmProvider()
    provider.warm_up()
    results: list[Any] = []
    for fields in json.load(sys.stdin):
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report"
            pid = os.fork()
            if pid == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.environ["DG_JIT_CACHE_DIR"] = f"{scratch}/root"
                report.write_text(json.dumps(attempt(provider, fields)))
                os._exit(0)
            os.waitpid(pid, 0)
            results.append(json.loads(report.read_text()) if report.exists() else "died")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
