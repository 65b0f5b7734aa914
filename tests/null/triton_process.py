"""A process on the null device that runs the small kernels: traced, proving, or as an engine would.

Its answer is one JSON object on the last line. As an engine it uses Triton as it is.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.triton import Triton
from prefetchd.targets import load_target


def trace(mode: str, target: str, scratch: Path, blocks: list[int]) -> dict[str, Any]:
    compiler = Triton(load_target(target), dict(os.environ))
    compiler.prepare(scratch)
    from triton import knobs
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction
    from triton_kernels import double, run_all, run_blocks

    heard: list[str] = []

    def hook_of_somebody_else(**known: Any) -> None:
        heard.append(known["fn"].name)

    knobs.runtime.jit_cache_hook = hook_of_somebody_else
    before = (JITFunction._do_compile, Autotuner.run, vars(double).copy())
    raised = ""
    with (compiler.capture if mode == "capture" else compiler.forbid)(scratch) as capture:
        try:
            run_blocks(blocks) if blocks else run_all()
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    # What the library itself keeps of a call on an autotuner.
    now = {name: value for name, value in vars(double).items() if name not in ("nargs", "best_config")}
    return {
        "jobs": base64.b64encode(msgspec.msgpack.encode(capture.jobs())).decode(),
        "raised": raised,
        "heard": heard,
        "restored": knobs.runtime.jit_cache_hook is hook_of_somebody_else
        and (JITFunction._do_compile, Autotuner.run, now) == before,
        "chosen": len(double.cache),
    }


def engine() -> dict[str, Any]:
    from triton import knobs

    made: list[str] = []
    found: list[str] = []

    def listener(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        (found if cache_hit else made).append(metadata["hash"])

    knobs.compilation.listener = listener
    from triton_kernels import run_all

    run_all()
    return {"made": made, "found": found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["capture", "forbid", "engine"])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--blocks", type=json.loads, default=[])
    arguments = parser.parse_args()
    if arguments.mode == "engine":
        answer = engine()
    else:
        answer = trace(arguments.mode, arguments.target, arguments.scratch, arguments.blocks)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
