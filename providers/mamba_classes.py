"""Which token counts launch the same kernels: what Triton tells apart about a batch of the Mamba2 scan.

Triton compiles a variant for whether an integer argument is one, and whether it is a multiple of 16. The scan
hands over the token count T, how many whole chunks hold them, in engines also how many chunks there are when
each sequence begins its own, and strides made of these; nothing else about a batch. So one call for each
class covers every batch of it. The subtle rule: a row of the projected buffer need not be a multiple of 16
elements long, and then T times its length is told apart too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

# Triton asks of an integer whether it is a multiple of this.
UNIT = 16
# Classes repeat every 16 chunks; a second round meets those that need more than a round's remainder.
ROUNDS = 2

# T is one, T and T rows are multiples of 16; then of both numbers of chunks: it is one, a multiple of 16.
Class = tuple[bool, bool, bool, bool, bool, bool, bool]


def natural_chunks(tokens: int, chunk: int) -> int:
    """How many chunks of `chunk` tokens hold them."""
    return -(-tokens // chunk)


def class_of(tokens: int, chunk: int, chunks: int, row: int = UNIT) -> Class:
    """What Triton can tell about T tokens, cut into so many chunks, in rows of `row` elements."""
    whole = natural_chunks(tokens, chunk)
    return (
        tokens == 1,
        tokens % UNIT == 0,
        tokens * row % UNIT == 0,
        whole == 1,
        whole % UNIT == 0,
        chunks == 1,
        chunks % UNIT == 0,
    )


@lru_cache(maxsize=256)
def scan_classes(
    chunk: int, max_tokens: int, row: int = UNIT, *, cut: bool = False
) -> dict[Class, tuple[int, int]]:
    """Every class that up to `max_tokens` tokens reach, with one (tokens, chunks) of it.

    `cut` is for kernels that count chunks which end where a sequence ends: short sequences make more of them.
    A class's representative does not depend on `max_tokens` unless it exceeds it.
    """
    found: dict[Class, tuple[int, int]] = {}
    for tokens, chunks in _candidates(chunk, max_tokens, cut):
        found.setdefault(class_of(tokens, chunk, chunks, row), (tokens, chunks))
    return found


def all_scan_classes(chunk: int, row: int = UNIT, *, cut: bool = False) -> dict[Class, tuple[int, int]]:
    """The same without a limit: the class of any token count is in it."""
    return scan_classes(chunk, ROUNDS * UNIT * chunk, row, cut=cut)


def _candidates(chunk: int, max_tokens: int, cut: bool) -> Iterator[tuple[int, int]]:
    # The token counts with which the classes were measured, for a chunk of 256; they keep logs comparable.
    measured = (chunk + 16, chunk + 44, chunk, 100, 1, 16 * chunk, 15 * chunk + 100)
    scanned = range(1, min(max_tokens, ROUNDS * UNIT * chunk) + 1)
    if not cut:
        for tokens in (*(t for t in measured if t <= max_tokens), *scanned):
            yield tokens, natural_chunks(tokens, chunk)
        return
    for tokens in scanned:
        least = natural_chunks(tokens, chunk)
        for chunks in (least, least + 1, least + 2, -(-least // UNIT) * UNIT):
            if chunks <= tokens:
                yield tokens, chunks


def count_classes(max_count: int) -> tuple[int, ...]:
    """One of each class of a bare count: one, a multiple of 16, any other."""
    return tuple(count for count in (1, UNIT, 2) if count <= max_count)


def count_class(count: int) -> int:
    """The member of `count_classes` that stands for this count."""
    if count == 1:
        return 1
    return UNIT if count % UNIT == 0 else 2


def possible_chunks(lengths: tuple[int, ...], chunk: int, *, cut: bool) -> range:
    """How many chunks sequences of these new tokens may make.

    Cut at the sequences' ends there are at least as many as whole ones; and one that continues, or lies
    across the whole ones, may begin inside a chunk: one chunk more.
    """
    least = natural_chunks(sum(lengths), chunk)
    if not cut:
        return range(least, least + 1)
    most = sum(natural_chunks(length, chunk) + (length > 1) for length in lengths)
    return range(least, most + 1)


def chunk_spread(lengths: tuple[int, ...], chunk: int) -> int:
    """How far apart the ends of `possible_chunks` lie, at most `UNIT`: from there every class is among them.

    Quick enough for the scheduler's thread: each sequence longer than one token adds at least one.
    """
    longer = len(lengths) - lengths.count(1) - lengths.count(0)
    if longer >= UNIT:
        return UNIT
    counts = possible_chunks(tuple(length for length in lengths if length > 0), chunk, cut=True)
    return min(len(counts) - 1, UNIT)
