"""Which call serves which request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from prefetchd.protocol import Request, op_of
from prefetchd.provider import Unavailable
from prefetchd.requests.delta import Gate, GatedNorm, PackedDecode, Recurrence, ShortConvolution
from prefetchd.requests.gdn import FusedSigmoidGatingUpdate
from prefetchd.requests.kda import KdaStateCommit

from .around import run_conv, run_gate, run_norm, run_state_commit
from .recurrence import run_gating_update, run_packed_decode, run_recurrence

# The first that fits; special ones come first.
CALLS: tuple[tuple[type[Request], Callable[[Any], None]], ...] = (
    (FusedSigmoidGatingUpdate, run_gating_update),
    (Recurrence, run_recurrence),
    (PackedDecode, run_packed_decode),
    (ShortConvolution, run_conv),
    (GatedNorm, run_norm),
    (Gate, run_gate),
    (KdaStateCommit, run_state_commit),
)


def run(request: Request) -> None:
    """One call of the library, without gradients as engines call it. Raises `Unavailable`."""
    for kind, function in CALLS:
        if isinstance(request, kind):
            with torch.inference_mode():
                function(request)
            return
    raise Unavailable(f"this version knows no op {op_of(request)!r} of linear attention")
