"""The indexer's logits: contiguous, paged and block-sparse, with the kernels that schedule them."""

from __future__ import annotations

from typing import Any

import deep_gemm
import torch

from prefetchd.requests.deep_gemm import (
    Fp8Fp4MqaLogits,
    Fp8Fp4PagedMqaLogits,
    Fp8MqaLogits,
    Fp8PagedMqaLogits,
    MqaLogits,
    MqaLogitsMetadata,
    PagedMqaLogits,
    PagedMqaLogitsMetadata,
    PagedSparseMqaLogits,
    PagedSparseMqaLogitsMetadata,
    SparseMqaLogits,
    SparseMqaLogitsMetadata,
)

from .dense import DTYPES
from .driver import BF16, FLOAT, FP4, FP8, INT, Call, Driver, align, drives, given, public

BYTE = torch.uint8
# Bytes of the scale that follows each cached key.
SCALE_BYTES = 4
# Pages of the paged cache; kernels do not depend on it.
PAGES = 16


def values(driver: Driver, role: str, fp4: bool, *shape: int) -> torch.Tensor:
    """Queries or keys: FP8, or FP4 packed two to a byte along the last dimension."""
    if fp4:
        return driver.tensor(role, FP4, *shape[:-1], shape[-1] // 2)
    return driver.tensor(role, FP8, *shape)


def query(
    driver: Driver, request: Fp8Fp4MqaLogits | Fp8Fp4PagedMqaLogits, *shape: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries, with their MX scales where the request or else this package and device want them."""
    wanted = request.scaled
    if wanted is None:
        wanted = request.fp4 or (newer_form() and driver.major == 10)
    return values(driver, "q", request.fp4, *shape), (
        driver.tensor("q_sf", INT, *shape[:-1]) if wanted else None
    )


def newer_form() -> bool:
    """Whether the logits have the newer form: always compressed, MX-scaled and written as BF16 on sm_100."""
    return not hasattr(deep_gemm, "fp8_mqa_logits")


def weights(driver: Driver, rows: int, heads: int) -> torch.Tensor:
    """One weight for each head; the newer API's sm_100 kernels take BF16."""
    dtype = BF16 if newer_form() and driver.major == 10 else FLOAT
    return driver.strided("weights", dtype, (rows, heads), (align(heads, 8), 1))


def logits_options(request: MqaLogits | PagedMqaLogits) -> dict[str, object]:
    """Arguments that only the older form of the API has: newer kernels neither clean nor choose a type."""
    if newer_form():
        return {}
    options: dict[str, object] = {"clean_logits": request.clean_logits}
    if isinstance(request, Fp8Fp4MqaLogits | Fp8Fp4PagedMqaLogits):
        options["logits_dtype"] = DTYPES[request.output]
    return options


def key_range(driver: Driver, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last key of every query."""
    return driver.tensor("k_start", INT, tokens), driver.tensor("k_end", INT, tokens)


@drives(Fp8MqaLogits)
def fp8_mqa_logits(driver: Driver, call: Call, request: Fp8MqaLogits) -> None:
    """The older form: FP8 queries and keys, one float32 scale a key."""
    tokens, heads, dim, keys = request.tokens, request.heads, request.head_dim, request.kv_tokens
    start, end = key_range(driver, tokens)
    call(
        driver.tensor("q", FP8, tokens, heads, dim),
        (driver.weight("kv", FP8, keys, dim), driver.weight("kv_sf", FLOAT, keys)),
        driver.tensor("weights", FLOAT, tokens, heads),
        start,
        end,
        clean_logits=request.clean_logits,
        max_seqlen_k=request.max_seqlen_k,
    )


@drives(Fp8Fp4MqaLogits)
def fp8_fp4_mqa_logits(driver: Driver, call: Call, request: Fp8Fp4MqaLogits) -> None:
    """Both types; the newer form is always compressed, so it needs a bound."""
    tokens, heads, dim, keys = request.tokens, request.heads, request.head_dim, request.kv_tokens
    start, end = key_range(driver, tokens)
    q = query(driver, request, tokens, heads, dim)
    kv_sf = driver.weight("kv_sf", FLOAT if q[1] is None else INT, keys)
    options = logits_options(request)
    if request.scheduled:
        options["schedule_meta"] = public("get_mqa_logits_metadata")(start, end, keys, heads)
    call(
        q,
        (values(driver, "kv", request.fp4, keys, dim), kv_sf),
        weights(driver, tokens, heads),
        start,
        end,
        max_seqlen_k=request.max_seqlen_k or (keys if newer_form() else 0),
        **options,
    )


@drives(MqaLogitsMetadata, majors=(10,))
def get_mqa_logits_metadata(driver: Driver, call: Call, request: MqaLogitsMetadata) -> None:
    """A schedule over all queries."""
    start, end = key_range(driver, request.tokens)
    call(start, end, request.kv_tokens, request.heads)


def varlen(driver: Driver, request: PagedMqaLogits | PagedMqaLogitsMetadata) -> bool:
    """Whether sequences are named by an index tensor: asked for, or all that this package's device takes."""
    if request.varlen is None:
        return newer_form() and driver.major == 10
    return request.varlen


def indices(driver: Driver, request: PagedMqaLogits | PagedMqaLogitsMetadata) -> torch.Tensor | None:
    """The sequence of each row."""
    return driver.tensor("indices", INT, request.batch) if varlen(driver, request) else None


@drives(PagedMqaLogitsMetadata)
def get_paged_mqa_logits_metadata(driver: Driver, call: Call, request: PagedMqaLogitsMetadata) -> None:
    """A schedule for as many SMs as the logits will use."""
    call(
        driver.tensor("context_lens", INT, request.batch, request.next_n),
        request.block_kv,
        deep_gemm.get_num_sms(),
        **given(indices=indices(driver, request)),
    )


def paged_call(driver: Driver, call: Call, request: PagedMqaLogits, q: Any, fp4: bool) -> None:
    """A cache page holds its keys and behind them their scales."""
    batch, next_n, block = request.batch, request.next_n, request.block_kv
    width = (request.head_dim // 2 if fp4 else request.head_dim) + SCALE_BYTES
    call(
        q,
        driver.weight("kv_cache", BYTE, PAGES, block, 1, width),
        weights(driver, batch * next_n, request.heads),
        driver.tensor("context_lens", INT, batch, next_n),
        driver.tensor("block_table", INT, batch, -(-request.max_context // block)),
        driver.weight("schedule", INT, deep_gemm.get_num_sms() + 1, 2),
        request.max_context,
        **logits_options(request),
        **given(indices=indices(driver, request)),
    )


@drives(Fp8PagedMqaLogits)
def fp8_paged_mqa_logits(driver: Driver, call: Call, request: Fp8PagedMqaLogits) -> None:
    """The older form."""
    q = driver.tensor("q", FP8, request.batch, request.next_n, request.heads, request.head_dim)
    paged_call(driver, call, request, q, False)


@drives(Fp8Fp4PagedMqaLogits)
def fp8_fp4_paged_mqa_logits(driver: Driver, call: Call, request: Fp8Fp4PagedMqaLogits) -> None:
    """Both types."""
    q = query(driver, request, request.batch, request.next_n, request.heads, request.head_dim)
    paged_call(driver, call, request, q, request.fp4)


@drives(SparseMqaLogitsMetadata, majors=(10,))
def get_sparse_mqa_logits_metadata(driver: Driver, call: Call, request: SparseMqaLogitsMetadata) -> None:
    """A schedule over selected blocks."""
    sparse_metadata(driver, call, request)


def sparse_metadata(
    driver: Driver, call: Call, request: SparseMqaLogitsMetadata | SparseMqaLogits
) -> torch.Tensor:
    """The metadata that the library makes, which also fixes its size."""
    start, end = key_range(driver, request.tokens)
    found: torch.Tensor = call(
        start,
        end,
        request.kv_tokens,
        driver.tensor("blocks", INT, request.tokens, request.blocks),
        FP4 if request.fp4 else FP8,
        request.block_kv,
        request.unaligned,
    )
    return found


@drives(PagedSparseMqaLogitsMetadata, majors=(10,))
def get_paged_sparse_mqa_logits_metadata(
    driver: Driver, call: Call, request: PagedSparseMqaLogitsMetadata
) -> None:
    """A schedule over selected blocks of a paged cache."""
    paged_sparse_metadata(driver, call, request)


def paged_sparse_metadata(
    driver: Driver, call: Call, request: PagedSparseMqaLogitsMetadata | PagedSparseMqaLogits
) -> torch.Tensor:
    """As `sparse_metadata`."""
    found: torch.Tensor = call(
        driver.tensor("context_lens", INT, request.tokens, 1),
        driver.tensor("block_table", INT, request.tokens, PAGES),
        driver.tensor("indices", INT, request.tokens),
        request.page_kv,
        driver.tensor("blocks", INT, request.tokens, request.blocks),
        FP4 if request.fp4 else FP8,
        request.block_kv,
    )
    return found


def scaled(driver: Driver, role: str, fp4: bool, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values with one packed word of MX scales a row."""
    return values(driver, role, fp4, *shape), driver.tensor(f"{role}_sf", INT, *shape[:-1])


@drives(SparseMqaLogits, majors=(10,))
def fp8_fp4_sparse_mqa_logits(driver: Driver, call: Call, request: SparseMqaLogits) -> None:
    """Logits of the selected blocks only."""
    metadata = sparse_metadata(driver, public("get_sparse_mqa_logits_metadata"), request)
    call(
        scaled(driver, "q", request.fp4, request.tokens, request.heads, request.head_dim),
        scaled(driver, "kv", request.fp4, request.kv_tokens, request.head_dim),
        weights(driver, request.tokens, request.heads),
        metadata,
        request.blocks,
        request.block_kv,
        request.unaligned,
    )


@drives(PagedSparseMqaLogits, majors=(10,))
def fp8_fp4_paged_sparse_mqa_logits(driver: Driver, call: Call, request: PagedSparseMqaLogits) -> None:
    """Logits of the selected blocks of a paged cache, whose pages start at multiples of 128 bytes."""
    metadata = paged_sparse_metadata(driver, public("get_paged_sparse_mqa_logits_metadata"), request)
    width = (request.head_dim // 2 if request.fp4 else request.head_dim) + SCALE_BYTES
    page = align(request.page_kv * width, 128)
    call(
        scaled(driver, "q", request.fp4, request.tokens, 1, request.heads, request.head_dim),
        driver.strided("kv_cache", BYTE, (PAGES, request.page_kv, 1, width), (page, width, width, 1)),
        weights(driver, request.tokens, request.heads),
        metadata,
        request.blocks,
        request.block_kv,
    )
