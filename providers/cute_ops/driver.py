"""Which call serves which request."""

from __future__ import annotations

import importlib.util
from typing import Any

from prefetchd.protocol import Request, op_of
from prefetchd.provider import Unavailable
from prefetchd.requests.delta import Recurrence
from prefetchd.requests.kda import ChunkKda, FusedKdaDecode, FusedRecurrentKda

from ..cute_homes import FLASHINFER, TENSORRT_LLM, is_cute
from . import flashinfer, pools


def run(request: Request) -> None:
    """One call of the library. Raises `Unavailable`."""
    home: Any = getattr(request, "home", "")
    if not is_cute(home):
        raise Unavailable(f"home {home!r} has no CuTe kernels that are known")
    if home == FLASHINFER and isinstance(request, FusedKdaDecode):
        flashinfer.run_fused_decode(request)
    elif home == FLASHINFER and isinstance(request, (ChunkKda, FusedRecurrentKda)):
        flashinfer.run_kda(request)
    elif home == FLASHINFER and isinstance(request, Recurrence):
        flashinfer.run_gdn(request)
    elif home == TENSORRT_LLM and isinstance(request, ChunkKda):
        pools.run_tensorrt_llm(request)
    elif home not in (FLASHINFER, TENSORRT_LLM) and isinstance(request, Recurrence):
        pools.run_module(request)
    else:
        raise Unavailable(f"home {home!r} has no {op_of(request)} that is called from here")


def load_homes() -> None:
    """Imports what is installed, once, before any trace. Raises `Unavailable` without torch or the DSL."""
    for name in ("torch", "cutlass"):
        if importlib.util.find_spec(name) is None:
            raise Unavailable(f"CuTe kernels need {name}, which is not installed")
    for home in (FLASHINFER, TENSORRT_LLM):
        if importlib.util.find_spec(home) is None:
            continue
        modules = ("flashinfer.kda", "flashinfer.kda_decode", "flashinfer.gdn_prefill")
        for module in modules if home == FLASHINFER else (pools.TRT_PREFILL,):
            try:
                importlib.import_module(module)
            except (ImportError, OSError, RuntimeError):
                # Named by the requests that need it.
                continue
