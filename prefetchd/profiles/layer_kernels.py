"""Which kernels the linear-attention and state-space layers of a model launch, with one rank's sizes.

These layers are no matrix products: each is a recurrence with a short convolution before it and a gated norm
after it. Tensor parallelism divides their heads, as it does for attention. The flags with which an engine
calls the kernels are not in a model's configuration; a site names a ready-made set (`flag_sets.toml`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prefetchd.profiles.model_sizes import ProfileError, Sizes

# The caller whose flags a new profile has, on fla's own kernels; both are edited in the profile.
DEFAULT_SET = "vllm"
FLA = "fla"
MAMBA = "mamba_ssm"
MAMBA_NOTE = (
    "the convolution is left out: beside mamba_ssm it is a compiled extension. For an engine with one in "
    'Triton set the home of these sites (such as "vllm") and add a site of op = "causal_conv1d", same sizes'
)


class Kernel(NamedTuple):
    """One kernel site on one rank; `flag_set` is empty where the op's own defaults are the engines'."""

    name: str
    op: str
    sizes: dict[str, int]
    home: str = FLA
    flag_set: str = DEFAULT_SET


def no_kernels(_: Sizes) -> Iterator[Kernel]:
    """A model of matrix products and attention alone."""
    yield from ()


def kda_kernels(s: Sizes) -> Iterator[Kernel]:
    """KDA: as many key heads as value heads, all of one width; q, k and v are convolved one by one."""
    width, conv = s.size("linear_attn_config.head_dim"), s.size("linear_attn_config.short_conv_kernel_size")
    heads = s.share("linear_attn_config.num_heads")
    recurrence = {"heads": heads, "key_dim": width, "value_dim": width}
    channels = {"key_channels": heads * width, "value_channels": heads * width}
    yield Kernel("kda.chunk", "chunk_kda", recurrence)
    yield Kernel("kda.recurrent", "fused_recurrent_kda", recurrence)
    yield Kernel("kda.gate", "fused_kda_gate", {"heads": heads, "key_dim": width})
    yield Kernel("kda.conv", "kda_short_conv", channels | {"conv": conv})
    yield Kernel("kda.norm", "kda_gated_norm", {"heads": heads, "dim": width})


def gdn_kernels(s: Sizes) -> Iterator[Kernel]:
    """GDN: several value heads share a key head; q, k and v are convolved together."""
    keys, values = s.share("linear_num_key_heads"), s.share("linear_num_value_heads")
    key_dim, value_dim = s.size("linear_key_head_dim"), s.size("linear_value_head_dim")
    recurrence = {"heads": keys, "value_heads": values, "key_dim": key_dim, "value_dim": value_dim}
    channels = {"key_channels": keys * key_dim, "value_channels": values * value_dim}
    yield Kernel("gdn.chunk", "chunk_gated_delta_rule", recurrence)
    yield Kernel("gdn.recurrent", "fused_recurrent_gated_delta_rule", recurrence)
    yield Kernel("gdn.gate", "fused_gdn_gate", {"heads": values})
    yield Kernel("gdn.conv", "gdn_short_conv", channels | {"conv": s.size("linear_conv_kernel_dim")})
    yield Kernel("gdn.norm", "gdn_gated_norm", {"heads": values, "dim": value_dim})


def nemotron_h_kernels(s: Sizes) -> Iterator[Kernel]:
    """Nemotron-H: Mamba2 layers between a few of attention."""
    yield from _mamba2(s, heads="mamba_num_heads", head_dim="mamba_head_dim", state="ssm_state_size")


def mamba2_kernels(s: Sizes) -> Iterator[Kernel]:
    """Mamba2 alone."""
    yield from _mamba2(s, heads="num_heads", head_dim="head_dim", state="state_size")


def _mamba2(s: Sizes, *, heads: str, head_dim: str, state: str) -> Iterator[Kernel]:
    """Every site has all sizes: strides follow from all of them together.

    The convolution beside mamba_ssm is a compiled extension, so its site is only added for other homes.
    """
    sizes = {
        "heads": s.share(heads),
        "head_dim": s.size(head_dim),
        "groups": _groups(s),
        "state": s.size(state),
        "chunk": s.size("chunk_size"),
        "conv": s.size("conv_kernel"),
    }
    for name, op in (
        ("mamba.prefill", "mamba2_prefill"),
        ("mamba.decode", "mamba2_decode"),
        ("mamba.norm", "gated_norm"),
    ):
        yield Kernel(name, op, sizes, MAMBA, "")


def _groups(s: Sizes) -> int:
    """One rank's groups; a single group is copied to every rank, several are divided."""
    groups = s.size("n_groups")
    if groups == 1:
        return 1
    if groups % s.tp:
        raise ProfileError(
            f"n_groups = {groups} is neither 1 nor divisible by tp = {s.tp}; choose another tp"
        )
    return groups // s.tp
