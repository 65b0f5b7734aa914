"""A measurement published for a real B200, reproduced from traces alone.

TensorRT-LLM found at which M an engine stalled after it had warmed a coarse grid of row counts (steps of 8
below 128, of 128 above): each stall is a layout that the grid never met. A grid of 16 rows left none.
"""

from __future__ import annotations

import functools
import re

import pytest
from deep_gemm_tracing import Traced, trace

from prefetchd.protocol import Sweep, request_from_fields

LIMIT = 8192
WINDOW = 16
COARSE = [*range(8, 128, 8), *range(128, LIMIT + 1, 128)]
FINE = range(WINDOW, LIMIT + 1, WINDOW)

# N x K: the Ms as published. The newer package has one more for 2048 x 7168.
PUBLISHED = {
    (7168, 2048): [129, 161, 193, 257, 321],
    (2048, 7168): [257, 513, 769],
    (4608, 7168): [145, 257, 385],
    (576, 7168): [513],
}
LATER = {("new", 2048, 7168): [2689]}
# Distinct layouts over all M, in the order above.
LAYOUTS = {"new": [19, 24, 20, 31], "old": [17, 22, 18, 30]}

PRINTED = re.compile(r"GemmDesc\([^)]*?\bm=(\d+),[^)]*\): (GemmConfig\(.*?\)), LayoutInfo")


@functools.cache
def traced(line: str) -> dict[tuple[int, int], Traced]:
    sweeps = [
        Sweep(request_from_fields({"op": "fp8_gemm_nt", "m": 1, "n": n, "k": k}), ((1, LIMIT + 1, 1),))
        for n, k in PUBLISHED
    ]
    found = trace(line, "b200", sweeps, DG_PRINT_CONFIGS="1")
    assert [result.raised for result in found] == [""] * len(found)
    return dict(zip(PUBLISHED, found, strict=True))


def layouts(line: str, shape: tuple[int, int]) -> dict[int, str]:
    """The layout the library chose for each M, as it prints it."""
    return {int(m): layout for m, layout in PRINTED.findall(traced(line)[shape].printed)}


def stalls(chosen: dict[int, str], grid: list[int] | range) -> list[int]:
    """The first M of every layout that the grid does not meet."""
    first: dict[str, int] = {}
    for m in range(1, LIMIT + 1):
        first.setdefault(chosen[m], m)
    met = {chosen[m] for m in grid}
    return sorted(m for layout, m in first.items() if layout not in met)


@pytest.mark.parametrize("line", ["new", pytest.param("old", marks=[pytest.mark.slow, pytest.mark.ci])])
class TestPublishedTable:
    @pytest.mark.parametrize("shape", PUBLISHED)
    def test_coarse_grid_leaves_the_published_layouts(self, line: str, shape: tuple[int, int]) -> None:
        expected = PUBLISHED[shape] + LATER.get((line, *shape), [])
        assert stalls(layouts(line, shape), COARSE) == expected

    @pytest.mark.parametrize("shape", PUBLISHED)
    def test_sixteen_row_grid_leaves_none(self, line: str, shape: tuple[int, int]) -> None:
        assert stalls(layouts(line, shape), FINE) == []

    @pytest.mark.parametrize("shape", PUBLISHED)
    def test_choice_is_constant_on_every_sixteen_row_window(self, line: str, shape: tuple[int, int]) -> None:
        chosen = layouts(line, shape)
        assert all(chosen[m] == chosen[-(-m // WINDOW) * WINDOW] for m in range(1, LIMIT + 1))

    def test_each_layout_is_one_variant_and_all_are_counted(self, line: str) -> None:
        variants = [len(traced(line)[shape].variants) for shape in PUBLISHED]
        assert variants == [len(set(layouts(line, shape).values())) for shape in PUBLISHED] == LAYOUTS[line]
