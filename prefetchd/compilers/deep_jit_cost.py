"""How long a DeepGEMM kernel will compile, guessed from its generated source.

Only the order of a queue depends on it: the longest first, so that no long job is left over at the end. CPU
seconds measured with nvcc 13.0 on one x86 core (22 kernels of sgl-deep-gemm 0.2.5, best of two runs):

- scale layout kernels (transpose, pack): 1.5 on sm_90 and on sm_100;
- GEMMs on sm_100: 2.7-2.8 whatever the tile, from 16x128 to 128x256, grouped or not;
- GEMMs on sm_90: 2.3-2.7 up to BLOCK_N = 144 whatever BLOCK_M; then 6.1-6.6 at 160, 4.7-5.4 at 192 and 3.4
  at 256, for BLOCK_M = 64 and 128 alike.
"""

from __future__ import annotations

import re

AUXILIARY_S = 1.5
USUAL_S = 2.7
WIDE_S = 5.0
# The narrowest BLOCK_N that was seen to compile longer, with the kernel and the place of it in its template.
WIDE_BLOCK_N = 160
_WIDE_KERNEL = re.compile(r"&sm90_fp8_gemm_1d2d_impl<([^;]*)")
_BLOCK_N_INDEX = 5
_NUMBER = re.compile(r"(?<![\w:.])\d+")
# Names of what does arithmetic; everything else only rearranges data.
_HEAVY = re.compile(r"&\w*(gemm|mqa|einsum|moe)\w*")


def predicted_seconds(source: str) -> float:
    """Expected CPU seconds of nvcc on a generated source."""
    if not _HEAVY.search(source):
        return AUXILIARY_S
    if match := _WIDE_KERNEL.search(source):
        numbers = _NUMBER.findall(match[1])
        if len(numbers) > _BLOCK_N_INDEX and int(numbers[_BLOCK_N_INDEX]) >= WIDE_BLOCK_N:
            return WIDE_S
    return USUAL_S
