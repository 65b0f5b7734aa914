"""An engine with FlashInfer on the null device that calls one small operator, so that its module is needed.

Its answer is one JSON object on the last line: what was observed, or what a capture or a ban has found.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from cute_process import Sink

from prefetchd.compilers.flashinfer_modules import FlashInferModules
from prefetchd.observer import Observer
from prefetchd.observing.flashinfer_modules import FlashInferAdaptor
from prefetchd.shapelog import encode_record
from prefetchd.targets import load_target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["observed", "capture", "forbid"])
    parser.add_argument("--target", required=True)
    parser.add_argument("--served", help="The directory above the one that the served engine uses.")
    arguments = parser.parse_args()
    sink = Sink()
    observer = Observer(sink)
    jobs: bytes = b""
    failure = ""
    with contextlib.ExitStack() as stack:
        capture: Any = None
        if arguments.mode == "observed":
            FlashInferAdaptor().install(observer)
        else:
            environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": arguments.served}
            compiler = FlashInferModules(load_target(arguments.target), environment)
            scratch = Path(tempfile.mkdtemp(dir=arguments.served))
            compiler.prepare(scratch)
            capture = stack.enter_context(getattr(compiler, arguments.mode)(scratch))
        try:
            shape = call()
        except Exception as error:
            shape, failure = [], f"{type(error).__name__}: {error}"
        if capture is not None:
            jobs = msgspec.msgpack.encode(capture.jobs())
    print(
        json.dumps(
            {
                "shape": shape,
                "failure": failure,
                "jobs": base64.b64encode(jobs).decode(),
                "records": [encode_record(record).decode() for record in sink.records],
                "figures": observer.figures(),
            }
        )
    )


def call() -> list[int]:
    import torch
    from flashinfer.activation import silu_and_mul

    return list(silu_and_mul(torch.zeros(4, 256, dtype=torch.float16, device="cuda")).shape)


if __name__ == "__main__":
    main()
