"""Which rank of how many this process is, as torch or its launcher says; torch is never imported for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def torch_rank() -> tuple[int, int] | None:
    """Rank and world of torch's process group, once there is one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def environment_rank(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and world as launchers such as torchrun tell them."""
    rank, world = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() else None
