"""The device a kernel is compiled for.

A target holds every property that a JIT library asks its device for before it decides what to compile. A
wrong number here does not fail: it makes a library choose another variant, and the engine then compiles
again. So presets carry the source of each number, and on a serving host what the engine's real device
reports always wins over a preset.
"""

from __future__ import annotations

import msgspec


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One device model. Sizes are bytes, clocks kHz, the bus width bits."""

    name: str
    major: int
    minor: int
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes_per_block: int = 49152
    shared_bytes_per_block_optin: int
    shared_bytes_per_sm: int
    reserved_shared_bytes_per_block: int = 1024
    registers_per_block: int = 65536
    registers_per_sm: int = 65536
    threads_per_block: int = 1024
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    warp_size: int = 32
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    persisting_l2_bytes: int = 0

    @property
    def capability(self) -> int:
        """Compute capability as the two digits of `sm_90`."""
        return self.major * 10 + self.minor
