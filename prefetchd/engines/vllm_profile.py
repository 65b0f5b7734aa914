"""A rank's profile from what vLLM itself knows: first its configuration, then the modules it has built.

The configuration is there before the weights, so that compiling begins while they load. The modules are
exact: which of them really use DeepGEMM, and with which sizes, vLLM's own warm-up pass finds by walking them,
and the same walk is used here. The subtle rule: its judgement is asked, never copied, since it depends on
versions, variables and devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from prefetchd.engines.profile import Engine, engine_profile
from prefetchd.profiles import GemmSite, Profile

# Gate and beta are computed inside the recurrence or before it, by release and device, and decode takes the
# packed kernel where the layout allows.
VLLM = Engine(
    "vllm",
    {
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
    },
)
# The one projection whose rows a batch does not bound: it expands the context that is cached already.
CONTEXT_MODULE = "kv_b_proj"
# vLLM pads an expert's rows to this, or less where the library says so; a site without an option means it.
USUAL_ALIGNMENT = 128


def profile_of_config(config: Any) -> Profile:
    """The profile of a `VllmConfig`. Raises what a configuration of another version raises."""
    parallel, model = config.parallel_config, config.model_config
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    fields = dict(model.hf_config.to_dict())
    fields.setdefault("architectures", list(model.architectures))
    return engine_profile(
        fields,
        str(model.served_model_name or model.model),
        VLLM,
        tp=parallel.tensor_parallel_size,
        ep=ranks if parallel.enable_expert_parallel else 1,
        dp=parallel.data_parallel_size,
    )


def state_slots(caches: Any) -> int:
    """How many recurrent states a `KVCacheConfig` has room for; 0 for a model that keeps none.

    A layer's states are one tensor with a place for each block, whatever other layers keep in the others.
    """
    return int(caches.num_blocks) if caches.has_mamba_layers else 0


def with_modules(profile: Profile, model: Any, max_tokens: int) -> Profile:
    """The same with exactly those matrix products that the built model gives to DeepGEMM."""
    runners = _expert_runners(model)
    gemms = _merged([*_linears(model), *_experts(runners, max_tokens * profile.dp)])
    top_k = max((runner.routed_experts.top_k for runner in runners), default=0)
    return msgspec.structs.replace(profile, gemms=gemms, top_k=top_k or profile.top_k)


def has_other_products(model: Any) -> bool:
    """Whether vLLM's DeepGEMM pass would make kernels that no site of ours names."""
    from vllm.model_executor.warmup import deep_gemm_warmup as warmup

    return any(warmup._mega_moe_may_use_deep_gemm(module) for module in model.modules())


def _linears(model: Any) -> Iterator[GemmSite]:
    from vllm.model_executor.warmup import deep_gemm_warmup as warmup

    for name, module in model.named_modules():
        if (data := warmup._deep_gemm_linear_data(module)) is not None:
            n, k = data[0].shape
            rule = "context" if name.endswith(CONTEXT_MODULE) else "tokens"
            yield GemmSite(name=name, op="fp8_gemm_nt", n=n, k=k, m=rule)


def _expert_runners(model: Any) -> list[Any]:
    from vllm.model_executor.warmup import deep_gemm_warmup as warmup

    return [one for one in model.modules() if warmup._fused_moe_grouped_gemm_may_use_deep_gemm(one)]


def _experts(runners: list[Any], max_tokens: int) -> Iterator[GemmSite]:
    from vllm.model_executor.warmup import deep_gemm_warmup as warmup

    for number, runner in enumerate(runners):
        first, _, second, _, top_k = warmup._extract_data_from_fused_moe_module(runner)
        for what, weight in (("w13", first), ("w2", second)):
            groups, n, k = weight.shape
            for rows, alignment in _expert_rows(max_tokens, top_k, groups):
                yield GemmSite(
                    name=f"experts.{number}.{what}.{alignment}",
                    op="m_grouped_fp8_gemm_nt_contiguous",
                    n=n,
                    k=k,
                    groups=groups,
                    m=rows,
                    options={} if alignment == USUAL_ALIGNMENT else {"alignment": alignment},
                )


def _expert_rows(max_tokens: int, top_k: int, groups: int) -> list[tuple[str, int]]:
    """Which padded row counts vLLM makes of 1 to `max_tokens` tokens, and the alignment of each."""
    from vllm.model_executor.layers.fused_moe.deep_gemm_utils import compute_aligned_M_and_alignment

    rows: dict[int, list[int]] = {}
    for tokens in range(1, max_tokens + 1):
        count, alignment = compute_aligned_M_and_alignment(tokens, top_k, groups, USUAL_ALIGNMENT, None)
        rows.setdefault(alignment, []).append(count)
    return [
        ("routed" if step == USUAL_ALIGNMENT else f"{min(counts)}..{max(counts)}/{step}", step)
        for step, counts in sorted(rows.items())
    ]


def _merged(sites: list[GemmSite]) -> tuple[GemmSite, ...]:
    """Layers of equal size once; the context's rule holds every row of the others."""
    found: dict[tuple[Any, ...], GemmSite] = {}
    for site in sites:
        key = (site.op, site.n, site.k, site.groups, *site.options.items())
        if key not in found or (site.m == "context" and found[key].m == "tokens"):
            found[key] = site
    return tuple(found.values())
