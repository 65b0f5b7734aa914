"""Many logs as one: each variant once, with all that is known of it, the dearest first.

What several records say of one variant is put together part by part: what it cost is told by the dearest
compile that succeeded, the request and the means to rebuild it by whichever record has them. Each part is
chosen by its own content alone, so the outcome is the same in whatever order and grouping logs are merged.

The subtle rule is memory: a record may be a megabyte and logs may have millions of lines, so only *where*
each part stands is kept while reading, about 1 KB a variant, and what is asked for is read again.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from prefetchd.shapelog.reading import Place, Problems, Unreadable, open_log, read_places
from prefetchd.shapelog.record import (
    Ended,
    Line,
    Record,
    RecordError,
    Run,
    Started,
    decode_record,
    run_of,
)
from prefetchd.shapelog.writer import LogUnusable

# The largest models compile some ten thousand variants. This many take 250 MB while they are merged.
MAX_VARIANTS = 250_000
# Compiles that never ended: one for each kill of an engine.
MAX_UNFINISHED = 10_000
# Files open at a time while the chosen lines are read again.
MAX_OPEN = 64

# Which fields each part consists of; the rest of a record is its cost.
REQUEST_PART = ("provider", "request")
REBUILD_PART = ("rebuild",)


class Spot(NamedTuple):
    """A part of a record: how good it is (more is better), and the file and place of its line."""

    worth: tuple[Any, ...]
    file: int
    offset: int
    size: int


class Variant(msgspec.Struct, gc=False):
    """Where the best of each part stands."""

    cost: Spot
    request: Spot | None = None
    rebuild: Spot | None = None


class Merged:
    """All lines of several logs, read once at the start; `advance` hears the bytes of each.

    Raises `LogUnusable` for a log that is not there.
    """

    def __init__(self, paths: Iterable[Path], advance: Callable[[int], None] = lambda size: None) -> None:
        self.files = list(paths)
        self.problems = Problems()
        # Records read; those among them whose variant another one had named; variants beyond the bound.
        self.records = self.duplicates = self.left_out = 0
        # Whole lines of kinds that this version does not know.
        self.foreign: list[Spot] = []
        self._variants: dict[bytes, Variant] = {}
        self._started: dict[Run, Started] = {}
        for index, path in enumerate(self.files):
            for line, place in read_places(path):
                self._add(line, index, place)
                advance(place.size)

    def __len__(self) -> int:
        return len(self._variants)

    @property
    def unfinished(self) -> list[Started]:
        """The compiles that began and never ended, in the order of the logs."""
        return list(self._started.values())

    def __iter__(self) -> Iterator[Record]:
        """Each variant's record, the dearest first; a line that has changed meanwhile is a problem."""
        for _, record in self.lines():
            yield record

    def lines(self) -> Iterator[tuple[bytes, Record]]:
        """Each variant as the line that tells all of it, with fields of newer versions, and as its record."""
        with _Files(self.files) as files:
            for name, variant in sorted(self._variants.items(), key=_dearest_first):
                try:
                    data = _combined(variant, files)
                    record = decode_record(data)
                except (OSError, LogUnusable, msgspec.MsgspecError, RecordError) as error:
                    self.problems.add(f"{self.files[variant.cost.file]}: changed while it was read: {error}")
                    continue
                if variant_name(record) == name:
                    yield data, record
                else:
                    self.problems.add(f"{self.files[variant.cost.file]}: changed while it was read")

    def foreign_lines(self) -> Iterator[bytes]:
        """The lines of kinds not known here, as they are."""
        with _Files(self.files) as files:
            for spot in self.foreign:
                yield files.line(spot)

    def _add(self, line: Line | Unreadable, file: int, place: Place) -> None:
        if isinstance(line, Record):
            self.records += 1
            self._note(line, file, place)
        elif isinstance(line, Started):
            if len(self._started) < MAX_UNFINISHED:
                self._started[run_of(line)] = line
        elif isinstance(line, Ended):
            self._started.pop(run_of(line), None)
        elif isinstance(line, Unreadable):
            self.problems.add(line)
            if line.foreign and len(self.foreign) < MAX_UNFINISHED:
                self.foreign.append(Spot((), file, place.offset, place.size))

    def _note(self, record: Record, file: int, place: Place) -> None:
        name = variant_name(record)
        found = self._variants.get(name)
        cost = Spot(_cost(record), file, place.offset, place.size)
        if found is None:
            if len(self._variants) >= MAX_VARIANTS:
                self.left_out += 1
                return
            found = self._variants[name] = Variant(cost)
        else:
            self.duplicates += 1
            found.cost = max(found.cost, cost)
        if record.provider or record.request is not None:
            worth = (record.request is not None, *_worth((record.provider, record.request)))
            found.request = _better(found.request, worth, cost)
        if record.rebuild is not None:
            found.rebuild = _better(found.rebuild, _worth(record.rebuild), cost)


class _Files:
    """The logs, a few of them open at a time."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._open: dict[int, BinaryIO] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def line(self, spot: Spot) -> bytes:
        """The bytes that stand there now. Raises `OSError`, `LogUnusable`."""
        file = self._open.get(spot.file)
        if file is None:
            if len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = self._open[spot.file] = open_log(self._paths[spot.file])
        file.seek(spot.offset)
        return file.read(spot.size).strip()


def _combined(variant: Variant, files: _Files) -> bytes:
    """The line with the cost, and the other parts from wherever they stand best."""
    data = files.line(variant.cost)
    parts = {
        spot: names
        for spot, names in ((variant.request, REQUEST_PART), (variant.rebuild, REBUILD_PART))
        if spot is not None and spot[1:] != variant.cost[1:]
    }
    if not parts:
        return data
    # As plain values: a newer version's fields stay.
    fields = msgspec.json.decode(data, type=dict[str, Any])
    for spot, names in parts.items():
        other = msgspec.json.decode(files.line(spot), type=dict[str, Any])
        # A default is not written, so what the other lacks is part of what it says.
        fields = {name: value for name, value in fields.items() if name not in names}
        fields |= {name: other[name] for name in names if name in other}
    return msgspec.json.encode(fields)


def variant_name(record: Record) -> bytes:
    """A short name of the record's identity, the same everywhere."""
    text = msgspec.json.encode(record.identity)
    return hashlib.blake2b(text, digest_size=16).digest()


def _cost(record: Record) -> tuple[Any, ...]:
    """A failed compile says less about the cost than one that succeeded; equals are told apart by content."""
    told = msgspec.structs.replace(record, provider="", request=None, rebuild=None)
    return (record.ok, record.seconds, zlib.crc32(msgspec.json.encode(told)))


def _worth(part: Any) -> tuple[Any, ...]:
    """The longest says most."""
    text = msgspec.json.encode(part, order="sorted")
    return (len(text), hashlib.blake2b(text, digest_size=8).digest())


def _better(found: Spot | None, worth: tuple[Any, ...], spot: Spot) -> Spot:
    other = Spot(worth, spot.file, spot.offset, spot.size)
    return other if found is None else max(found, other)


def _dearest_first(item: tuple[bytes, Variant]) -> tuple[float, bytes]:
    name, variant = item
    return (-variant.cost.worth[1], name)
