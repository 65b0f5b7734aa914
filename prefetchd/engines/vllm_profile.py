"""A rank's profile from what vLLM itself knows: first its configuration, then the modules it has built.

The configuration is there before the weights, so that compiling begins while they load. The modules are
exact: which of them really use DeepGEMM, and with which sizes, vLLM's own warm-up pass finds by walking them,
and the same walk is used here. The subtle rule: a model that our tables do not know is no error. It has no
sites by its configuration and gets those of its modules; what it has beside them is left to the shape log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from prefetchd.profiles import GemmSite, KernelSite, Profile, ProfileError, profile_from_config
from prefetchd.profiles.model_config import CONTEXT_TOKENS

log = logging.getLogger("prefetchd")

HOME = "vllm"
# What vLLM calls beside a family's ops of the model's own tables: gate and beta inside the recurrence, and
# decode by the packed kernel.
VLLM_OPS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "chunk_kda": (("chunk_kda", "vllm"), ("chunk_kda", "vllm-fused-gate")),
    "fused_recurrent_kda": (
        ("fused_recurrent_kda", "vllm"),
        ("fused_recurrent_kda", "vllm-fused-gate"),
        ("fused_recurrent_kda_packed_decode", "vllm"),
    ),
    "fused_recurrent_gated_delta_rule": (
        ("fused_recurrent_gated_delta_rule", "vllm"),
        ("fused_recurrent_gated_delta_rule_packed_decode", "vllm"),
        ("fused_sigmoid_gating_delta_rule_update", "vllm"),
    ),
}
# The one projection whose rows a batch does not bound: it expands the context that is cached already.
CONTEXT_MODULE = "kv_b_proj"
# vLLM pads an expert's rows to this, or less where the library says so; a site without an option means it.
USUAL_ALIGNMENT = 128


def profile_of_config(config: Any) -> Profile:
    """The profile of a `VllmConfig`. Raises what a configuration of another version raises."""
    parallel, model = config.parallel_config, config.model_config
    sizes = {
        "tp": parallel.tensor_parallel_size,
        "ep": parallel.tensor_parallel_size * parallel.data_parallel_size
        if parallel.enable_expert_parallel
        else 1,
        "dp": parallel.data_parallel_size,
    }
    fields = dict(model.hf_config.to_dict())
    fields.setdefault("architectures", list(model.architectures))
    name = str(model.served_model_name or model.model)
    for quantization in (None, "bf16"):
        try:
            found = profile_from_config(fields, quantization=quantization, **sizes)
        except ProfileError as error:
            log.info("prefetchd: %s: the configuration gives no sites: %s", name, error)
            continue
        return msgspec.structs.replace(
            found,
            model=name,
            gemms=found.gemms if found.quantization == "fp8" else (),
            kernels=tuple(_as_vllm_calls(found.kernels)),
        )
    return Profile(
        model=name,
        architecture=", ".join(model.architectures),
        quantization="fp8" if fields.get("quantization_config") else "bf16",
        context_tokens=CONTEXT_TOKENS,
        **sizes,
    )


def with_modules(profile: Profile, model: Any, max_tokens: int) -> Profile:
    """The same with exactly those matrix products that the built model gives to DeepGEMM."""
    gemms = _merged(gemm_sites(model, max_tokens, profile.dp))
    top_k = max((runner.routed_experts.top_k for runner in _expert_runners(model)), default=0)
    return msgspec.structs.replace(profile, gemms=gemms, top_k=top_k or profile.top_k)


def gemm_sites(model: Any, max_tokens: int, dp: int) -> Iterator[GemmSite]:
    """Every product of a module, by the walk of vLLM's own warm-up."""
    from vllm.model_executor.warmup import deep_gemm_warmup as warmup

    for name, module in model.named_modules():
        if (data := warmup._deep_gemm_linear_data(module)) is not None:
            n, k = data[0].shape
            rule = "context" if name.endswith(CONTEXT_MODULE) else "tokens"
            yield GemmSite(name=name, op="fp8_gemm_nt", n=n, k=k, m=rule)
    for runner in _expert_runners(model):
        first, _, second, _, top_k = warmup._extract_data_from_fused_moe_module(runner)
        for what, weight in (("w13", first), ("w2", second)):
            groups, n, k = weight.shape
            for m, options in _expert_rows(max_tokens * dp, top_k, groups):
                name = f"experts.{what}" + "".join(f".{option}{value}" for option, value in options.items())
                yield GemmSite(
                    name=name,
                    op="m_grouped_fp8_gemm_nt_contiguous",
                    n=n,
                    k=k,
                    groups=groups,
                    m=m,
                    options=dict(options),
                )


def _expert_runners(model: Any) -> list[Any]:
    from vllm.model_executor.warmup import deep_gemm_warmup as warmup

    return [one for one in model.modules() if warmup._fused_moe_grouped_gemm_may_use_deep_gemm(one)]


def _expert_rows(max_tokens: int, top_k: int, groups: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Which padded row counts vLLM makes of 1 to `max_tokens` tokens, for each alignment that it uses."""
    from vllm.model_executor.layers.fused_moe.deep_gemm_utils import compute_aligned_M_and_alignment

    rows: dict[int, list[int]] = {}
    for tokens in range(1, max_tokens + 1):
        count, alignment = compute_aligned_M_and_alignment(tokens, top_k, groups, USUAL_ALIGNMENT, None)
        rows.setdefault(alignment, []).append(count)
    for alignment, counts in sorted(rows.items()):
        if alignment == USUAL_ALIGNMENT:
            yield "routed", {}
        else:
            yield f"{min(counts)}..{max(counts)}/{alignment}", {"alignment": alignment}


def _merged(sites: Iterator[GemmSite]) -> tuple[GemmSite, ...]:
    """Layers of equal size once; the context's rule holds every row of the others."""
    found: dict[tuple[Any, ...], GemmSite] = {}
    for site in sites:
        key = (site.op, site.n, site.k, site.groups, *site.options.items())
        if key not in found or (site.m == "context" and found[key].m == "tokens"):
            found[key] = site
    return tuple(found.values())


def _as_vllm_calls(kernels: tuple[KernelSite, ...]) -> Iterator[KernelSite]:
    for site in kernels:
        home = msgspec.structs.replace(site, home=HOME)
        calls = VLLM_OPS.get(site.op)
        if calls is None:
            yield home
            continue
        for op, flag_set in calls:
            yield msgspec.structs.replace(
                home, name=f"{site.name}.{op}.{flag_set}", op=op, flags={"set": flag_set}
            )
