"""The requests of the Mamba2 family: the state-space scan, its decode step, the convolution and the norm.

Every model layer calls these four. A field is here when it can change which variants are launched: sizes,
types, which optional tensors are passed, and which pointers are not aligned to 16 bytes. Triton compiles
another variant for each of these, and for whether an integer is one or a multiple of 16. The subtle rule is
the row pitch: engines pass slices of one projected buffer, so strides follow from all sizes together.

The ops are named after the family's operations, for each home of the kernels calls its own function by
another name.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from prefetchd.request import Request, Size, SizeOrDefault

DType = Literal["bfloat16", "float16", "float32"]
IndexType = Literal["int32", "int64"]
# The tensors that serving may pass at an address that is no multiple of 16 bytes.
Role = Literal[
    "x",
    "dt",
    "A",
    "B",
    "C",
    "D",
    "z",
    "dt_bias",
    "state",
    "out",
    "seq_idx",
    "cu_seqlens",
    "indices",
    "weight",
]


class Mamba2(Request, frozen=True, kw_only=True):
    """What all four share: one rank's sizes, the type of activations, and where the kernels live.

    `home` is "mamba_ssm", "vllm", "sglang", or the dotted name of a package laid out like either's kernels.
    """

    home: str = "mamba_ssm"
    heads: Size
    head_dim: Size
    groups: Size
    state: Size
    dtype: DType = "bfloat16"
    unaligned: tuple[Role, ...] = ()

    @property
    def inner(self) -> int:
        """A token's elements of x, and of z."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """A token's elements of B, and of C."""
        return self.groups * self.state

    @property
    def channels(self) -> int:
        """A token's x, B and C, which the convolution runs over."""
        return self.inner + 2 * self.mixed

    @property
    def row(self) -> int:
        """A token's z, x, B, C and dt: what the layer's first product writes."""
        return self.inner + self.channels + self.heads


class Mamba2Prefill(Mamba2, frozen=True, kw_only=True, tag="mamba2_prefill"):
    """The chunked scan over `tokens` tokens of any number of sequences.

    Homes that cut chunks at the ends of sequences launch `chunks` of them; 0 is as many as one sequence has.
    """

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    chunk: Size
    chunks: SizeOrDefault = 0
    seq_idx: bool = True
    # Passed together with the wish for the state at each sequence's end.
    cu_seqlens: bool = True
    initial_states: bool = True
    z: bool = False
    d: Literal["heads", "channels", "none"] = "heads"
    dt_bias: bool = True
    dt_softplus: bool = True
    dt_dtype: DType = "bfloat16"
    a_dtype: DType = "float32"
    d_dtype: DType = "float32"
    dt_bias_dtype: DType = "float32"
    state_dtype: DType = "bfloat16"
    index_dtype: IndexType = "int32"


class Mamba2Decode(Mamba2, frozen=True, kw_only=True, tag="mamba2_decode"):
    """One token of `batch` sequences; a head's parameters are expanded views, as every engine has them."""

    sweep_field: ClassVar[str | None] = "batch"

    batch: Size
    # Sequences find their state by `indices` in a larger cache; without, the state is theirs in order.
    indices: bool = False
    index_stride: Size = 1
    # Elements from one state to the next; 0 is one behind the other.
    cache_stride: SizeOrDefault = 0
    z: bool = False
    d: bool = True
    dt_softplus: bool = True
    dt_dtype: DType = "bfloat16"
    a_dtype: DType = "float32"
    d_dtype: DType = "float32"
    dt_bias_dtype: DType = "float32"
    state_dtype: DType = "bfloat16"
    index_dtype: IndexType = "int32"


class CausalConv1d(Mamba2, frozen=True, kw_only=True, tag="causal_conv1d"):
    """The short convolution over x, B and C together, of width `conv`; `decode` is the one-token update.

    The known Triton kernels have the cache's layout compiled in, which only a running engine decides:
    `cache_lines` states of it, `cache_stride` elements apart (0: one behind the other), and the engine's
    block of tokens to align to.
    """

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    conv: Size
    decode: bool = False
    cache_lines: SizeOrDefault = 0
    cache_stride: SizeOrDefault = 0
    block_size: SizeOrDefault = 0
    indices: bool = True
    index_stride: Size = 1
    initial_states: bool = True
    bias: bool = True
    activation: Literal["silu", "none"] = "silu"
    state_dtype: DType = "bfloat16"
    index_dtype: IndexType = "int32"


class GatedNorm(Mamba2, frozen=True, kw_only=True, tag="gated_norm"):
    """The norm over each group of the scan's output, gated by z."""

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    gate: bool = True
    norm_before_gate: bool = False
    # Without, it is the layer norm of the same file.
    rms: bool = True
    bias: bool = False
    weight_dtype: DType = "bfloat16"
