"""What a bake leaves beside the kernels: a file that says what was made, for which device, and its proof."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from prefetchd.coverage import Problem

MANIFEST_VERSION = 1


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """One published variant."""

    compiler: str
    key: str
    bytes: int


class Manifest(msgspec.Struct, kw_only=True):
    """The whole of a bake. `proved`: a second start, with compiling forbidden, served the same batches."""

    version: int = MANIFEST_VERSION
    target: str
    gpu: str
    sm_count: int
    command: list[str]
    batches: list[list[int]]
    steps: int
    # By compiler: all that enters its keys, and the directory the kernels lie in.
    fingerprints: dict[str, dict[str, str]] = {}
    directories: dict[str, str] = {}
    artifacts: list[Artifact] = []
    hits: int = 0
    compiled: int = 0
    proved: bool = False
    problems: list[Problem] = []
    # Driver entry points that the engine called and the null device does not answer.
    unanswered: dict[str, int] = {}
    notes: list[str] = []
    seconds: dict[str, float] = {}

    @property
    def complete(self) -> bool:
        """Whether everything that was named is there and was proved."""
        return self.proved and not self.problems


def size_of(entry: Path) -> int:
    """All files of a published entry."""
    return sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())


def unanswered_calls(files: Iterable[Path]) -> dict[str, int]:
    """Calls that the null device counted, over all processes of an engine."""
    found: dict[str, int] = {}
    for file in filter(Path.exists, files):
        for line in file.read_text(errors="replace").splitlines():
            # "null device, process 17: not supported: cuName, 3 calls"
            _, separator, rest = line.partition("not supported: ")
            name, comma, count = rest.partition(", ")
            number = count.partition(" ")[0]
            if separator and comma and number.isdecimal():
                found[name] = found.get(name, 0) + int(number)
    return dict(sorted(found.items()))


def write_manifest(manifest: Manifest, path: Path) -> None:
    """For people and tools: indented JSON, in one step. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    temporary.replace(path)
