"""Which deep_gemm is installed, told from its files alone.

Importing it would import torch and need a device, and the daemon has neither; so the package is located
without being run, and its JIT line is told by a name in its extension module. vLLM brings a copy of its own
and uses that where no other is installed; so do we, or keys would be those of a library nobody runs.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import msgspec

from prefetchd.compilers.base import CompilerUnavailable

PACKAGE = "deep_gemm"
# vLLM's copy, looked for second as vLLM itself does.
VENDORED = ("vllm", "third_party/deep_gemm")
# DeepJIT's marker of a complete cache entry; the older line has no such file.
DEEP_JIT_MARKER = b".committed"
# A header's path in parts, its size, and when it was changed.
Header = tuple[tuple[str, ...], int, int]
# Of each package asked for in this process, a handful: its headers as they were, and their digest.
_include_digests: dict[Path, tuple[list[Header], str]] = {}


class Line(StrEnum):
    """The two JIT lines, which differ in cache layout, environment variables and nvcc's minimum."""

    DEEP_JIT = "deep_jit"
    OLDER = "older"


class Package(msgspec.Struct, frozen=True):
    """An installed deep_gemm."""

    directory: Path
    line: Line
    version: str


def find_package(directory: Path | None = None) -> Package:
    """The package in `directory`, else the one Python would import. Raises `CompilerUnavailable`."""
    if directory is None:
        directory = _installed() or _vendored()
        if directory is None:
            raise CompilerUnavailable(
                "deep_gemm is not installed for this Python. Install sgl-deep-gemm, or run prefetchd "
                "with the engine's own interpreter"
            )
    return Package(directory=directory, line=_line(directory), version=_version(directory))


def vendors_default(package: Package, environment: Mapping[str, str], home: Path) -> Path | None:
    """Where vLLM has its own copy keep its kernels when nothing else is set; None for any other package."""
    ours = package.directory.as_posix().endswith("/".join(("", *VENDORED)))
    return vllm_default(environment, home) if ours else None


def vllm_default(environment: Mapping[str, str], home: Path) -> Path:
    """Where vLLM keeps DeepGEMM's kernels, whichever package that is."""
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    root = environment.get("VLLM_CACHE_ROOT") or str(cache / "vllm")
    return Path(f"{home}{root[1:]}" if root.startswith("~/") else root) / "deep_gemm"


def import_package() -> None:
    """Has `import deep_gemm` give an engine's own copy where no other is installed. Raises `ImportError`."""
    if PACKAGE not in sys.modules and _installed() is None and _vendored() is not None:
        engine, place = VENDORED
        sys.modules[PACKAGE] = import_module(f"{engine}.{place.replace('/', '.')}")


def _installed() -> Path | None:
    # Only a top-level name is asked for: its spec is found without importing anything.
    spec = find_spec(PACKAGE)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _vendored() -> Path | None:
    engine, place = VENDORED
    spec = find_spec(engine)
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (directory := Path(root) / place).is_dir():
            return directory
    return None


def include_digest(package: Package) -> str:
    """A digest of the names and contents of every header: 30 MB, 0.1-0.3 s the first time in a process.

    Later the headers are only looked at: an engine asks again when its environment changes, while it serves.
    """
    root = package.directory / "include"
    headers = sorted(_headers(str(root)))
    known = _include_digests.get(root)
    if known is not None and known[0] == headers:
        return known[1]
    digest = hashlib.sha256()
    for parts, _, _ in headers:
        digest.update("/".join(parts).encode() + b"\0")
        digest.update(hashlib.sha256(root.joinpath(*parts).read_bytes()).digest())
    _include_digests[root] = headers, digest.hexdigest()
    return digest.hexdigest()


def _headers(directory: str, above: tuple[str, ...] = ()) -> Iterator[Header]:
    with os.scandir(directory) as entries:
        for entry in entries:
            parts = (*above, entry.name)
            if entry.is_dir(follow_symlinks=False):
                yield from _headers(entry.path, parts)
            elif entry.is_file():
                status = entry.stat()
                yield parts, status.st_size, status.st_mtime_ns


def _line(directory: Path) -> Line:
    # An all-Python deep_gemm with the same name exists; it has headers but no extension module.
    if not any(directory.glob("*.so")) or not (directory / "include/deep_gemm").is_dir():
        raise CompilerUnavailable(
            f"{directory} is not a deep_gemm with a compiled extension and its headers (an older all-Python "
            "deep_gemm has neither). Install sgl-deep-gemm instead"
        )
    # Not by its headers: some builds take DeepJIT's from another package, and ship none.
    deep_jit = any(DEEP_JIT_MARKER in path.read_bytes() for path in directory.glob("*.so"))
    return Line.DEEP_JIT if deep_jit else Line.OLDER


def _version(directory: Path) -> str:
    try:
        return (directory / "VERSION").read_text().strip()
    except OSError:
        return "unknown"
