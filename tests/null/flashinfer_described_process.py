"""On the null device: many of FlashInfer's modules, each described a second time from its own record.

Its answer is one JSON object on the last line: how many there were, and which were not the same again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import msgspec
import torch
from flashinfer import aot

from prefetchd.compilers.flashinfer_calls import CORE, Module, generate
from prefetchd.compilers.flashinfer_specs import (
    elsewhere,
    library_directories,
    made,
    module_of,
    remember_call,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("staging", type=Path)
    arguments = parser.parse_args()
    owner = sys.modules[CORE].JitSpecNvcc
    owner.__init__ = remember_call(owner.__init__)
    with made() as specs:
        # What the library's own packages hold for this device, but for what needs files from a network.
        aot.gen_all_modules(
            f16_dtype_=[torch.bfloat16],
            f8_dtype_=[torch.float8_e4m3fn],
            fa2_head_dim_=[(128, 128)],
            fa3_head_dim_=[(192, 128)],
            use_sliding_window_=[False],
            use_logits_soft_cap_=[False],
            sm_capabilities=defaultdict(bool, sm75=True, sm90=True),
            add_comm=False,
            add_gemma=False,
            add_oai_oss=False,
            add_moe=False,
            add_act=True,
            add_misc=True,
            add_xqa=False,
        )
    own, _ = library_directories()
    differ = []
    for spec in specs:
        module = msgspec.json.decode(msgspec.json.encode(module_of(spec)), type=Module)
        again: list[str] = []
        if module.call is not None:
            generator = getattr(sys.modules[module.call.module], module.call.function)
            if hasattr(generator, "cache_clear"):
                # As in a process that has not described it yet.
                generator.cache_clear()
            with elsewhere(arguments.staging), made() as others:
                generate(module.call)
                again = [module_of(other, own).key for other in others]
        if module.key not in again:
            differ.append([module.key, module.refused, *again])
    print(json.dumps({"count": len(specs), "differ": differ}))


if __name__ == "__main__":
    main()
