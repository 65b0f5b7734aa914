"""The sites that `warm` names for a real model are exactly the model's."""

from __future__ import annotations

import re
from typing import Any

import pytest
from warming import ROOT, Bench

MODEL = ROOT / "examples/models/deepseek-v3.json"

# N x K of the dense layers of one rank at tensor parallel size 8, the shared expert's included.
DENSE = {
    (2112, 7168), (3072, 1536), (4096, 512), (7168, 2048),
    (4608, 7168), (7168, 2304), (512, 7168), (7168, 256),
}  # fmt: skip


def sites(figures: dict[str, Any]) -> set[tuple[int, ...]]:
    """Groups x N x K of every request that is a site's: those for layout kernels repeat a site's shape."""
    found = set()
    for detail in figures["requests_detail"]:
        values = dict(re.findall(r"(groups|n|k)=(\d+)", detail["request"]))
        found.add(tuple(int(values.get(name, 0)) for name in ("groups", "n", "k")))
    return found


@pytest.mark.parametrize(
    ("ep", "experts"),
    [
        pytest.param("1", {(256, 512, 7168), (256, 7168, 256)}, id="tensor parallel experts"),
        pytest.param("8", {(32, 4096, 7168), (32, 7168, 2048)}, id="expert parallel"),
    ],
)
def test_deepseek_v3_has_exactly_these_sites(bench: Bench, ep: str, experts: set[tuple[int, ...]]) -> None:
    done = bench.warm("--model", str(MODEL), "--tp", "8", "--ep", ep, "--max-tokens", "1", "--dry-run")

    assert done.status == 0, done.err
    assert sites(done.figures) == {(0, n, k) for n, k in DENSE} | experts
