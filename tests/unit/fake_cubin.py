"""Bytes that are a complete cubin as far as its headers tell, made for a test."""

from __future__ import annotations

import struct

HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")


def fake_cubin(
    architecture: int = 90, *, abi: int = 8, machine: int = 190, body: bytes = b"code" * 16
) -> bytes:
    """One section of `body`. ABI version 8 has the architecture in flag bits 8..15, 7 in bits 0..7."""
    flags = 0x6000004 | architecture << 8 if abi == 8 else 0xD00 | architecture << 16 | architecture
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
