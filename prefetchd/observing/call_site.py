"""Where in the engine a kernel was asked for: the first frame that is neither ours, a library's nor torch's.

Walked only when something was compiled. Frames are told by the name of their module, which each holds
already; no file is read.
"""

from __future__ import annotations

import sys
from types import FrameType

# Packages whose frames stand between an engine's call and its compile. Kernel libraries are not among them:
# the place in fla or in an engine that launches a kernel is what people look for.
LIBRARIES = frozenset(
    {
        *("prefetchd", "torch", "triton", "deep_gemm", "cutlass", "tvm_ffi"),
        # Python's own, and what a program begins with when `prefetchd run` reaches into it.
        *("threading", "functools", "concurrent", "importlib", "sitecustomize", "prefetchd_post_import"),
    }
)
# Engines that carry a copy of one under their own name.
VENDORED = (".third_party.deep_gemm", "tensorrt_llm.deep_gemm")
# An engine's stack has some fifty frames.
MAX_FRAMES = 200


def call_site(frame: FrameType | None = None) -> str:
    """`module.function (file:line)`; empty where no frame of the engine is left."""
    frame = frame or sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        # Whoever runs code of his own making may have put anything there.
        module = str(frame.f_globals.get("__name__") or "")
        if module.partition(".")[0] not in LIBRARIES and not any(name in module for name in VENDORED):
            code = frame.f_code
            return f"{module}.{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def outside(frame: FrameType | None, packages: tuple[str, ...]) -> FrameType | None:
    """The first frame whose module's name begins with none of these: who called into them."""
    for _ in range(MAX_FRAMES):
        if frame is None or not str(frame.f_globals.get("__name__", "")).startswith(packages):
            break
        frame = frame.f_back
    return frame
