"""The key of a DeepGEMM kernel, computed from its source and command as the library computes it.

A traced key is the library's own and needs none of this. A record of a shape log, though, only *says* that a
source belongs to a key, and whoever is believed there could publish one kernel under the name of another,
which an engine then launches. So the key is computed again, for both lines of the library, and compared. The
subtle rule: a library that computes its keys in another way makes every record a mismatch, never a match, so
a change of it costs replay without a provider and nothing else.

The name in front of the digest is, in the newer line, no part of it: under another name an entry is never
looked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from prefetchd.compilers.deep_gemm_package import Line, Package
from prefetchd.compilers.nvcc import Nvcc

KEY = re.compile(r"(?:kernel\.)?(?P<name>[A-Za-z_]\w{0,127})\.(?P<digest>[0-9a-f]{32})", re.ASCII)
# Headers below this are part of the newer line's keys, with all they include of the same.
HEADERS = "deep_gemm/"

_INCLUDE = re.compile(rb"[ \t\f\v]*#[ \t\f\v]*include[ \t\f\v]*<(" + HEADERS.encode() + rb'[^>"]*)>')
_WORD = (1 << 64) - 1
# FNV-1a twice, from two starts; the newer line has a factor of its own for the second.
_START, _FACTOR = 0xC6A4A7935BD1E995, 0x100000001B3
_NEW_START, _NEW_FACTOR = 0xFF51AFD7ED558CCD, 0x9E3779B97F4A7C15
_OLD_START = 0x9E3779B97F4A7C15


class Digests:
    """The keys of one installed package. Headers are read once; they are part of the fingerprint."""

    def __init__(self, package: Package, nvcc: Nvcc) -> None:
        self._package = package
        self._nvcc = nvcc
        self._headers: dict[bytes, str] = {}

    def of(self, name: str, source: str, flags: Sequence[str], signature: str) -> str:
        """The digest behind the key's name. `flags` are nvcc's without input, output and header directory.

        `signature` is what the newer line's package adds of its own. Raises `OSError` for a missing header.
        """
        if self._package.line is Line.OLDER:
            return self._older(name, source, flags)
        parts = (
            signature.encode(),
            _new_digest(self._nvcc.version_text.encode()).encode(),
            " ".join(flags).encode(),
            # Where the digest of a hook would stand.
            b"",
            self._source(source.encode()).encode(),
        )
        return _new_digest(*parts)

    def _older(self, name: str, source: str, flags: Sequence[str]) -> str:
        """Its flags hold the header directory; what headers contain stands in the source's first line."""
        major, minor = self._nvcc.release
        text = "$$".join((name, f"NVCC{major}.{minor}", " ".join(flags), source)).encode()
        return _hex(_fnv(text, _START, _FACTOR), _fnv(text, _OLD_START, _FACTOR))

    def _source(self, code: bytes) -> str:
        parts = [code]
        for line in code.split(b"\n"):
            if match := _INCLUDE.match(line):
                parts.append(self._header(match[1]).encode())
        return _new_digest(*parts)

    def _header(self, name: bytes) -> str:
        if name not in self._headers:
            path = Path(self._package.directory / "include", name.decode())
            self._headers[name] = self._source(path.read_bytes())
        return self._headers[name]


def _new_digest(*parts: bytes) -> str:
    # The length in front of each part keeps their boundaries.
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return _hex(_fnv(data, _START, _FACTOR), _fnv(data, _NEW_START, _NEW_FACTOR))


def _fnv(data: bytes, start: int, factor: int) -> int:
    state = start
    for byte in data:
        state = ((state ^ byte) * factor) & _WORD
    return state


def _hex(*states: int) -> str:
    return "".join(f"{_mixed(state):016x}" for state in states)


def _mixed(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)
