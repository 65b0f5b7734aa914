"""DeepGEMM with NVRTC: what appears in its cache is told by key, and nothing that was there before."""

from __future__ import annotations

from pathlib import Path

import pytest
from told_sink import Told

from prefetchd.observer import Observer
from prefetchd.observing.nvcc_variables import uses_nvrtc
from prefetchd.observing.nvrtc import EVERY_TICKS, NvrtcAdaptor, caches


class Seconds:
    """The recorder's thread, run by the test."""

    closed = False

    def every_second(self, tick: object) -> None:
        self.tick = tick

    def pass_(self, count: int = EVERY_TICKS) -> None:
        for _ in range(count):
            self.tick()  # type: ignore[operator]


def entry(root: Path, key: str, *, complete: bool = True) -> None:
    (root / "cache" / key).mkdir(parents=True)
    if complete:
        (root / "cache" / key / "kernel.cubin").touch()


def test_only_complete_entries_that_are_new_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry(tmp_path, "before")
    seconds, told = Seconds(), Told()
    adaptor = NvrtcAdaptor(seconds, {"DG_JIT_CACHE_DIR": str(tmp_path)})  # type: ignore[arg-type]
    adaptor.install(Observer(told))
    entry(tmp_path, "new")
    entry(tmp_path, "half", complete=False)

    seconds.pass_()
    seconds.pass_()

    assert [(record.compiler, record.key, record.seconds) for record in told.records] == [
        ("deep_jit", "new", 0.0)
    ]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "DG_JIT_USE_NVRTC is set" in line
    assert str(tmp_path / "cache") in line


def test_it_looks_seldom_but_once_more_at_the_end(tmp_path: Path) -> None:
    seconds, told = Seconds(), Told()
    NvrtcAdaptor(seconds, {"DG_JIT_CACHE_DIR": str(tmp_path)}).install(Observer(told))  # type: ignore[arg-type]
    entry(tmp_path, "new")

    seconds.pass_(1)
    assert told.records == []
    seconds.closed = True
    seconds.pass_(1)

    assert len(told.records) == 1


def test_removed_it_tells_nothing(tmp_path: Path) -> None:
    seconds, told = Seconds(), Told()
    adaptor = NvrtcAdaptor(seconds, {"DG_JIT_CACHE_DIR": str(tmp_path)})  # type: ignore[arg-type]
    adaptor.install(Observer(told))
    adaptor.remove()
    entry(tmp_path, "new")

    seconds.pass_()

    assert told.records == []


def test_the_caches_of_both_lines_are_looked_at_where_none_is_named() -> None:
    assert caches({"HOME": "/home/me"}) == [Path("/home/me/.dj/cache"), Path("/home/me/.deep_gemm/cache")]
    assert caches({"DG_JIT_CACHE_DIR": "/a:/b"}) == [Path("/a/cache")]


@pytest.mark.parametrize(("value", "used"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_librarys_switch_is_read_as_it_reads_it(value: str, used: bool) -> None:
    assert uses_nvrtc({"DG_JIT_USE_NVRTC": value}) is used
