"""The whole key set of an unmodified library's operation, by its counts on an H200 and a B200."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fla")

from answering import answer_of
from triton_site import HERE, Site

from prefetchd.null_device import launcher
from prefetchd.null_device.launcher import KEEP_NO_TIMINGS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "target", "counts"),
    [
        ("installed", "h200", [110, 185]),
        ("installed", "b200", [104, 179]),
        pytest.param("other", "h200", [110, 185], marks=pytest.mark.ci),
        ("other", "b200", [104, 179]),
    ],
)
def test_chunk_kda_has_as_many_keys_as_a_real_device_compiles(
    line: str, target: str, counts: list[int], tmp_path: Path
) -> None:
    site = Site(tmp_path, other=line == "other", target=target)
    child = launcher.environment(site.target, site.environment, integer_ops=True)
    # fla's own default then, by which every tuner asks for its results to be kept.
    for name in KEEP_NO_TIMINGS:
        del child[name]

    where = ("--target", target, "--scratch", str(site.scratch()))
    answer = answer_of((str(HERE / "kda_process.py"), *where), child)

    assert answer == {"counts": counts, "written": []}
    assert not list(tmp_path.rglob("*.autotune.json"))
