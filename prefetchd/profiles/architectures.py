"""Which matrix products and other kernels a model launches, read from its Hugging Face `config.json`.

Only the sizes that one rank sees matter, and only as engines lay the weights out: projections that read the
same input are fused into one product (`gate_up_proj` is one, 2 x width wide), tensor parallelism divides
columns or rows, and a latent projection that every head needs is kept whole on every rank. The subtle rule
is that a size which does not divide is an error here, as it is in the engine, never a rounded number.

Not listed are products that engines never send to DeepGEMM: the embedding and `lm_head`, the router, MLA's
absorbed decode products (a plain batched matmul) and everything in models that engines run unquantized by
cuBLAS alone (Mamba2). The kernels of linear attention and state-space layers are in `layer_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prefetchd.profiles.layer_kernels import (
    Kernel,
    gdn_kernels,
    kda_kernels,
    mamba2_kernels,
    nemotron_h_kernels,
    no_kernels,
)
from prefetchd.profiles.model_sizes import ProfileError, Sizes

__all__ = ["ARCHITECTURES", "Architecture", "Gemm", "ProfileError", "Sizes"]


class Gemm(NamedTuple):
    """One weight matrix on one rank. `module` is its last name in the checkpoint, `rule` how M is found."""

    name: str
    n: int
    k: int
    module: str
    rule: str = "tokens"
    groups: int = 0


def mlp(s: Sizes, name: str, width: int, what: str) -> Iterator[Gemm]:
    """Gate and up as one product, then down."""
    hidden, local = s.size("hidden_size"), s.split(width, s.tp, what)
    yield Gemm(f"{name}.gate_up_proj", 2 * local, hidden, "gate_proj")
    yield Gemm(f"{name}.down_proj", hidden, local, "down_proj")


def experts(s: Sizes, count_key: str) -> Iterator[Gemm]:
    """The routed experts: `ep` divides their number, otherwise `tp` divides their width."""
    hidden, width = s.size("hidden_size"), s.size("moe_intermediate_size")
    groups = s.split(s.size(count_key), s.ep, count_key, "ep")
    local = width if s.ep > 1 else s.split(width, s.tp, "moe_intermediate_size")
    # Prefill lays the experts' rows out one after another, decode pads each expert to a fixed height.
    for rule in ("routed", "expected"):
        yield Gemm("experts.gate_up_proj", 2 * local, hidden, "gate_proj", rule, groups)
        yield Gemm("experts.down_proj", hidden, local, "down_proj", rule, groups)


def latent_attention(s: Sizes) -> Iterator[Gemm]:
    """MLA: the latent projections are whole on every rank, heads are divided."""
    hidden, heads = s.size("hidden_size"), s.share("num_attention_heads")
    latent, rope = s.size("kv_lora_rank"), s.size("qk_rope_head_dim")
    nope, value = s.size("qk_nope_head_dim"), s.size("v_head_dim")
    if queries := s.optional("q_lora_rank", 0):
        yield Gemm("attention.fused_qkv_a_proj", queries + latent + rope, hidden, "q_a_proj")
        yield Gemm("attention.q_b_proj", heads * (nope + rope), queries, "q_b_proj")
    else:
        yield Gemm("attention.q_proj", heads * (nope + rope), hidden, "q_proj")
        yield Gemm("attention.kv_a_proj", latent + rope, hidden, "kv_a_proj_with_mqa")
    # Prefill expands the cached context of earlier chunks too, whose length the batch does not bound.
    yield Gemm("attention.kv_b_proj", heads * (nope + value), latent, "kv_b_proj", "context")
    yield Gemm("attention.o_proj", hidden, heads * value, "o_proj")


def grouped_attention(s: Sizes, *, gated: bool = False) -> Iterator[Gemm]:
    """Grouped-query attention: fused q, k, v (and an output gate as wide as q), then o."""
    hidden, all_heads, heads = (
        s.size("hidden_size"),
        s.size("num_attention_heads"),
        s.share("num_attention_heads"),
    )
    width = s.optional("head_dim", 0) or s.split(hidden, all_heads, "hidden_size", "num_attention_heads")
    cached = s.optional("num_key_value_heads", all_heads, least=1)
    if cached >= s.tp:
        cached = s.split(cached, s.tp, "num_key_value_heads")
    else:
        # Fewer cached heads than ranks: each rank keeps a copy of one.
        s.split(s.tp, cached, "tp", "num_key_value_heads")
        cached = 1
    yield Gemm("attention.qkv_proj", (heads * (2 if gated else 1) + 2 * cached) * width, hidden, "q_proj")
    yield Gemm("attention.o_proj", hidden, heads * width, "o_proj")


def delta_attention(s: Sizes) -> Iterator[Gemm]:
    """KDA's projections; engines differ in how they fuse those of the input, so both forms are listed."""
    hidden, width = s.size("hidden_size"), s.size("linear_attn_config.head_dim")
    heads = s.split(s.size("linear_attn_config.num_heads"), s.tp, "linear_attn_config.num_heads")
    local = heads * width
    for projection in ("q", "k", "v"):
        yield Gemm(f"kda.{projection}_proj", local, hidden, f"{projection}_proj")
    if s.quantized:
        yield Gemm("kda.qkv_proj", 3 * local, hidden, "q_proj")
    else:
        # Unquantized, q, k, v, b and both low-rank inputs are one product.
        yield Gemm("kda.fused_qkvbfg_a_proj", 3 * local + heads + 2 * width, hidden, "q_proj")
    for gate in ("f", "g"):
        yield Gemm(f"kda.{gate}_a_proj", width, hidden, f"{gate}_a_proj")
        yield Gemm(f"kda.{gate}_b_proj", local, width, f"{gate}_b_proj")
    yield Gemm("kda.b_proj", heads, hidden, "b_proj")
    yield Gemm("kda.o_proj", hidden, local, "o_proj")


def gated_delta_net(s: Sizes) -> Iterator[Gemm]:
    """GDN: q, k, v and z as one product, b and a as another, then out."""
    hidden = s.size("hidden_size")
    key_heads, value_heads = s.share("linear_num_key_heads"), s.share("linear_num_value_heads")
    keys, values = key_heads * s.size("linear_key_head_dim"), value_heads * s.size("linear_value_head_dim")
    yield Gemm("gdn.in_proj_qkvz", 2 * keys + 2 * values, hidden, "in_proj_qkvz")
    yield Gemm("gdn.in_proj_ba", 2 * value_heads, hidden, "in_proj_ba")
    yield Gemm("gdn.out_proj", hidden, values, "out_proj")


def deepseek_v3(s: Sizes) -> Iterator[Gemm]:
    """DeepSeek-V3, R1 and Kimi-K2: MLA, some dense layers, then shared and routed experts."""
    yield from latent_attention(s)
    if s.size("first_k_dense_replace", least=0):
        yield from mlp(s, "dense", s.size("intermediate_size"), "intermediate_size")
    yield from _shared(s, "n_shared_experts")
    yield from experts(s, "n_routed_experts")


def kimi_linear(s: Sizes) -> Iterator[Gemm]:
    """Kimi-Linear: KDA layers and a few MLA layers over the same kinds of MLP as DeepSeek-V3."""
    yield from latent_attention(s)
    yield from delta_attention(s)
    if s.size("first_k_dense_replace", least=0):
        yield from mlp(s, "dense", s.size("intermediate_size"), "intermediate_size")
    yield from _shared(s, "num_shared_experts")
    yield from experts(s, "num_experts")


def qwen3_next(s: Sizes) -> Iterator[Gemm]:
    """Qwen3-Next: GDN layers and gated attention, every layer with shared and routed experts."""
    yield from grouped_attention(s, gated=bool(s.config.get("attn_output_gate", True)))
    yield from gated_delta_net(s)
    if shared := s.optional("shared_expert_intermediate_size", 0):
        yield from mlp(s, "shared_expert", shared, "shared_expert_intermediate_size")
    yield from _qwen_mlps(s)


def qwen3_moe(s: Sizes) -> Iterator[Gemm]:
    """Qwen3 with experts instead of an MLP in all or most layers."""
    yield from grouped_attention(s)
    yield from _qwen_mlps(s)


def dense(s: Sizes) -> Iterator[Gemm]:
    """Llama, Qwen2 and Qwen3: attention and an MLP."""
    yield from grouped_attention(s)
    yield from mlp(s, "mlp", s.size("intermediate_size"), "intermediate_size")


def no_products(_: Sizes) -> Iterator[Gemm]:
    """A model whose matrices engines leave to cuBLAS."""
    yield from ()


def _shared(s: Sizes, key: str) -> Iterator[Gemm]:
    """Shared experts are one MLP as wide as all of them."""
    if count := s.optional(key, 0):
        yield from mlp(
            s, "shared_expert", count * s.size("moe_intermediate_size"), f"{key} x moe_intermediate_size"
        )


def _qwen_mlps(s: Sizes) -> Iterator[Gemm]:
    """Experts everywhere, unless the configuration sets some layers apart as dense."""
    if s.config.get("mlp_only_layers") or s.optional("decoder_sparse_step", 1) > 1:
        yield from mlp(s, "dense", s.size("intermediate_size"), "intermediate_size")
    yield from experts(s, "num_experts")


class Architecture(NamedTuple):
    """How a family's products and kernels are found, and its key for experts a token (None: no experts)."""

    gemms: Callable[[Sizes], Iterator[Gemm]]
    top_k_key: str | None = None
    kernels: Callable[[Sizes], Iterator[Kernel]] = no_kernels


ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekV3ForCausalLM": Architecture(deepseek_v3, "num_experts_per_tok"),
    "KimiLinearForCausalLM": Architecture(kimi_linear, "num_experts_per_token", kda_kernels),
    "Qwen3NextForCausalLM": Architecture(qwen3_next, "num_experts_per_tok", gdn_kernels),
    "NemotronHForCausalLM": Architecture(no_products, kernels=nemotron_h_kernels),
    "Mamba2ForCausalLM": Architecture(no_products, kernels=mamba2_kernels),
    "Qwen3MoeForCausalLM": Architecture(qwen3_moe, "num_experts_per_tok"),
    "LlamaForCausalLM": Architecture(dense),
    "Qwen2ForCausalLM": Architecture(dense),
    "Qwen3ForCausalLM": Architecture(dense),
}
