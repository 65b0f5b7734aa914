"""Tensors as engines pass them: slices of one projected buffer, at the alignment that a request asks for.

Contents never matter, since nothing is computed. Shape, strides, type and the address modulo 16 are exactly
the engine's, because Triton's variants depend on them. An unaligned role starts one element later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefetchd.requests.mamba import Mamba2

TYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}


class Tensors:
    """Makes the tensors of one request."""

    def __init__(self, request: Mamba2) -> None:
        self._unaligned = frozenset(request.unaligned)

    def strided(
        self, role: str, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> torch.Tensor:
        """A view with these strides, `offset` elements behind an aligned address."""
        offset += role in self._unaligned
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return torch.empty(offset + extent, dtype=TYPES[dtype], device="cuda").as_strided(
            shape, strides, offset
        )

    def contiguous(self, role: str, dtype: str, *shape: int) -> torch.Tensor:
        """A tensor of its own."""
        strides = [1] * len(shape)
        for index in range(len(shape) - 1, 0, -1):
            strides[index - 1] = strides[index] * shape[index]
        return self.strided(role, dtype, shape, strides)

    def columns(self, role: str, dtype: str, rows: int, first: int, width: int, pitch: int) -> torch.Tensor:
        """Columns of a matrix whose rows are `pitch` elements long."""
        return self.strided(role, dtype, (rows, width), (pitch, 1), first)
