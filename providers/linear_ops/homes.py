"""Where the kernels of linear attention live: fla itself, an engine's own copy, or any module by its path.

A Triton key contains the source text of a kernel and its line, so a copy of fla inside an engine has keys of
its own, and only the module that the engine imports gives them. Copies also differ in which arguments they
take, and swallow those they do not know in `**kwargs`; so every argument is checked before the call, and one
that would be ignored is `Unavailable`, never a wrong variant.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from prefetchd.provider import Unavailable

FLA = "fla"
# Engines move their kernels now and then; the newer place comes first.
VLLM_OPS = ("vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.fla.ops")
VLLM_KDA = ("vllm.models.kimi_k3.nvidia.ops.third_party", *VLLM_OPS)
VLLM_MAMBA = ("vllm.model_executor.layers.mamba",)
SGLANG_OPS = ("sglang.kernels.ops.attention.fla", "sglang.srt.layers.attention.fla")
SGLANG_LINEAR = ("sglang.kernels.ops.attention.linear", *SGLANG_OPS)
SGLANG_MAMBA = ("sglang.kernels.ops.mamba", "sglang.srt.layers.attention.mamba")
FLA_CONV = ("fla.modules.causal_conv1d", "fla.modules.convolution")
FLA_NORM = ("fla.modules.norm.fused_norm_gate", "fla.modules.fused_norm_gate")


def _in(roots: tuple[str, ...], module: str, function: str) -> tuple[str, ...]:
    return tuple(f"{root}.{module}:{function}" for root in roots)


# "module:function" by home and op, in the order in which they are tried.
ENTRIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    FLA: {
        "chunk_kda": ("fla.ops.kda:chunk_kda",),
        "fused_recurrent_kda": ("fla.ops.kda:fused_recurrent_kda",),
        # The public function passes no pool of states on; engines call the one below it.
        "fused_recurrent_kda.pool": ("fla.ops.kda.fused_recurrent:fused_recurrent_kda_fwd",),
        "fused_kda_gate": ("fla.ops.kda.gate:fused_kda_gate",),
        "chunk_gated_delta_rule": ("fla.ops.gated_delta_rule:chunk_gated_delta_rule",),
        "fused_recurrent_gated_delta_rule": ("fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule",),
        "fused_gdn_gate": ("fla.ops.gated_delta_rule.gate:fused_gdn_gate",),
        "short_conv": tuple(f"{module}:causal_conv1d" for module in FLA_CONV),
        "short_conv.decode": tuple(f"{module}:causal_conv1d_update" for module in FLA_CONV),
        "gated_norm": tuple(f"{module}:rms_norm_gated" for module in FLA_NORM),
    },
    "vllm": {
        "chunk_kda_with_fused_gate": _in(VLLM_KDA, "kda", "chunk_kda_with_fused_gate"),
        "chunk_kda": _in(VLLM_KDA, "kda", "chunk_kda"),
        "fused_recurrent_kda": _in(VLLM_KDA, "kda", "fused_recurrent_kda"),
        "fused_recurrent_kda_packed_decode": _in(VLLM_KDA, "kda", "fused_recurrent_kda_packed_decode"),
        "fused_kda_gate": _in(VLLM_KDA, "kda", "fused_kda_gate"),
        "chunk_gated_delta_rule": _in(VLLM_OPS, "chunk", "chunk_gated_delta_rule"),
        "fused_recurrent_gated_delta_rule": _in(
            VLLM_OPS, "fused_recurrent", "fused_recurrent_gated_delta_rule"
        ),
        "fused_recurrent_gated_delta_rule_packed_decode": _in(
            VLLM_OPS, "fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"
        ),
        "fused_sigmoid_gating_delta_rule_update": _in(
            VLLM_OPS, "fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update"
        ),
        "fused_gdn_gate": (
            *_in(VLLM_MAMBA, "gdn_linear_attn", "fused_gdn_gating"),
            "vllm.model_executor.models.qwen3_next:fused_gdn_gating",
        ),
        "short_conv": _in(VLLM_MAMBA, "ops.causal_conv1d", "causal_conv1d_fn"),
        "short_conv.decode": _in(VLLM_MAMBA, "ops.causal_conv1d", "causal_conv1d_update"),
        "kda_gated_norm": _in(VLLM_OPS, "kda", "rms_norm_gated"),
        "gdn_gated_norm": _in(VLLM_OPS, "layernorm_guard", "rmsnorm_fn"),
    },
    "sglang": {
        "chunk_kda": _in(SGLANG_OPS, "kda", "chunk_kda"),
        "fused_recurrent_kda": _in(SGLANG_OPS, "kda", "fused_recurrent_kda"),
        "fused_recurrent_kda_packed_decode": _in(
            SGLANG_OPS, "fused_recurrent", "fused_recurrent_kda_packed_decode"
        ),
        "fused_kda_gate": _in(SGLANG_OPS, "kda", "fused_kda_gate"),
        "chunk_gated_delta_rule": _in(SGLANG_OPS, "chunk", "chunk_gated_delta_rule"),
        "fused_recurrent_gated_delta_rule": _in(
            SGLANG_OPS, "fused_recurrent", "fused_recurrent_gated_delta_rule"
        ),
        "fused_recurrent_gated_delta_rule_packed_decode": _in(
            SGLANG_OPS, "fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"
        ),
        "fused_sigmoid_gating_delta_rule_update": _in(
            SGLANG_LINEAR, "fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update"
        ),
        "fused_gdn_gate": _in(SGLANG_LINEAR, "fused_gdn_gating", "fused_gdn_gating"),
        "short_conv": _in(SGLANG_MAMBA, "causal_conv1d_triton", "causal_conv1d_fn"),
        "short_conv.decode": _in(SGLANG_MAMBA, "causal_conv1d_triton", "causal_conv1d_update"),
        "kda_gated_norm": _in(SGLANG_OPS, "kda", "rms_norm_gated"),
        "gdn_gated_norm": _in(SGLANG_OPS, "layernorm_gated", "rms_norm_gated"),
        "kda_state_commit": _in(
            SGLANG_MAMBA, "mamba_state_scatter_triton", "fused_mamba_state_scatter_with_mask"
        ),
    },
}


@lru_cache(maxsize=256)
def entry(home: str, *ops: str) -> Callable[..., Any]:
    """The home's function for the first of `ops` that it has. Raises `Unavailable` saying why it has none."""
    if home not in ENTRIES and "." not in home:
        raise Unavailable(
            f"home {home!r} is not known; use one of {', '.join(ENTRIES)}, or the dotted path of the module "
            "that the engine imports"
        )
    tried: list[str] = []
    for op in ops:
        for place in ENTRIES[home].get(op, ()) if home in ENTRIES else (f"{home}:{op}",):
            module, _, name = place.partition(":")
            try:
                return _function(module, name)
            except (ImportError, OSError, RuntimeError, AttributeError) as error:
                tried.append(f"{place}: {error}")
    if not tried:
        raise Unavailable(f"home {home!r} has no {ops[-1]}")
    raise Unavailable(f"home {home!r} gives no {ops[-1]} here: {'; '.join(tried)}")


def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether the function uses an argument of this name: a parameter, or looked up in its `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if argument in parameters:
        return True
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and argument in code.co_consts


def call(home: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls the function with these arguments. Raises `Unavailable` naming one that it would not use."""
    for argument in arguments:
        if not takes(function, argument):
            name = getattr(function, "__name__", repr(function))
            raise Unavailable(
                f"{name} of home {home!r} takes no {argument}; its caller cannot pass it either"
            )
    return function(**arguments)
