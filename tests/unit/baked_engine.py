"""An engine of a few lines for tests of `bake`: it answers its order, or fails as it is told."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from prefetchd.baking.order import Answer, read_order, write_answer
from prefetchd.compilers.base import Job


def main(how: str) -> None:
    found = read_order(os.environ)
    assert found is not None
    directory, order = found
    if how == "fails":
        sys.exit("no such model")
    # What every library of an engine leaves: files that hold timings, in the directories it was given.
    for variable, name in TIMINGS.items():
        place = Path(os.environ[variable]) / "deep" / "er"
        place.mkdir(parents=True)
        (place / name).write_text('{"timing": 0.001}')
    job = Job(compiler="triton", key=how, payload=order.phase.encode())
    write_answer(directory, "worker", Answer(pid=os.getpid(), captured=(job,), done=True))
    core = Answer(pid=os.getpid(), schedulers=1, batches=len(order.batches), done=True)
    write_answer(directory, "core", core)
    time.sleep(600)


TIMINGS = {
    "TRITON_CACHE_DIR": "kernel.autotune.json",
    "TORCHINDUCTOR_CACHE_DIR": "kernel.best_config",
    "FLA_CONFIG_DIR": "chunk_kda.json",
    "FLASHINFER_AUTOTUNE_DIR": "autotune.json",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "rank0.json",
    "VLLM_CACHE_ROOT": "startup_plan.json",
    "HOME": ".autotune",
    "XDG_CACHE_HOME": "timings.json",
}

if __name__ == "__main__":
    main(sys.argv[1])
