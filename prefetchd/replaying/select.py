"""`python -m prefetchd.replaying.select`: reads logs for a daemon and says what of them is to be done.

A process of its own, with the engine's interpreter and environment: it may import Triton, which a daemon does
not, and whatever a log holds - a gigabyte of noise, a record that finds a defect of ours - costs this process
and a line in the daemon's log. It reads a `Question` from standard input and writes one `Selected`.

The subtle rule: here a record is rebuilt where that is possible, and its request is only the second choice.
A rebuilt job needs no helper and no trace, so an engine that starts gets it seconds earlier.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

import msgspec

from prefetchd.compilers import COMPILERS, load_compiler
from prefetchd.compilers.base import Compiler, CompilerUnavailable, Job
from prefetchd.parent_death import end_with_parent
from prefetchd.protocol import encode_sweeps
from prefetchd.provider import PROVIDER_GROUP
from prefetchd.replaying.selection import Asked, Rebuilder, Room, left_alone, split, traceable
from prefetchd.shapelog import Merged, Record, log_files
from prefetchd.targets import Target

# Address space; merging the most that is read takes 150 MB, Triton's libraries 1 GB of it.
MEMORY_LIMIT = 8 << 30
# Reasons handed on; all are counted.
MAX_REASONS = 16


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done of these logs for engines on this target?"""

    target: Target
    logs: list[str]


class Selected(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs and, by provider, encoded sweeps, both with the dearest first; and what is left out."""

    jobs: list[Job] = []
    requests: dict[str, bytes] = {}
    figures: dict[str, int] = {}
    reasons: list[str] = []


def select(question: Question, environment: dict[str, str], providers: frozenset[str]) -> Selected:
    """Raises `LogUnusable` for a log that cannot be read at all."""
    merged = Merged(log_files(map(Path, question.logs)))
    compilers: dict[str, Compiler] = {}

    def load(name: str) -> Compiler:
        if name not in compilers:
            if name not in COMPILERS:
                raise CompilerUnavailable(f"this prefetchd has no compiler {name[:64]!r}; upgrade it")
            compilers[name] = load_compiler(name, question.target, environment)
        return compilers[name]

    rebuilder = Rebuilder(question.target, load, environment)
    asked: list[Asked] = []
    left: Counter[str] = Counter()
    room = Room()
    records = 0
    for record in merged:
        records += 1
        reason = left_alone(record)
        if reason is not None:
            left[reason] += 1
        elif room.takes(record):
            asked += _add(record, rebuilder, providers, environment)
    sites = traceable(asked)
    encoded = {
        name: encode_sweeps(site.sweep for site in sites if site.provider == name)
        for name in dict.fromkeys(site.provider for site in sites)
    }
    return Selected(
        jobs=list(rebuilder.jobs.values()),
        requests=encoded,
        figures={
            "records": records,
            "jobs": len(rebuilder.jobs),
            "requests": sum(len(site.sweep) for site in sites),
            "foreign": rebuilder.foreign,
            "refused": rebuilder.refused.count,
            "unreadable": merged.problems.count,
            **({"too_many": room.left_out + merged.left_out} if room.left_out + merged.left_out else {}),
            **left,
        },
        reasons=[
            *merged.problems.first[:MAX_REASONS],
            *(f"{each.what}: {each.text}" for each in rebuilder.refused.problems[:MAX_REASONS]),
        ],
    )


def _add(
    record: Record, rebuilder: Rebuilder, providers: frozenset[str], environment: Mapping[str, str]
) -> list[Asked]:
    """Rebuilds the record; what cannot be rebuilt and can be traced is no refusal."""
    asked, _ = split([record], providers, environment)
    if not asked:
        rebuilder.add(record)
    elif rebuilder.try_add(record):
        return []
    return asked


def main(argv: list[str] | None = None) -> int:
    """Exits 1 with a traceback on standard error for what nobody expected."""
    parser = argparse.ArgumentParser(prog="prefetchd.replaying.select")
    parser.add_argument("--parent", required=True, type=int)
    end_with_parent(parser.parse_args(argv).parent)
    # Libraries print; the answer alone goes where it is expected.
    output = os.dup(1)
    os.dup2(2, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_LIMIT:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, hard))
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question)
    providers = frozenset(point.name for point in entry_points(group=PROVIDER_GROUP))
    selected = select(question, dict(os.environ), providers)
    with os.fdopen(output, "wb") as stream:
        stream.write(msgspec.msgpack.encode(selected))
    return 0


if __name__ == "__main__":
    sys.exit(main())
