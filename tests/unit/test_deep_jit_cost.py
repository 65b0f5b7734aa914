"""The queue's order: what compiles longest comes first."""

from __future__ import annotations

import pytest

from prefetchd.compilers.deep_jit_cost import predicted_seconds

SOURCE = """
static void __instantiate_kernel() {{
    auto ptr = reinterpret_cast<void*>(&{kernel}<
        cute::UMMA::Major::K,
        0, 0, 0,
        1,
        64, {block_n}, 128,
        128, 128, 32
    >);
}};
"""


def seconds(kernel: str, block_n: int = 16) -> float:
    return predicted_seconds(SOURCE.format(kernel=kernel, block_n=block_n))


def test_layout_kernels_come_after_gemms_and_wide_gemms_before_both() -> None:
    costs = [
        seconds("sm90_fp8_gemm_1d2d_impl", 192),
        seconds("sm90_fp8_gemm_1d2d_impl", 144),
        seconds("transpose_fp32"),
    ]

    assert costs == sorted(set(costs), reverse=True)


@pytest.mark.parametrize(
    "kernel", ["sm100_fp8_fp4_gemm_1d1d_impl", "sm90_bf16_gemm_impl", "sm90_fp8_mqa_logits"]
)
def test_other_kernels_take_the_usual_time_whatever_their_tile(kernel: str) -> None:
    assert seconds(kernel, 16) == seconds(kernel, 256) == seconds("sm90_fp8_gemm_1d2d_impl", 16)


@pytest.mark.parametrize("source", ["", "no kernel here", "&sm90_fp8_gemm_1d2d_impl<1, 2>"])
def test_any_source_has_a_cost(source: str) -> None:
    assert predicted_seconds(source) > 0
