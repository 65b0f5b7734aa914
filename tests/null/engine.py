"""An engine in miniature: a script on the null device that calls DeepGEMM for every M of a profile's sites.

It calls the library as serving engines do and uses nothing of ours but the enumeration of M, so that what it
finds in the cache is no echo of how a provider traced. Its result is a JSON file, since the library prints:
how many calls were made, and the text of each that failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deep_gemm
import torch

from prefetchd.profiles import GemmSite, m_ranges, read_profile

FP8, BF16, FLOAT, INT = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32
PACKED = torch.cuda.get_device_capability()[0] >= 10

Call = Callable[[], Any]


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def row_scales(rows: int, k: int, *lead: int) -> torch.Tensor:
    """As an engine's quantizer writes them: rows fastest, in steps of 16 bytes, four exponents a word."""
    width = -(-k // 512) if PACKED else -(-k // 128)
    padded = empty(INT if PACKED else FLOAT, *lead, width, -(-rows // 4) * 4)
    return padded.transpose(-1, -2)[..., :rows, :]


def weight_scales(n: int, k: int, *lead: int) -> torch.Tensor:
    return row_scales(n, k, *lead) if PACKED else empty(FLOAT, *lead, -(-n // 128), -(-k // 128))


def dense(site: GemmSite, m: int) -> Call:
    a, b, d = empty(FP8, m, site.k), empty(FP8, site.n, site.k), empty(BF16, m, site.n)
    scales = row_scales(m, site.k), weight_scales(site.n, site.k)
    return lambda: deep_gemm.fp8_gemm_nt((a, scales[0]), (b, scales[1]), d)


def dense_plain_scales(site: GemmSite) -> Call:
    """Float32 scales one row after another, from which the library makes its own layout by another kernel."""
    a, b, d = empty(FP8, 1, site.k), empty(FP8, site.n, site.k), empty(BF16, 1, site.n)
    sfa = empty(FLOAT, 1, -(-site.k // 128))
    sfb = empty(FLOAT, -(-site.n // 128), -(-site.k // 128))
    return lambda: deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)


def contiguous(site: GemmSite, m: int) -> Call:
    a, b, d = empty(FP8, m, site.k), empty(FP8, site.groups, site.n, site.k), empty(BF16, m, site.n)
    scales = row_scales(m, site.k), weight_scales(site.n, site.k, site.groups)
    group_of_row = empty(INT, m)
    return lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, scales[0]), (b, scales[1]), d, group_of_row)


def masked(site: GemmSite, expected_m: int) -> Call:
    rows = max(128, expected_m)
    a, d = empty(FP8, site.groups, rows, site.k), empty(BF16, site.groups, rows, site.n)
    b = empty(FP8, site.groups, site.n, site.k)
    scales = row_scales(rows, site.k, site.groups), weight_scales(site.n, site.k, site.groups)
    used = empty(INT, site.groups)
    # The older line has it under its older name only.
    names = ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")
    call = next(getattr(deep_gemm, name) for name in names if hasattr(deep_gemm, name))
    return lambda: call((a, scales[0]), (b, scales[1]), d, used, expected_m)


def bf16(site: GemmSite, m: int) -> Call:
    a, b, d = empty(BF16, m, site.k), empty(BF16, site.n, site.k), empty(BF16, m, site.n)
    return lambda: deep_gemm.bf16_gemm_nt(a, b, d)


CALLS: dict[str, Callable[[GemmSite, int], Call]] = {
    "fp8_gemm_nt": dense,
    "m_grouped_fp8_gemm_nt_contiguous": contiguous,
    "m_grouped_fp8_gemm_nt_masked": masked,
    "bf16_gemm_nt": bf16,
}


def calls(path: str, max_tokens: int) -> Iterator[Call]:
    profile = read_profile(path)
    for site in profile.gemms:
        for ms in m_ranges(site, profile, max_tokens):
            for m in ms:
                yield CALLS[site.op](site, m)
        if site.op == "fp8_gemm_nt":
            yield dense_plain_scales(site)


def main() -> None:
    profile, max_tokens, result = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    count = 0
    failed = []
    for call in calls(profile, max_tokens):
        count += 1
        try:
            call()
        except Exception as error:
            failed.append(str(error)[:500])
    result.write_text(json.dumps({"calls": count, "failed": failed}))


if __name__ == "__main__":
    main()
