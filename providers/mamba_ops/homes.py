"""Where the family's functions live: the same kernels exist as the library's and as engines' own copies.

The text of a kernel is part of its key, so a request names its home, and the functions are taken from that
home's own modules. A dotted home is a package laid out like one of the two known ones; which it is shows in
the functions it has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from prefetchd.lean_import import lean_import
from prefetchd.provider import Unavailable

Call = Callable[..., Any]

# Where each known home keeps them, the newest place first.
PACKAGES = {
    "mamba_ssm": ("mamba_ssm.ops.triton",),
    "vllm": ("vllm.model_executor.layers.mamba.ops",),
    "sglang": ("sglang.kernels.ops.mamba.triton_ops", "sglang.srt.layers.attention.mamba.ops"),
}
# Each function by the (module, name) pairs under which homes have it; the first that exists counts.
FUNCTIONS = {
    "scan": (
        ("ssd_combined", "mamba_chunk_scan_combined_varlen"),
        ("ssd_combined", "mamba_chunk_scan_combined"),
    ),
    "update": (
        ("selective_state_update", "selective_state_update"),
        ("mamba_ssm", "selective_state_update"),
    ),
    "conv": (("causal_conv1d", "causal_conv1d_fn"), ("causal_conv1d_triton", "causal_conv1d_fn")),
    "conv_update": (
        ("causal_conv1d", "causal_conv1d_update"),
        ("causal_conv1d_triton", "causal_conv1d_update"),
    ),
    "rms_norm": (("layernorm_gated", "rms_norm_gated"), ("layernorm_gated", "rmsnorm_fn")),
    "layer_norm": (("layernorm_gated", "layernorm_fn"),),
}


class Home:
    """One home's modules, imported on construction. Raises `Unavailable` naming what does not import."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.package, self._modules = _import(name)

    def function(self, what: str) -> Call:
        """A function of `FUNCTIONS`. Raises `Unavailable` where this home has none."""
        for module, name in FUNCTIONS[what]:
            found = getattr(self._modules.get(module), name, None)
            if found is not None:
                return found  # type: ignore[no-any-return]
        known = " or ".join(f"{module}.{name}" for module, name in FUNCTIONS[what])
        raise Unavailable(
            f"the kernels' home {self.name!r} ({self.package}) has no {known}: no Triton kernel to compile"
        )


def accepted(call: Call, **arguments: Any) -> dict[str, Any]:
    """Those keyword arguments that this version of the function has."""
    known = inspect.signature(call).parameters
    return {name: value for name, value in arguments.items() if name in known}


def _import(name: str) -> tuple[str, dict[str, ModuleType]]:
    """The home's package and those of its modules that hold a function of the family."""
    wanted = sorted({module for pairs in FUNCTIONS.values() for module, _ in pairs})
    packages = PACKAGES.get(name, (name,))
    missing: list[str] = []
    for package in packages:
        try:
            return package, lean_import(package, *wanted)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if not (isinstance(error, ModuleNotFoundError) and f"{package}.".startswith(f"{error.name}.")):
                raise Unavailable(
                    f"the kernels' home {name!r} ({package}) does not import: {reason}"
                ) from error
            missing.append(str(error))
    looked = " or ".join(packages)
    raise Unavailable(f"the kernels' home {name!r} ({looked}) is not installed here: {'; '.join(missing)}")
