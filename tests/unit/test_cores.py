"""Cores by affinity and by the control groups' quotas."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from prefetchd import cores
from prefetchd.cores import parse_cfs_quota, parse_cgroups, parse_cpu_max, smallest_quota, usable_cores


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("200000 100000\n", 2.0),
        ("150000 100000", 1.5),
        ("max 100000", None),
        ("", None),
        ("nonsense", None),
        ("1 0", None),
    ],
)
def test_version_2_quota(text: str, granted: float | None) -> None:
    assert parse_cpu_max(text) == granted


@pytest.mark.parametrize(
    ("quota", "period", "granted"),
    [("400000\n", "100000\n", 4.0), ("-1", "100000", None), ("", "", None), ("50000", "0", None)],
)
def test_version_1_quota(quota: str, period: str, granted: float | None) -> None:
    assert parse_cfs_quota(quota, period) == granted


def test_groups_by_controller() -> None:
    groups = parse_cgroups("4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n0::/user.slice/a:b\n")

    assert groups["cpu"] == groups["cpuacct"] == PurePosixPath("/docker/x")
    assert groups[""] == PurePosixPath("/user.slice/a:b")


def test_the_smallest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    inner = tmp_path / "pod/container"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "pod/cpu.max").write_text("300000 100000\n")
    (tmp_path / "cgroup").write_text("0::/pod/container\n")

    assert smallest_quota(tmp_path / "cgroup", tmp_path) == 3.0


def test_a_version_1_quota_is_found_under_either_mount(tmp_path: Path) -> None:
    (tmp_path / "cpu,cpuacct/docker").mkdir(parents=True)
    (tmp_path / "cpu,cpuacct/docker/cpu.cfs_quota_us").write_text("250000\n")
    (tmp_path / "cpu,cpuacct/docker/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cgroup").write_text("3:cpu,cpuacct:/docker\n")

    assert smallest_quota(tmp_path / "cgroup", tmp_path) == 2.5


def test_no_quota_where_nothing_is_written(tmp_path: Path) -> None:
    assert smallest_quota(tmp_path / "absent", tmp_path) is None


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (None, None), (1e9, None)])
def test_at_least_one_core_and_at_most_the_affinity(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int | None
) -> None:
    monkeypatch.setattr(cores, "smallest_quota", lambda *_: quota)

    assert usable_cores() == (expected or len(os.sched_getaffinity(0)))
