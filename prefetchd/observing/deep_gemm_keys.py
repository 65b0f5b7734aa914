"""Which entry of DeepGEMM's cache a compile became, and its key by named fields.

The subtle rule: an entry is recognised by its source, to the byte, and not by its time: other ranks and the
daemon publish into the same directory at the same moment. Times only bound how many are looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from prefetchd.observing.spool import Run

# A file system's clock may be a little behind the one that stamps the spool.
CLOCK_SLACK_S = 2.0
# The kernel that a generated source instantiates, with its template's arguments.
_INSTANCE = re.compile(r"&(?P<name>\w+)<(?P<arguments>.*?)>\s*\)", re.DOTALL)


def find_entry(run: Run) -> Path | None:
    """The published entry whose source is this run's."""
    cache = _cache_of(run)
    if cache is None or not run.source:
        return None
    source = run.source.encode()
    for entry in _newest(cache, run.began - CLOCK_SLACK_S):
        kernel = entry / "kernel.cu"
        try:
            if kernel.stat().st_size == len(source) and kernel.read_bytes() == source:
                return entry
        except OSError:
            # Renamed or removed meanwhile: not the one.
            continue
    return None


def key_parts(source: str, op: str = "") -> dict[str, str]:
    """The key by field, as far as the source shows it: the kernel and each argument of its template."""
    match = _INSTANCE.search(source)
    if match is None:
        return {}
    arguments = [" ".join(one.split()) for one in _split(match["arguments"])]
    fields = {f"template[{index}]": argument for index, argument in enumerate(arguments)}
    return {"kernel": f"{match['name']}{f' of {op}' if op else ''}", **fields}


def _cache_of(run: Run) -> Path | None:
    """The cache below the root in whose `tmp` the library compiles."""
    for argument in run.arguments.split(b"\0"):
        if argument.endswith(b"/kernel.cu"):
            parents = Path(os.fsdecode(argument)).parents
            return parents[2] / "cache" if len(parents) > 2 else None
    return None


def _newest(cache: Path, since: float) -> Iterator[Path]:
    """Entries that have changed since then, the newest first."""
    found = []
    try:
        with os.scandir(cache) as entries:
            for entry in entries:
                changed = entry.stat(follow_symlinks=False).st_mtime
                if changed >= since:
                    found.append((changed, entry.path))
    except OSError:
        return
    for _, path in sorted(found, reverse=True):
        yield Path(path)


def _split(arguments: str) -> list[str]:
    """At the commas outside of any brackets."""
    found, depth = [""], 0
    for character in arguments:
        depth += (character in "<({") - (character in ">)}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return found
