"""Tensors of the shapes, types and alignments that a request names, as an engine would pass them.

Nothing is ever computed from their contents except from offsets, indices and masks, which are therefore real:
libraries count chunks from them on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

DEVICE = "cuda"

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int32", "int64", "bool")}


class Tensors:
    """Makes the tensors of one request; `unaligned` are the names whose pointer is no multiple of 16."""

    def __init__(self, unaligned: Sequence[str] = ()) -> None:
        self._unaligned = set(unaligned)
        self._made: list[str] = []

    def empty(self, name: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """A contiguous tensor; when unaligned, a view one element behind the start of its memory."""
        self._made.append(name)
        if name not in self._unaligned:
            return torch.empty(tuple(shape), dtype=DTYPES[dtype], device=DEVICE)
        size = math.prod(shape)
        return torch.empty(size + 1, dtype=DTYPES[dtype], device=DEVICE)[1:].view(tuple(shape))

    def pool(self, name: str, shape: Sequence[int], dtype: str, stride: int) -> torch.Tensor:
        """A tensor whose first dimension advances by `stride` elements; 0 is contiguous."""
        size = math.prod(shape[1:])
        if not stride or stride == size:
            return self.empty(name, shape, dtype)
        if stride < size:
            raise ValueError(f"state_stride = {stride}: a state has {size} elements, so they would overlap")
        rows = self.empty(name, (shape[0], stride), dtype)
        inner = torch.empty(tuple(shape[1:]), device="meta").stride()
        return rows.as_strided(tuple(shape), (stride, *inner), rows.storage_offset())

    def integers(
        self, name: str, values: Sequence[int] | Sequence[Sequence[int]], dtype: str
    ) -> torch.Tensor:
        """A tensor on the device that holds these numbers."""
        host = torch.tensor(values, dtype=DTYPES[dtype])
        device = self.empty(name, host.shape, dtype)
        device.copy_(host)
        return device

    def offsets(self, lengths: Sequence[int], dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each sequence starts and the last one ends: on the device, and on the host."""
        values = list(accumulate(lengths, initial=0))
        return self.integers("cu_seqlens", values, dtype), torch.tensor(values, dtype=DTYPES[dtype])

    def check_names(self) -> None:
        """Raises `ValueError` for an unaligned tensor that the call does not have."""
        unknown = sorted(self._unaligned - set(self._made))
        if unknown:
            made = ", ".join(sorted(set(self._made)))
            raise ValueError(f"unaligned: the call has no tensor {unknown[0]!r}; it has {made}")


def equal_lengths(lengths: Sequence[int]) -> tuple[int, int]:
    """Batch and tokens of a dense batch. Raises `ValueError` when its sequences differ in length."""
    if len(set(lengths)) > 1:
        raise ValueError(
            f"tokens = {sum(lengths)}: a dense batch of {len(lengths)} needs equally long sequences"
        )
    return len(lengths), lengths[0]
