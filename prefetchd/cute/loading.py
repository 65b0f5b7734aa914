"""Loads an object file into a process that has the DSL, and pays for the DSL's own libraries beforehand.

What a first load costs is nearly all `cutlass`, `tvm_ffi` and the DSL's runtime library; so they are loaded
at attach, before the engine says it is ready. The subtle rule: which way a function is loaded depends on how
it was compiled, and the wrong way fails or, worse, gives something with another call convention.
"""

from __future__ import annotations

import ctypes
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from prefetchd.cute.artifacts import Artifact, Kind
from prefetchd.cute.signatures import callable_as

# Of whoever reads it: the function's class says how it is exported and loaded.
FFI_CLASS = "TVMFFIJitCompiledFunction"
# The runtime's handles stay: an unloaded library would take the functions with it.
_handles: list[ctypes.CDLL] = []


def preload() -> dict[str, float]:
    """Loads what every later load needs, and says how long each took in seconds. Raises `ImportError`."""
    took: dict[str, float] = {}
    for name in ("cutlass.cute", "tvm_ffi"):
        begun = time.perf_counter()
        import_module(name)
        took[name] = time.perf_counter() - begun
    begun = time.perf_counter()
    for library in import_module("cutlass.cute.runtime").find_runtime_libraries(enable_tvm_ffi=True):
        if Path(library).exists():
            _handles.append(ctypes.CDLL(library))
    took["runtime"] = time.perf_counter() - begun
    return took


def load(path: Path, artifact: Artifact) -> Any:
    """The function of an object file. Whatever the DSL raises passes through."""
    ffi = artifact.kind == "tvm_ffi"
    module = import_module("cutlass.cute.runtime").load_module(str(path), enable_tvm_ffi=ffi)
    return callable_as(getattr(module, artifact.symbol), artifact.signature)


def kind_of(compiled: object) -> Kind:
    """How a compiled function is exported and loaded."""
    ffi = any(kind.__name__.startswith(FFI_CLASS) for kind in type(compiled).__mro__)
    return "tvm_ffi" if ffi else "plain"


def export(compiled: Any, kind: Kind, symbol: str, path: Path) -> None:
    """Writes a compiled function as an object file. Whatever the DSL raises passes through."""
    if kind == "tvm_ffi":
        compiled.export_to_c(object_file_path=str(path), function_name=symbol)
    else:
        # `export_to_c` of such a function would write a C header too, for which arguments need annotations.
        path.write_bytes(compiled.dump_to_object(symbol))
