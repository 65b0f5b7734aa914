"""The matrix products of table 1: five shapes of a large model, warm-up lists, and seeded traffic.

Pure: which M are called when, without a device. A warm-up list is what an engine walks through before it
serves; traffic is what comes then. Half of the traffic is drawn evenly from 1..most, as the chunks of
prefills are, and half by its logarithm, as decode batches are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

MOST_M = 8192


class Shape(NamedTuple):
    """A weight, N x K."""

    n: int
    k: int


SHAPES = (Shape(7168, 2048), Shape(2048, 7168), Shape(4608, 7168), Shape(576, 7168), Shape(2112, 7168))


def coarse_grid(most: int) -> list[int]:
    """Steps of 8 below 128 and of 128 from there on."""
    return [*range(8, min(128, most + 1), 8), *range(128, most + 1, 128)]


def fine_grid(most: int) -> list[int]:
    """Steps of 8 below 128 and of 16 from there on: 520 values up to 8192."""
    return [*range(8, min(128, most + 1), 8), *range(128, most + 1, 16)]


def fast_list(most: int) -> list[int]:
    """Every M up to 1024, then steps that double with M: 2, 4, 8, 16."""
    found, begin, step = list(range(1, min(1024, most) + 1)), 1024, 2
    while begin < most:
        found += range(begin + step, min(2 * begin, most) + 1, step)
        begin, step = 2 * begin, min(2 * step, 16)
    return found


WARM_UPS = {"grid128": coarse_grid, "grid16": fine_grid, "walk": fast_list}


def traffic(seed: int, most: int, shapes: int) -> Iterator[tuple[int, int]]:
    """The index of a shape and an M, for ever; the same for the same seed."""
    chance = random.Random(seed)
    while True:
        for shape in range(shapes):
            even = chance.random() < 0.5
            yield shape, chance.randint(1, most) if even else round(most ** chance.random())


def profile_text(shapes: tuple[Shape, ...]) -> str:
    """These shapes as a profile, which is all that prefetchd is told."""
    head = 'version = 1\nmodel = "five products"\narchitecture = "written by hand"\n'
    head += 'tp = 1\nep = 1\ndp = 1\nquantization = "fp8"\ncontext_tokens = 1\n'
    site = '\n[[gemms]]\nname = "{n}x{k}"\nop = "fp8_gemm_nt"\nn = {n}\nk = {k}\nm = "tokens"\n'
    return head + "".join(site.format(n=shape.n, k=shape.k) for shape in shapes)
