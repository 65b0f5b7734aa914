"""Imports vLLM, has it load its plug-ins, and says which of its functions are hooked then, as JSON."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import entry_points


def main() -> None:
    # Looking for plug-ins is what vLLM does anyway.
    (point,) = entry_points(group="vllm.general_plugins", name="prefetchd")
    begun = time.perf_counter()
    point.load()()
    seconds = time.perf_counter() - begun
    ours = sorted(name for name in sys.modules if name.startswith("prefetchd"))

    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker, kernel_warmup

    methods = (
        EngineCore.__init__,
        Worker.load_model,
        Worker.initialize_from_config,
        Worker.compile_or_warm_up_model,
        kernel_warmup,
    )
    hooked = [method.__qualname__ for method in methods if hasattr(method, "_prefetchd_wrapped")]
    print(json.dumps({"seconds": seconds, "ours": ours, "hooked": hooked}))


if __name__ == "__main__":
    main()
