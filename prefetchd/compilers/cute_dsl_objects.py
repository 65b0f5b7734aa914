"""What lies inside an object file of the DSL: the cubins, each an ELF file within the host's ELF file."""

from __future__ import annotations

import struct

from prefetchd.cute.artifacts import Unloadable
from prefetchd.elf import EM_CUDA, NotACubin, parse_architecture

MAGIC = b"\x7fELF"
# Where an ELF header says for which machine it is.
_MACHINE = struct.Struct("<H")
_MACHINE_AT = 18


def cubins(content: bytes) -> list[int]:
    """Where each cubin in the object begins."""
    found, at = [], content.find(MAGIC, 1)
    while at >= 0:
        if at + 64 <= len(content) and _MACHINE.unpack_from(content, at + _MACHINE_AT)[0] == EM_CUDA:
            found.append(at)
        at = content.find(MAGIC, at + 1)
    return found


def check_architecture(content: bytes, capability: int) -> None:
    """Raises `Unloadable` unless the object holds cubins and all of them are for this capability."""
    if not content.startswith(MAGIC):
        raise Unloadable("the object does not begin with an ELF header")
    places = cubins(content)
    if not places:
        raise Unloadable("no cubin is in the object")
    for place in places:
        try:
            architecture = parse_architecture(content[place:])
        except NotACubin as error:
            raise Unloadable(f"the cubin at {place}: {error}") from error
        if architecture != capability:
            raise Unloadable(f"the cubin at {place} is for sm_{architecture}, not for sm_{capability}")
