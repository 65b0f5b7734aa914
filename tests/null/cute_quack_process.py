"""One call of quack's rmsnorm on the null device, observed or traced; answers in JSON: MODE TARGET SCRATCH.

`forbidden`: an engine in which whatever would compile fails.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from cute_process import Sink, forbid_compiling

from prefetchd.compilers.cute_dsl_quack import QuackCute
from prefetchd.observer import Observer
from prefetchd.observing.cute_dsl import CuteDslAdaptor
from prefetchd.shapelog import encode_record
from prefetchd.targets import load_target


def call() -> None:
    import torch

    # The package has a function of the module's name.
    x = torch.zeros(8, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(4096, device="cuda", dtype=torch.bfloat16)
    library: Any = import_module("quack.rmsnorm")
    library.rmsnorm_fwd(x, weight)


def traced(mode: str, target: str, scratch: Path) -> dict[str, Any]:
    compiler = QuackCute(load_target(target), dict(os.environ))
    compiler.prepare(scratch)
    raised = []
    with (compiler.capture if mode == "capture" else compiler.forbid)(scratch) as capture:
        try:
            call()
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    return {"jobs": base64.b64encode(msgspec.msgpack.encode(capture.jobs())).decode(), "raised": raised}


def engine(*, forbidden: bool) -> dict[str, Any]:
    sink = Sink()
    observer = Observer(sink)
    adaptor = CuteDslAdaptor()
    adaptor.install(observer)
    import_module("quack")
    if forbidden:
        forbid_compiling()
    call()
    adaptor.remove()
    return {
        "records": [encode_record(record).decode() for record in sink.records],
        "figures": observer.figures(),
        "open": len(observer.running()),
    }


if __name__ == "__main__":
    mode, target, scratch = sys.argv[1:]
    answer = (
        traced(mode, target, Path(scratch))
        if mode in ("capture", "forbid")
        else engine(forbidden=mode == "forbidden")
    )
    print(json.dumps(answer))
