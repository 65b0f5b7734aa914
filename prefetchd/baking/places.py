"""The environment of an engine that is baked: on the null device, and with every cache a private one.

What an engine writes there is made up where it was measured, and half of an engine's caches are measurements:
autotuners' choices, the winners of Inductor and FlashInfer, graphs that hold benchmarked decisions. So each
directory that a library writes to is below one that is thrown away. The subtle rule: nothing leaves it by
being copied. What is published is compiled afterwards, from the variants that were named.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from prefetchd.compilers.deep_gemm_package import vllm_default
from prefetchd.compilers.deep_jit import CACHE_VARIABLE as DEEP_GEMM_VARIABLE
from prefetchd.config import BAKE_VARIABLE, ENABLED_VARIABLE
from prefetchd.null_device import launcher
from prefetchd.targets import Target

# By variable the private directory that it names. HOME and XDG hold whatever has no variable of its own.
PRIVATE = {
    "HOME": "home",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "TMPDIR": "tmp",
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "triton-home",
    DEEP_GEMM_VARIABLE: "deep_gemm",
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "vllm-autotune",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "FLASHINFER_AUTOTUNE_DIR": "flashinfer-autotune",
    "FLA_CONFIG_DIR": "fla",
    "CUTE_DSL_CACHE_DIR": "cute",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
}
SWITCHES = {
    ENABLED_VARIABLE: "1",
    # Inductor fuses what it benchmarks, and compiles past the place where variants are named.
    "TORCH_COMPILE_DISABLE": "1",
    # Variants are named in one thread.
    "VLLM_TRITON_JIT_WARMUP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PLUGINS_VARIABLE, PLUGIN = "VLLM_PLUGINS", "prefetchd"


def engine_environment(target: Target, base: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The engine's, whose private directories lie in `directory`. Raises `NullDeviceBroken`, `OSError`."""
    child = dict(base)
    # Configurations and tokenizers of models are read from where the user has them.
    child.setdefault("HF_HOME", str(Path(home_of(base)) / ".cache" / "huggingface"))
    for variable, name in PRIVATE.items():
        place = directory / name
        place.mkdir(parents=True, exist_ok=True)
        child[variable] = str(place)
    child.update(SWITCHES)
    child[BAKE_VARIABLE] = str(directory)
    if PLUGINS_VARIABLE in base and PLUGIN not in base[PLUGINS_VARIABLE].split(","):
        child[PLUGINS_VARIABLE] = ",".join(filter(None, (base[PLUGINS_VARIABLE], PLUGIN)))
    return launcher.environment(target, child)


def served_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the engine will be served: the base, with vLLM's own choice of a directory.

    vLLM chooses one for DeepGEMM whichever package that is, so it is named before a compiler asks.
    """
    served = dict(base)
    if DEEP_GEMM_VARIABLE not in base and find_spec("vllm") is not None:
        served[DEEP_GEMM_VARIABLE] = str(vllm_default(base, Path(home_of(base))))
    return served


def home_of(environment: Mapping[str, str]) -> str:
    """The user's, as the libraries find it."""
    return environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111  Path.home() raises without one
