"""How many cores this process may really use.

A container's limit does not show in the machine's core count, and more compiles than cores only make each
slower and the memory fuller. Two things bound us: the affinity mask, and the CPU quota of our control group
or of any group above it. The subtle rule: a quota is the product of the smallest limit on the way up, not of
the group we happen to be in.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

CGROUP_MOUNT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores by affinity and control-group quota, at least 1. A fraction of a core counts as a whole one."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = smallest_quota(Path("/proc/self/cgroup"), CGROUP_MOUNT)
    return max(1, math.ceil(cores if quota is None else min(cores, quota)))


def parse_cpu_max(text: str) -> float | None:
    """Cores granted by a version 2 `cpu.max` (`<quota|max> <period>`); None when unlimited or unreadable."""
    fields = text.split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return _cores(fields[0], fields[1])


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """The same from version 1 `cpu.cfs_quota_us` and `cpu.cfs_period_us`."""
    return _cores(quota.strip(), period.strip())


def parse_cgroups(text: str) -> dict[str, PurePosixPath]:
    """Our group's path by controller, from `/proc/self/cgroup`; version 2 has the empty controller name."""
    groups: dict[str, PurePosixPath] = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                groups[controller] = PurePosixPath(fields[2])
    return groups


def smallest_quota(cgroup_file: Path, mount: Path) -> float | None:
    """The smallest quota of our groups and their ancestors, in cores."""
    groups = parse_cgroups(_read(cgroup_file))
    found: list[float | None] = []
    if "" in groups:
        for directory in _upwards(mount, groups[""]):
            found.append(parse_cpu_max(_read(directory / "cpu.max")))
    if "cpu" in groups:
        # Version 1 mounts the controller alone or together with cpuacct.
        for controller in ("cpu", "cpu,cpuacct"):
            for directory in _upwards(mount / controller, groups["cpu"]):
                quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
                found.append(parse_cfs_quota(quota, period))
    limits = [limit for limit in found if limit is not None]
    return min(limits, default=None)


def _upwards(mount: Path, group: PurePosixPath) -> list[Path]:
    """The group's directory and every one above it, up to the mount."""
    relative = PurePosixPath(*[part for part in group.parts if part not in ("/", "..")])
    return [mount / relative, *(mount / parent for parent in relative.parents)]


def _cores(quota: str, period: str) -> float | None:
    try:
        granted, every = int(quota), int(period)
    except ValueError:
        return None
    return granted / every if granted > 0 and every > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
