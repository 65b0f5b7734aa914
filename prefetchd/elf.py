"""Is a file a complete cubin, and for which architecture?

A truncated or foreign cubin kills the engine that loads it, so nothing is published or counted as published
before its ELF header was read. The subtle rule: the architecture lies in different bits of `e_flags`, and
the ELF's ABI version says in which; CUDA 12.9 writes both forms. The suffix of the architecture (`a`, `f`) is
in neither: `sm_100`, `sm_100a` and `sm_100f` carry the same flags, measured with nvcc 13.0.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

EM_CUDA = 190
# ABI version 8 has the architecture in bits 8..15 (nvcc 13.0, sm_90a: 0x6005a04, sm_100f: 0x6006402; ptxas
# 12.9, sm_100a: 0x600640a), version 7 in the lowest byte (ptxas 12.9, sm_90a: 0x5a0d5a).
FIRST_ABI_WITH_SHIFTED_ARCHITECTURE = 8

_HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
_CLASS_64 = 2
_LITTLE_ENDIAN = 1
# Each section header is 64 bytes: offset at 24, size at 32; type 8 (NOBITS) takes no place in the file.
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOBITS = 8


class NotAnElf(ValueError):
    """The file is no complete ELF file; the text says what is wrong with it."""


class NotACubin(NotAnElf):
    """The file is no complete cubin; the text says what is wrong with it."""


def cubin_architecture(path: Path) -> int:
    """The number of `sm_<number>` that a complete cubin was compiled for. Raises `NotACubin`, `OSError`."""
    # Not to wait for the writer of a pipe: what a cache holds is anybody's.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotACubin("it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return parse_architecture(file.read())
    finally:
        os.close(descriptor)


def parse_architecture(data: bytes) -> int:
    """As `cubin_architecture`, from the file's content."""
    header = _header(data)
    abi_version, machine, flags = header[5], header[7], header[12]
    if machine != EM_CUDA:
        raise NotACubin(f"its ELF machine is {machine}, not {EM_CUDA} (CUDA)")
    _check_complete(data, header)
    shift = 8 if abi_version >= FIRST_ABI_WITH_SHIFTED_ARCHITECTURE else 0
    return int(flags >> shift & 0xFF)


def check_library(path: Path) -> None:
    """Raises `NotAnElf` unless the file is a complete ELF file of whatever machine, and `OSError`."""
    data = path.read_bytes()
    _check_complete(data, _header(data))


def _header(data: bytes) -> tuple[int, ...]:
    if not data:
        raise NotACubin("the file is empty")
    if len(data) < _HEADER.size:
        raise NotACubin(f"{len(data)} bytes are less than an ELF header")
    header = _HEADER.unpack_from(data)
    magic, elf_class, order = header[:3]
    if magic != b"\x7fELF" or elf_class != _CLASS_64 or order != _LITTLE_ENDIAN:
        raise NotACubin("it does not begin with a 64-bit ELF header")
    return header


def _check_complete(data: bytes, header: tuple[int, ...]) -> None:
    """Every table of headers, which are (offset, entry size, count), and every section must lie within it."""
    program, section = (header[10], header[14], header[15]), (header[11], header[16], header[17])
    for table, (offset, size, count) in (("program", program), ("section", section)):
        if offset + size * count > len(data):
            raise NotACubin(f"it is truncated: the {table} headers end beyond its {len(data)} bytes")
    offset, size, count = section
    if count == 0 or size != _SECTION.size:
        raise NotACubin(f"it has {count} section headers of {size} bytes")
    for index in range(count):
        fields = _SECTION.unpack_from(data, offset + index * size)
        if fields[1] != _NOBITS and fields[4] + fields[5] > len(data):
            raise NotACubin(f"it is truncated: section {index} ends beyond its {len(data)} bytes")
