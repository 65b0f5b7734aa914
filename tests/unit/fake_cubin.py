"""Bytes that are a complete cubin as far as its headers tell, made for a test."""

from __future__ import annotations

import struct

HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")


def fake_cubin(
    architecture: int = 90, *, cuda: int = 13, machine: int = 190, body: bytes = b"code" * 16
) -> bytes:
    """One section of `body`. CUDA 13 keeps the architecture in bits 8..15 of the flags, CUDA 12 in 0..7."""
    abi, flags = (
        (8, 0x6000004 | architecture << 8) if cuda == 13 else (7, 0x500 | architecture << 16 | architecture)
    )
    sections_at = HEADER.size + len(body)
    header = HEADER.pack(
        b"\x7fELF",
        2,
        1,
        1,
        0x41,
        abi,
        2,
        machine,
        1,
        0,
        0,
        sections_at,
        flags,
        HEADER.size,
        56,
        0,
        SECTION.size,
        1,
        0,
    )
    return header + body + SECTION.pack(0, 1, 0, 0, HEADER.size, len(body), 0, 0, 1, 0)
