"""What a deep_jit job carries, and how a recorded nvcc command becomes one.

A command is recorded where it was traced and runs elsewhere, so it is kept without its two paths and without
its program: equal variants make equal payloads, whoever traced them and wherever.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.base import Job
from prefetchd.compilers.nvcc import Nvcc

# Stand for the two paths of a command. nvcc takes them as whole arguments, and no flag looks like this.
SOURCE = "{source}"
OUTPUT = "{output}"
# Where the stand-in leaves its arguments: beside the output in a capture, by process among the misses.
CAPTURED = "*/prefetchd.argv"
MISSED = "*.argv"
# Flags that only say where headers are enter no digest of ours: equal jobs of two machines shall agree.
_PATH_FLAG = re.compile(r"-I.*|--include-path(=.*)?")
_ARCHITECTURE = re.compile(r"sm_(\d+)")


class Payload(msgspec.Struct, frozen=True):
    """The generated source, nvcc's arguments, and the newer line's `meta.json` without its paths."""

    source: str
    arguments: tuple[str, ...]
    meta: dict[str, Any] | None

    def command(self, entry: Path, nvcc: Nvcc) -> tuple[str, ...]:
        """The whole argument vector that compiles in `entry`."""
        paths = {SOURCE: str(entry / "kernel.cu"), OUTPUT: str(entry / "kernel.cubin")}
        return (str(nvcc.path), *(paths.get(argument, argument) for argument in self.arguments))

    @property
    def architecture(self) -> int | None:
        """The number of the `sm_<number>` it is compiled for."""
        match = _ARCHITECTURE.search(" ".join(self.arguments))
        return int(match[1]) if match else None

    @property
    def hook(self) -> str | None:
        """The program the library would run on the compiled kernel."""
        options = (self.meta or {}).get("compiler_options") or {}
        hook: str | None = options.get("post_hook")
        return hook

    def digest(self, nvcc: Nvcc) -> str:
        """Names what is compiled, not where: of source, flags without paths, and nvcc's version text."""
        pairs = zip(("", *self.arguments), self.arguments, strict=False)
        flags = [
            flag for before, flag in pairs if before != "--include-path" and not _PATH_FLAG.fullmatch(flag)
        ]
        return hashlib.sha256("\0".join((self.source, *flags, nvcc.version_text)).encode()).hexdigest()


def payload_of(job: Job) -> Payload:
    """The payload of one of this compiler's jobs."""
    return msgspec.msgpack.decode(job.payload, type=Payload)


def captured_payloads(cache: Path) -> Iterator[tuple[str, Payload]]:
    """Key and payload of every entry that the library published while it was captured, oldest first."""
    for record in _oldest_first(cache.glob(CAPTURED)):
        entry = record.parent
        meta = entry / "meta.json"
        yield (
            entry.name,
            Payload(
                source=(entry / "kernel.cu").read_text("utf-8"),
                arguments=_portable(record.read_bytes()),
                meta=_portable_meta(meta.read_bytes()) if meta.exists() else None,
            ),
        )


def missed_payloads(misses: Path) -> Iterator[Payload]:
    """Payload of every compile that was refused, oldest first."""
    for record in _oldest_first(misses.glob(MISSED)):
        source = record.with_suffix(".cu").read_text("utf-8")
        yield Payload(source=source, arguments=_portable(record.read_bytes()), meta=None)


def observed_payload(arguments: bytes, source: str, meta: bytes | None) -> Payload:
    """The payload of a compile that an engine's stand-in passed through, and of the entry it became."""
    return Payload(
        source=source,
        arguments=_portable(arguments),
        meta=_portable_meta(meta) if meta is not None else None,
    )


def _portable(record: bytes) -> tuple[str, ...]:
    """A recorded argument list with its source and its output replaced by what stands for them."""
    arguments = [os.fsdecode(part) for part in record.split(b"\0")[:-1]]
    return tuple(
        SOURCE
        if argument.endswith("/kernel.cu")
        else OUTPUT
        if argument.endswith("/kernel.cubin")
        else argument
        for argument in arguments
    )


def _portable_meta(text: bytes) -> dict[str, Any]:
    # Both name paths and are written when it is published; the empty places keep the file's order.
    return {**msgspec.json.decode(text, type=dict[str, Any]), "command": None, "compiler_info": None}


def _oldest_first(paths: Iterator[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path))
