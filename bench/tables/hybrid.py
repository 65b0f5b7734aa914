"""The kernels of a hybrid model's layers as an engine calls them: KDA, Mamba2, and the products around them.

Real tensors, real functions of the libraries, nothing of ours. Buffers are made once for the largest batch
and a call takes its first rows, as engines do; so a call costs what its kernels and their launches cost. The
contents do not matter for time, except that they are random and not zero.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from types import ModuleType

import torch
from torch.nn.functional import logsigmoid

from tables.hybrid_sites import HEADS, MAMBA, PRODUCTS, WIDTH

BF16, FLOAT, INT, FP8 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), device="cuda", dtype=INT)


class Kda:
    """A KDA layer's recurrence: prefill of packed sequences, decode, and the step after drafts."""

    def __init__(self, tokens: int, sequences: int) -> None:
        from fla.ops.kda import chunk_kda  # type: ignore[import-untyped]
        from fla.ops.kda.fused_recurrent import (  # type: ignore[import-untyped]
            fused_recurrent_kda_fwd,
        )

        self._chunk, self._step = chunk_kda, fused_recurrent_kda_fwd
        self._inputs = {name: random(1, tokens, HEADS, WIDTH) for name in ("q", "k", "v")}
        self._inputs["g"] = logsigmoid(random(1, tokens, HEADS, WIDTH, dtype=FLOAT))
        self._inputs["beta"] = random(1, tokens, HEADS, dtype=FLOAT).sigmoid()
        self._states = torch.zeros(2 * sequences + 1, HEADS, WIDTH, WIDTH, device="cuda")

    def _first(self, tokens: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:, :tokens] for name, tensor in self._inputs.items()}

    def prefill(self, lengths: Sequence[int], *, states: bool = True) -> None:
        """Sequences that go on from a state; without `states`, as a warm-up's new ones."""
        self._chunk(
            **self._first(sum(lengths)),
            initial_state=self._states[: len(lengths)] if states else None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=offsets(lengths),
        )

    def decode(self, sequences: int) -> None:
        """One token for each."""
        self._steps([1] * sequences, ssm_state_indices=torch.arange(sequences, device="cuda", dtype=INT))

    def verify(self, sequences: int, drafts: int) -> None:
        """Several tokens for each, from the state of its last accepted draft."""
        slots = torch.arange(sequences * drafts, device="cuda", dtype=INT).view(sequences, drafts)
        accepted = torch.ones(sequences, device="cuda", dtype=INT)
        self._steps([drafts] * sequences, ssm_state_indices=slots, num_accepted_tokens=accepted)

    def _steps(self, lengths: Sequence[int], **where: torch.Tensor) -> None:
        self._step(
            **self._first(sum(lengths)),
            initial_state=self._states,
            inplace_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=offsets(lengths),
            **where,
        )


class Mamba:
    """A Mamba2 layer: the scan of packed sequences, and one token for each."""

    def __init__(self, tokens: int, sequences: int) -> None:
        _bare_mamba_ssm()
        from mamba_ssm.ops.triton.selective_state_update import (  # type: ignore[import-untyped]
            selective_state_update,
        )
        from mamba_ssm.ops.triton.ssd_combined import (  # type: ignore[import-untyped]
            mamba_chunk_scan_combined,
        )

        self._scan, self._update = mamba_chunk_scan_combined, selective_state_update
        size = MAMBA
        inner, mixed = size.heads * size.head_dim, size.groups * size.state
        self._parts = [inner, mixed, mixed]
        # What the convolution writes, and what the projection does: x, B, C and dt are columns of these.
        self._convolved = random(tokens, inner + 2 * mixed)
        self._projected = random(tokens, 2 * inner + 2 * mixed + size.heads)
        self._a = -random(size.heads, dtype=FLOAT).exp()
        self._d, self._bias = random(size.heads, dtype=FLOAT), random(size.heads, dtype=FLOAT)
        self._state = random(1, size.heads, size.head_dim, size.state)
        self._pool = random(sequences, size.heads, size.head_dim, size.state)

    def _columns(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x, b, c = self._convolved[:tokens].split(self._parts, -1)
        heads, groups = MAMBA.heads, MAMBA.groups
        mixed = (tokens, groups, MAMBA.state)
        dt = self._projected[:tokens, -heads:]
        return x.view(tokens, heads, MAMBA.head_dim), dt, b.view(mixed), c.view(mixed)

    def prefill(self, lengths: Sequence[int], *, states: bool = True) -> None:
        """The scan; without `states`, as a warm-up's new sequences."""
        tokens = sum(lengths)
        x, dt, b, c = (part[None] for part in self._columns(tokens))
        numbers = torch.repeat_interleave(torch.tensor(lengths)).view(1, -1)
        self._scan(
            x,
            dt,
            self._a,
            b,
            c,
            chunk_size=MAMBA.chunk,
            D=self._d,
            dt_bias=self._bias,
            initial_states=self._state if states else None,
            seq_idx=numbers.to("cuda", INT),
            cu_seqlens=offsets(lengths),
            dt_softplus=True,
            return_varlen_states=True,
        )

    def decode(self, sequences: int) -> None:
        """One token for each."""
        x, dt, b, c = self._columns(sequences)
        heads, size = MAMBA.heads, MAMBA.head_dim

        def wide(values: torch.Tensor) -> torch.Tensor:
            return values[..., None].expand(*values.shape, size)

        self._update(
            self._pool[:sequences],
            x,
            wide(dt),
            wide(self._a)[..., None].expand(heads, size, MAMBA.state),
            b,
            c,
            wide(self._d),
            dt_bias=wide(self._bias),
            dt_softplus=True,
        )


class Products:
    """The FP8 products of one layer."""

    def __init__(self, tokens: int) -> None:
        import deep_gemm

        self._call = deep_gemm.fp8_gemm_nt
        self._tensors = [
            (
                random(tokens, k, dtype=FP8),
                random(tokens, k // 128, dtype=FLOAT),
                (random(n, k, dtype=FP8), random(-(-n // 128), k // 128, dtype=FLOAT)),
                torch.empty(tokens, n, device="cuda", dtype=BF16),
            )
            for n, k in PRODUCTS.values()
        ]

    def __call__(self, tokens: int) -> None:
        """All of them on so many rows."""
        for a, scales, weight, out in self._tensors:
            self._call((a[:tokens], scales[:tokens]), weight, out[:tokens])


def _bare_mamba_ssm() -> None:
    # The package's own __init__ wants its compiled extensions, which these kernels do not need.
    package = ModuleType("mamba_ssm")
    package.__path__ = [f"{path}/mamba_ssm" for path in sys.path]
    sys.modules["mamba_ssm"] = package
