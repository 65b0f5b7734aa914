from __future__ import annotations

import functools
from typing import Any

import pytest
from deep_gemm_tracing import Traced, trace

from prefetchd.protocol import REQUEST_TYPES, Sweep, request_from_fields
from prefetchd.requests.deep_gemm import DeepGemmRequest

LINES = ("new", "old")
# One target for each architecture that the packages know.
ARCHITECTURES = {"sm_90": "h200", "sm_100": "b200", "sm_103": "b300", "sm_120": "rtx-pro-6000"}
SELDOM = (pytest.mark.slow, pytest.mark.ci)
EVERYWHERE = ["sm_90", "sm_100", *(pytest.param(name, marks=SELDOM) for name in ("sm_103", "sm_120"))]

DENSE = {"m": 64, "n": 2048, "k": 1024}
GROUPED = {"groups": 4, **DENSE, "m": 1024}
MASKED = {"groups": 4, "expected_m": 100, "n": 2048, "k": 1024}
K_GROUPED = {"groups": 4, "m": 512, "n": 2048, "k": 1024}
BATCHED = {"expr": "bhr,hdr->bhd", "groups": 16, "m": 128, "n": 512, "k": 128}
EXPERTS = {"tokens": 64, "max_tokens": 1024, "experts": 256, "top_k": 8, "hidden": 7168, "intermediate": 2048}
# A shape for each op. BF16 products only compile where cuBLASLt may not be used.
SHAPES: dict[str, dict[str, Any]] = {
    **{f"fp8_gemm_{majors}": DENSE for majors in ("nt", "nn", "tn", "tt")},
    **{f"bf16_gemm_{majors}": DENSE | {"deterministic": True} for majors in ("nt", "nn", "tn", "tt")},
    "fp8_fp4_gemm_nt": DENSE,
    "fp4_gemm_nt": DENSE,
    "fp8_gemm_nt_skip_head_mid": DENSE,
    **{f"m_grouped_fp8_gemm_{majors}_contiguous": GROUPED for majors in ("nt", "nn")},
    **{f"m_grouped_bf16_gemm_{majors}_contiguous": GROUPED for majors in ("nt", "nn")},
    "m_grouped_fp8_fp4_gemm_nt_contiguous": GROUPED,
    **{f"m_grouped_{types}_gemm_nt_masked": MASKED for types in ("fp8", "fp8_fp4", "bf16")},
    **{
        f"k_grouped_{types}_contiguous": K_GROUPED for types in ("fp8_gemm_tn", "fp8_gemm_nt", "bf16_gemm_tn")
    },
    "k_grouped_fp4_gemm_nt_contiguous": K_GROUPED,
    "einsum": BATCHED,
    "fp8_einsum": BATCHED,
    "tf32_hc_prenorm_gemm": {"m": 128, "n": 24, "k": 7168},
    "transform_sf_into_required_layout": {"mn": 2048, "k": 1024, "block": 1},
    "fp8_mqa_logits": {"tokens": 128, "heads": 64},
    "fp8_fp4_mqa_logits": {"tokens": 128, "heads": 64},
    "get_mqa_logits_metadata": {"tokens": 128, "heads": 64},
    "fp8_paged_mqa_logits": {"batch": 128, "heads": 64},
    "fp8_fp4_paged_mqa_logits": {"batch": 128, "heads": 64},
    "get_paged_mqa_logits_metadata": {"batch": 128},
    "get_sparse_mqa_logits_metadata": {"tokens": 128},
    "get_paged_sparse_mqa_logits_metadata": {"tokens": 128},
    "fp8_fp4_sparse_mqa_logits": {"tokens": 128, "heads": 32},
    "fp8_fp4_paged_sparse_mqa_logits": {"tokens": 128, "heads": 32},
    **{f"{types}_mega_moe": EXPERTS | {"ranks": 8} for types in ("fp8", "fp8_fp4", "bf16")},
    "bf16_mega_gate": {"tokens": 64, "experts": 256, "hidden": 7168, "top_k": 8},
    "mega_mhc": {"tokens": 64, "hidden": 7168},
}

FP4 = {
    "fp8_fp4_gemm_nt",
    "fp4_gemm_nt",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
}
SPARSE = {
    "get_sparse_mqa_logits_metadata",
    "get_paged_sparse_mqa_logits_metadata",
    "fp8_fp4_sparse_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
}
MEGA = {"fp8_fp4_mega_moe", "bf16_mega_moe", "bf16_mega_gate", "mega_mhc"}
LACKING = {
    "new": {"fp8_gemm_nt_skip_head_mid", "fp8_mqa_logits", "fp8_paged_mqa_logits"},
    "old": {
        *SPARSE,
        "get_mqa_logits_metadata",
        "k_grouped_fp4_gemm_nt_contiguous",
        "bf16_mega_gate",
        "mega_mhc",
    },
}
NOT_FOR = {
    "sm_90": {
        *FP4,
        *MEGA,
        *SPARSE,
        "get_mqa_logits_metadata",
        "k_grouped_fp8_gemm_tn_contiguous",
        "k_grouped_fp4_gemm_nt_contiguous",
    },
    "sm_100": {"k_grouped_fp8_gemm_nt_contiguous", "fp8_mega_moe"},
    "sm_103": {"k_grouped_fp8_gemm_nt_contiguous", "fp8_mega_moe"},
    "sm_120": {
        *MEGA,
        "fp8_mega_moe",
        *SPARSE,
        "get_mqa_logits_metadata",
        "k_grouped_fp8_gemm_tn_contiguous",
        "k_grouped_fp8_gemm_nt_contiguous",
        "k_grouped_bf16_gemm_tn_contiguous",
        "k_grouped_fp4_gemm_nt_contiguous",
    },
}
# Calls that a device has to answer with computed values: the newer package measures first how the SMs of
# sm_103 lie, by a kernel with a CUDA runtime of its own.
MEASURED = {("new", "sm_103"): {"fp8_fp4_mega_moe", "bf16_mega_moe"}}


def sweep(op: str, first: int | None = None, last: int | None = None, **fields: Any) -> Sweep:
    """One request, or those from `first` to `last` in the op's sweep field."""
    swept = REQUEST_TYPES[op].sweep_field
    if first is None or last is None or swept is None:
        return Sweep(request_from_fields({"op": op, **fields}))
    return Sweep(request_from_fields({"op": op, swept: first, **fields}), ((first, last + 1, 1),))


@functools.cache
def every_op(line: str, architecture: str) -> dict[str, Traced]:
    found = trace(line, ARCHITECTURES[architecture], [sweep(op, **SHAPES[op]) for op in SHAPES])
    return dict(zip(SHAPES, found, strict=True))


def test_the_table_of_shapes_holds_every_op() -> None:
    assert set(SHAPES) == {op for op, kind in REQUEST_TYPES.items() if issubclass(kind, DeepGemmRequest)}


@pytest.mark.parametrize("architecture", EVERYWHERE)
@pytest.mark.parametrize("line", LINES)
class TestEveryOp:
    def test_traces_at_least_one_variant_where_it_is_available(self, line: str, architecture: str) -> None:
        absent = LACKING[line] | NOT_FOR[architecture] | MEASURED.get((line, architecture), set())
        found = {op: traced for op, traced in every_op(line, architecture).items() if op not in absent}
        assert {op: traced.raised for op, traced in found.items() if traced.raised} == {}
        assert [op for op, traced in found.items() if not traced.variants] == []
        assert len(found) > 20

    def test_is_unavailable_by_name_where_package_or_device_lacks_it(
        self, line: str, architecture: str
    ) -> None:
        found = every_op(line, architecture)
        for op in LACKING[line]:
            assert f"Unavailable: deep_gemm {'0.1.7' if line == 'old' else '0.2'}" in found[op].raised
            assert f"has no {op}" in found[op].raised
        for op in NOT_FOR[architecture] - LACKING[line]:
            assert f"has {op} for sm_" in found[op].raised
            assert f"not for {architecture}" in found[op].raised
        for op in MEASURED.get((line, architecture), set()):
            assert found[op].raised


ROWS = {"scales": "float32", "scale_layout": "rows"}
COLUMNS = {"scales": "float32", "scale_layout": "columns"}
SHAPE = {"n": 2048, "k": 1024}
# Sweeps that run in one program for each line and target, by what they are compared for.
COMPARED = {
    "as wanted": sweep("fp8_gemm_nt", 1, 256, **SHAPE),
    "whole site": sweep("fp8_gemm_nt", 1, 8192, n=2112, k=7168),
    "rows": sweep("fp8_gemm_nt", m=1, **SHAPE, **ROWS),
    "rows, other m and n": sweep("fp8_gemm_nt", m=4096, n=576, k=1024, **ROWS),
    "rows, contiguous": sweep("m_grouped_fp8_gemm_nt_contiguous", groups=8, m=1024, **SHAPE, **ROWS),
    "rows, masked": sweep("m_grouped_fp8_gemm_nt_masked", groups=8, expected_m=64, **SHAPE, **ROWS),
    "rows, other k": sweep("fp8_gemm_nt", m=1, n=2048, k=2048, **ROWS),
    "plain": sweep("fp8_gemm_nt", m=100, **SHAPE),
    "plain in rows": sweep("fp8_gemm_nt", m=100, **SHAPE, **ROWS),
    "plain in columns": sweep("fp8_gemm_nt", m=100, **SHAPE, **COLUMNS),
    "other in columns": sweep("fp8_gemm_nt", m=4, n=576, k=7168, **COLUMNS),
    "few rows reserved": sweep("m_grouped_fp8_gemm_nt_masked", 1, 300, groups=8, m=128, **SHAPE),
    "many rows reserved": sweep("m_grouped_fp8_gemm_nt_masked", 1, 300, groups=8, m=4096, **SHAPE),
    **{majors: sweep(f"fp8_gemm_{majors}", m=96, **SHAPE) for majors in ("nt", "nn", "tn", "tt")},
    "bf16": sweep("bf16_gemm_nt", **DENSE),
    "bf16 without cublas": sweep("bf16_gemm_nt", **DENSE, deterministic=True),
    "aligned by default": sweep("m_grouped_fp8_gemm_nt_contiguous", groups=8, m=1024, **SHAPE),
    "aligned to 128": sweep("m_grouped_fp8_gemm_nt_contiguous", groups=8, m=1024, **SHAPE, alignment=128),
    "aligned to 64": sweep("m_grouped_fp8_gemm_nt_contiguous", groups=8, m=1024, **SHAPE, alignment=64),
    "row-scaled weights": sweep(
        "fp8_gemm_nt", **DENSE, output="float32", accumulate=True, weight_block=1, scales="float32"
    ),
    "on 100 SMs": sweep("fp8_gemm_nt", m=2048, **SHAPE, sms=100),
    "on all SMs again": sweep("fp8_gemm_nt", m=2048, **SHAPE),
    "on as many as there are": sweep("fp8_gemm_nt", m=2048, **SHAPE, sms=132),
    "packed scales": sweep("fp8_gemm_nt", **DENSE, scales="ue8m0"),
}


@functools.cache
def compared(line: str, target: str) -> dict[str, Traced]:
    found = dict(zip(COMPARED, trace(line, target, COMPARED.values()), strict=True))
    for name, traced in found.items():
        assert not traced.raised or (name, target) == ("packed scales", "h200"), name
    return found


def starting(traced: Traced, prefix: str) -> set[str]:
    return {variant for variant in traced.variants if variant.startswith(prefix)}


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize("line", LINES)
class TestScaleLayouts:
    def test_scales_as_the_library_wants_them_launch_no_other_kernel(self, line: str, target: str) -> None:
        assert len(compared(line, target)["as wanted"].kernels) == 1

    def test_scales_in_rows_launch_one_kernel_that_depends_on_k_alone(self, line: str, target: str) -> None:
        found = compared(line, target)
        names = ("rows", "rows, other m and n", "rows, contiguous", "rows, masked", "rows, other k")
        first, *same, other = (starting(found[name], "transpose_") for name in names)
        assert len(first) == len(other) == 1
        assert all(variants == first for variants in same)
        assert other != first

    def test_layout_does_not_change_the_product_itself(self, line: str, target: str) -> None:
        found = compared(line, target)
        plain = set(found["plain"].variants)
        assert plain < set(found["plain in rows"].variants)
        assert plain <= set(found["plain in columns"].variants)

    def test_reserved_rows_of_masked_groups_do_not_choose_a_kernel(self, line: str, target: str) -> None:
        found = compared(line, target)
        assert found["few rows reserved"].variants == found["many rows reserved"].variants

    def test_every_row_count_of_a_site_traces_within_two_seconds(self, line: str, target: str) -> None:
        traced = compared(line, target)["whole site"]
        assert len(traced.variants) > 10
        assert traced.seconds < 2.0


@pytest.mark.parametrize("line", LINES)
def test_unpadded_columns_reach_the_packing_kernel_whatever_the_shape(line: str) -> None:
    found = compared(line, "b200")
    packing = [starting(found[name], "pack_fp32") for name in ("plain in columns", "other in columns")]
    assert len(packing[0]) == 1
    assert packing[0] == packing[1]


@pytest.mark.parametrize("line", LINES)
def test_hopper_transposed_operands_are_the_same_kernels(line: str) -> None:
    found = compared(line, "h200")
    assert len({tuple(found[majors].variants) for majors in ("nt", "nn", "tn", "tt")}) == 1


def test_newer_package_leaves_plain_bf16_to_cublas() -> None:
    found = compared("new", "h200")
    assert found["bf16"].variants == []
    assert found["bf16 without cublas"].kernels == ["sm90_bf16_gemm"]


def test_alignment_of_groups_is_part_of_the_request() -> None:
    found = compared("new", "h200")
    assert found["aligned by default"].variants == found["aligned to 128"].variants
    assert found["aligned by default"].variants != found["aligned to 64"].variants


@pytest.mark.parametrize("line", LINES)
def test_fewer_sms_are_other_kernels(line: str) -> None:
    found = compared(line, "h200")
    assert found["on 100 SMs"].variants != found["on all SMs again"].variants
    assert found["on as many as there are"].variants == found["on all SMs again"].variants


def test_packed_scales_are_refused_on_hopper_with_the_reason() -> None:
    raised = compared("new", "h200")["packed scales"].raised
    assert "packed UE8M0 scales are for sm_100" in raised
    assert "sm_90 takes float32" in raised


def test_weights_scaled_by_row_or_by_block_are_different_kernels_on_hopper() -> None:
    found = compared("new", "h200")
    assert found["row-scaled weights"].kernels == ["sm90_fp8_gemm_1d1d"]
    assert found["plain"].kernels == ["sm90_fp8_gemm_1d2d"]
