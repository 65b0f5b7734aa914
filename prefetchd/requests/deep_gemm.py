"""The requests of the GEMM family: one type for each DeepGEMM entry point that compiles kernels.

Shapes are named as the library names them: `m` rows of activations, `n` and `k` of the weight, `groups`
experts or batches. A field is here when it can change which kernels are launched, and for no other reason.
Classes with children only share fields; the leaves are the ops.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from prefetchd.request import Request, Size, SizeOrDefault

# Scale factors: float32, or four UE8M0 exponents packed in an int32. `auto` is what engines pass on the
# traced device: float32 on sm_90, packed from sm_100 on. It lets one plan serve every target.
Scales = Literal["auto", "float32", "ue8m0"]
# How the scales of the activations lie in memory: rows fastest with the pitch that TMA wants, rows fastest
# without padding, or one row after another. It decides which layout kernel the library launches first.
ScaleLayout = Literal["tma", "columns", "rows"]
Output = Literal["bfloat16", "float32"]


class DeepGemmRequest(Request, frozen=True, kw_only=True):
    """What every op of the library depends on beside its arguments."""

    # The SMs that the engine told the library to use, as it does to overlap communication; 0 is all of them.
    sms: SizeOrDefault = 0


class DenseGemm(DeepGemmRequest, frozen=True, kw_only=True):
    """One matrix product. `accumulate` passes D as C too; the letters of the op say what is transposed."""

    sweep_field: ClassVar[str | None] = "m"

    m: Size
    n: Size
    k: Size
    output: Output = "bfloat16"
    accumulate: bool = False
    # Which of m, n, k become constants of the kernel; None leaves it to the library.
    compiled_dims: str | None = None


class Fp8Gemm(DenseGemm, frozen=True, kw_only=True):
    """FP8 times FP8, activations scaled by 1 x 128, weights by `weight_block` x 128."""

    scales: Scales = "auto"
    scale_layout: ScaleLayout = "tma"
    weight_block: Literal[1, 128] = 128


class Fp8GemmNt(Fp8Gemm, frozen=True, kw_only=True, tag="fp8_gemm_nt"):
    """Both operands K-major: the one that engines call."""


class Fp8GemmNn(Fp8Gemm, frozen=True, kw_only=True, tag="fp8_gemm_nn"):
    """B given as k x n."""


class Fp8GemmTn(Fp8Gemm, frozen=True, kw_only=True, tag="fp8_gemm_tn"):
    """A given as k x m, B as k x n."""


class Fp8GemmTt(Fp8Gemm, frozen=True, kw_only=True, tag="fp8_gemm_tt"):
    """A given as k x m."""


class Fp8Fp4GemmNt(DenseGemm, frozen=True, kw_only=True, tag="fp8_fp4_gemm_nt"):
    """FP8 activations (1 x `gran_k`) times packed FP4 weights (1 x 32)."""

    gran_k: Literal[32, 128] = 128
    scales: Scales = "auto"
    scale_layout: ScaleLayout = "tma"


class Fp4GemmNt(DenseGemm, frozen=True, kw_only=True, tag="fp4_gemm_nt"):
    """Packed FP4 on both sides, scaled by 1 x 32."""

    scales: Scales = "auto"
    scale_layout: ScaleLayout = "tma"


class Bf16Gemm(DenseGemm, frozen=True, kw_only=True):
    """BF16 times BF16. Newer packages compile only where cuBLASLt may not be used (`deterministic`)."""

    deterministic: bool = False


class Bf16GemmNt(Bf16Gemm, frozen=True, kw_only=True, tag="bf16_gemm_nt"):
    """Both operands K-major."""


class Bf16GemmNn(Bf16Gemm, frozen=True, kw_only=True, tag="bf16_gemm_nn"):
    """B given as k x n."""


class Bf16GemmTn(Bf16Gemm, frozen=True, kw_only=True, tag="bf16_gemm_tn"):
    """A given as k x m, B as k x n."""


class Bf16GemmTt(Bf16Gemm, frozen=True, kw_only=True, tag="bf16_gemm_tt"):
    """A given as k x m."""


class GroupedContiguous(DeepGemmRequest, frozen=True, kw_only=True):
    """Rows of all groups one after another, each group padded to the library's alignment.

    With `psum` the layout holds the end of each group instead of each row's group, and the kernel is chosen
    by `expected_m` rows a group where the caller names it.
    """

    sweep_field: ClassVar[str | None] = "m"

    groups: Size
    m: Size
    n: Size
    k: Size
    psum: bool = False
    expected_m: SizeOrDefault = 0
    # What the engine told the library to align groups to; 0 is the library's own value.
    alignment: SizeOrDefault = 0
    compiled_dims: str | None = None


class Fp8GroupedContiguousNt(
    GroupedContiguous, frozen=True, kw_only=True, tag="m_grouped_fp8_gemm_nt_contiguous"
):
    """FP8 experts, weights K-major."""

    scales: Scales = "auto"
    scale_layout: ScaleLayout = "tma"


class Fp8GroupedContiguousNn(
    GroupedContiguous, frozen=True, kw_only=True, tag="m_grouped_fp8_gemm_nn_contiguous"
):
    """FP8 experts, weights given as k x n."""

    scales: Scales = "auto"
    scale_layout: ScaleLayout = "tma"


class Fp8Fp4GroupedContiguousNt(
    GroupedContiguous, frozen=True, kw_only=True, tag="m_grouped_fp8_fp4_gemm_nt_contiguous"
):
    """FP8 activations (1 x `gran_k`), FP4 experts (1 x 32)."""

    gran_k: Literal[32, 128] = 128
    scales: Scales = "auto"
    scale_layout: ScaleLayout = "tma"


class Bf16GroupedContiguousNt(
    GroupedContiguous, frozen=True, kw_only=True, tag="m_grouped_bf16_gemm_nt_contiguous"
):
    """BF16 experts, weights K-major."""


class Bf16GroupedContiguousNn(
    GroupedContiguous, frozen=True, kw_only=True, tag="m_grouped_bf16_gemm_nn_contiguous"
):
    """BF16 experts, weights given as k x n."""


class GroupedMasked(DeepGemmRequest, frozen=True, kw_only=True):
    """`m` rows reserved for every group, of which about `expected_m` are used (0 reserves one tile)."""

    sweep_field: ClassVar[str | None] = "expected_m"

    groups: Size
    expected_m: Size
    n: Size
    k: Size
    m: SizeOrDefault = 0
    compiled_dims: str | None = None


class Fp8GroupedMaskedNt(GroupedMasked, frozen=True, kw_only=True, tag="m_grouped_fp8_gemm_nt_masked"):
    """FP8 experts."""

    scales: Scales = "auto"
    scale_layout: ScaleLayout = "tma"


class Fp8Fp4GroupedMaskedNt(GroupedMasked, frozen=True, kw_only=True, tag="m_grouped_fp8_fp4_gemm_nt_masked"):
    """FP8 activations (1 x `gran_k`), FP4 experts (1 x 32)."""

    gran_k: Literal[32, 128] = 128
    scales: Scales = "auto"
    scale_layout: ScaleLayout = "tma"


class Bf16GroupedMaskedNt(GroupedMasked, frozen=True, kw_only=True, tag="m_grouped_bf16_gemm_nt_masked"):
    """BF16 experts."""


class KGrouped(DeepGemmRequest, frozen=True, kw_only=True):
    """Per group a product over that group's `k` rows (weight gradients), summed into D when `accumulate`."""

    sweep_field: ClassVar[str | None] = "k"

    groups: Size
    m: Size
    n: Size
    k: Size
    accumulate: bool = True
    psum: bool = False
    compiled_dims: str | None = None


class Fp8KGroupedTn(KGrouped, frozen=True, kw_only=True, tag="k_grouped_fp8_gemm_tn_contiguous"):
    """FP8, both operands given as k x rows."""

    gran_k: Literal[32, 128] = 128


class Fp8KGroupedNt(KGrouped, frozen=True, kw_only=True, tag="k_grouped_fp8_gemm_nt_contiguous"):
    """FP8, both operands K-major within each group."""


class Fp4KGroupedNt(KGrouped, frozen=True, kw_only=True, tag="k_grouped_fp4_gemm_nt_contiguous"):
    """Packed FP4, both operands K-major."""


class Bf16KGroupedTn(KGrouped, frozen=True, kw_only=True, tag="k_grouped_bf16_gemm_tn_contiguous"):
    """BF16, both operands given as k x rows."""


class Einsum(DeepGemmRequest, frozen=True, kw_only=True, tag="einsum"):
    """A BF16 batched product of `groups` pairs, m x k and n x k, whichever letters the expression uses."""

    sweep_field: ClassVar[str | None] = "m"

    expr: Literal["bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr", "bmk,bnk->mn"]
    groups: Size
    m: Size
    n: Size
    k: Size
    output: Output = "bfloat16"
    accumulate: bool = False
    deterministic: bool = False


class Fp8Einsum(DeepGemmRequest, frozen=True, kw_only=True, tag="fp8_einsum"):
    """An FP8 batched product; sizes as in `Einsum`."""

    sweep_field: ClassVar[str | None] = "m"

    expr: Literal["bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr"]
    groups: Size
    m: Size
    n: Size
    k: Size
    output: Output = "bfloat16"
    accumulate: bool = False
    scales: Scales = "auto"
    scale_layout: ScaleLayout = "tma"
    weight_block: Literal[1, 128] = 128


class Fp8GemmNtSkipHeadMid(DeepGemmRequest, frozen=True, kw_only=True, tag="fp8_gemm_nt_skip_head_mid"):
    """A dense product whose output leaves a gap of `middle` between `left` and `right` in every head."""

    sweep_field: ClassVar[str | None] = "m"

    m: Size
    n: Size
    k: Size
    left: Size = 128
    middle: Size = 64
    right: Size = 128
    scales: Scales = "auto"
    scale_layout: ScaleLayout = "tma"


class HcPrenormGemm(DeepGemmRequest, frozen=True, kw_only=True, tag="tf32_hc_prenorm_gemm"):
    """The hyper-connection product with its row norms; `splits` 0 is the call without split-K."""

    sweep_field: ClassVar[str | None] = "m"

    m: Size
    n: Size
    k: Size
    splits: SizeOrDefault = 0


class MqaLogits(DeepGemmRequest, frozen=True, kw_only=True):
    """Indexer logits of `tokens` queries over `kv_tokens` keys; with a bound they are written compressed."""

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    heads: Size
    head_dim: Size = 128
    kv_tokens: Size = 4096
    max_seqlen_k: SizeOrDefault = 0
    clean_logits: bool = False


class Fp8MqaLogits(MqaLogits, frozen=True, kw_only=True, tag="fp8_mqa_logits"):
    """FP8 queries and keys."""


class Fp8Fp4MqaLogits(MqaLogits, frozen=True, kw_only=True, tag="fp8_fp4_mqa_logits"):
    """Queries and keys of one type, FP8 or packed FP4; `scheduled` passes precomputed metadata."""

    fp4: bool = False
    # MX scales on both sides; None is what this package takes for the type on the device.
    scaled: bool | None = None
    output: Output = "float32"
    scheduled: bool = False


class MqaLogitsMetadata(DeepGemmRequest, frozen=True, kw_only=True, tag="get_mqa_logits_metadata"):
    """The schedule that `fp8_fp4_mqa_logits` takes."""

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    heads: Size
    kv_tokens: Size = 4096


class PagedMqaLogits(DeepGemmRequest, frozen=True, kw_only=True):
    """Indexer logits of `batch` decoding sequences, `next_n` tokens each, over a paged cache."""

    sweep_field: ClassVar[str | None] = "batch"

    batch: Size
    heads: Size
    head_dim: Size = 128
    next_n: Size = 1
    block_kv: Size = 64
    max_context: Size = 4096
    clean_logits: bool = False
    # One row a token, sequences named by an index tensor; None is the only form the target's library takes.
    varlen: bool | None = None


class Fp8PagedMqaLogits(PagedMqaLogits, frozen=True, kw_only=True, tag="fp8_paged_mqa_logits"):
    """FP8 queries and cache."""


class Fp8Fp4PagedMqaLogits(PagedMqaLogits, frozen=True, kw_only=True, tag="fp8_fp4_paged_mqa_logits"):
    """Queries and cache of one type, FP8 or packed FP4."""

    fp4: bool = False
    # As for the contiguous logits.
    scaled: bool | None = None
    output: Output = "float32"


class PagedMqaLogitsMetadata(DeepGemmRequest, frozen=True, kw_only=True, tag="get_paged_mqa_logits_metadata"):
    """The schedule that the paged logits take, for as many SMs as they will run on."""

    sweep_field: ClassVar[str | None] = "batch"

    batch: Size
    next_n: Size = 1
    block_kv: Size = 64
    varlen: bool | None = None


class SparseMqaLogitsMetadata(
    DeepGemmRequest, frozen=True, kw_only=True, tag="get_sparse_mqa_logits_metadata"
):
    """The schedule of block-sparse logits: `blocks` selected blocks of `block_kv` keys a query."""

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    blocks: Size = 128
    block_kv: Literal[8, 16] = 16
    kv_tokens: Size = 4096
    fp4: bool = False
    unaligned: bool = False


class PagedSparseMqaLogitsMetadata(
    DeepGemmRequest, frozen=True, kw_only=True, tag="get_paged_sparse_mqa_logits_metadata"
):
    """The same over a paged cache of `page_kv` keys a page."""

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    blocks: Size = 128
    block_kv: Literal[8, 16] = 16
    page_kv: Size = 64
    fp4: bool = False


class SparseMqaLogits(DeepGemmRequest, frozen=True, kw_only=True, tag="fp8_fp4_sparse_mqa_logits"):
    """Block-sparse indexer logits; fields as in its metadata."""

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    heads: Size
    head_dim: Size = 128
    blocks: Size = 128
    block_kv: Literal[8, 16] = 16
    kv_tokens: Size = 4096
    fp4: bool = False
    unaligned: bool = False


class PagedSparseMqaLogits(DeepGemmRequest, frozen=True, kw_only=True, tag="fp8_fp4_paged_sparse_mqa_logits"):
    """Block-sparse indexer logits over a paged cache."""

    sweep_field: ClassVar[str | None] = "tokens"

    tokens: Size
    heads: Size
    head_dim: Size = 128
    blocks: Size = 128
    block_kv: Literal[8, 16] = 16
    page_kv: Size = 64
    fp4: bool = False


class TransformScales(DeepGemmRequest, frozen=True, kw_only=True, tag="transform_sf_into_required_layout"):
    """What an engine does once with float32 weight scales (`block` x `gran_k`) when it loads them."""

    mn: Size
    k: Size
    groups: SizeOrDefault = 0
    block: Literal[1, 128] = 128
    gran_k: Literal[32, 128] = 128
