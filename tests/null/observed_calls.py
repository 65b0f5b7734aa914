"""What the observed engine of the tests can be told to do, by name. Imports a library when it calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType


def small() -> None:
    """Every class of argument, and an autotuned kernel."""
    from triton_kernels import run_all

    run_all()


def kda() -> None:
    """fla's prefill with a state to go on from and one to keep, then a decode step: what a suspended request
    runs when it comes back. Of each tuner's candidates the first.
    """
    import torch
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    _one_candidate()

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, device="cuda", dtype=dtype)

    for function, tokens in ((chunk_kda, 128), (fused_recurrent_kda, 1)):
        q, k, v, g = (empty(1, tokens, 4, 128) for _ in range(4))
        with torch.no_grad():
            function(
                q,
                k,
                v,
                g.float(),
                empty(1, tokens, 4, dtype=torch.float32),
                initial_state=empty(1, 4, 128, 128, dtype=torch.float32),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )


def _one_candidate() -> None:
    """Tuners with 110 candidates between them take minutes; each keeps its first."""
    import gc

    from triton.runtime.autotuner import Autotuner

    for tuner in gc.get_objects():
        if isinstance(tuner, Autotuner):
            tuner.configs = tuner.configs[:1]


def mamba() -> None:
    """A decode step of mamba_ssm, whose own package cannot be imported without its extensions."""
    import torch

    package = ModuleType("mamba_ssm")
    package.__path__ = [f"{path}/mamba_ssm" for path in sys.path]
    sys.modules["mamba_ssm"] = package
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="cuda")

    selective_state_update(
        empty(2, 8, 64, 128), empty(2, 8, 64), empty(2, 8, 64), empty(8, 64, 128), empty(2, 1, 128),
        empty(2, 1, 128), empty(8, 64), None, empty(8, 64), True,
    )  # fmt: skip


def named(name: str) -> Callable[[], None]:
    """One of these, or a function of `observed_kernels`."""
    if name in ("small", "kda", "mamba"):
        return {"small": small, "kda": kda, "mamba": mamba}[name]
    import observed_kernels

    found: Callable[[], None] = getattr(observed_kernels, name)
    return found
