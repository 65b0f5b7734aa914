"""The doctor and the places where kernels are found again: invented mounts, small and read-only disks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctor_machines import install, install_deep_gemm, machine

from prefetchd.doctor import caches
from prefetchd.doctor.facts import Machine, Mount, State


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "small"
    point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", point], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield point
    subprocess.run(["umount", "-l", point], check=True)


def test_default_directories_follow_line_and_home(tmp_path: Path, site: Path) -> None:
    install_deep_gemm(site)
    install(site, "triton", "3.8.0")
    before = machine(site, HOME=str(tmp_path))

    directories = caches.cache_directories(before)

    assert directories == [tmp_path / ".dj", tmp_path / ".triton/cache"]
    assert str(tmp_path / ".dj") in caches.mounts(before).found


def test_older_line_has_its_own_default(tmp_path: Path, site: Path) -> None:
    install_deep_gemm(site, new_line=False)

    verdict = caches.deep_gemm_cache(machine(site, HOME=str(tmp_path)))

    assert verdict.found.startswith(str(tmp_path / ".deep_gemm"))


def test_every_root_of_a_list_is_to_be_mounted_and_the_first_is_judged(tmp_path: Path, site: Path) -> None:
    install_deep_gemm(site)
    listed = machine(site, DG_JIT_CACHE_DIR=f"{tmp_path}/own:{tmp_path}/baked")
    (tmp_path / "baked").mkdir()

    verdict = caches.deep_gemm_cache(listed)

    assert verdict.state == "ok"
    assert verdict.found.startswith(f"{tmp_path}/own: not made yet, writable")
    assert caches.cache_directories(listed) == [tmp_path / "own", tmp_path / "baked"]


def test_root_of_a_list_that_cannot_be_read_is_a_warning(tmp_path: Path, site: Path) -> None:
    install_deep_gemm(site)

    verdict = caches.deep_gemm_cache(machine(site, DG_JIT_CACHE_DIR=f"{tmp_path}/own:{tmp_path}/gone"))

    assert verdict.state == "warn"
    assert f"{tmp_path}/gone" in verdict.advice


@pytest.mark.parametrize("value", ["cache", "/absolute:relative", ""])
def test_relative_directory_of_deep_gemm_fails(site: Path, value: str) -> None:
    install_deep_gemm(site)

    verdict = caches.deep_gemm_cache(machine(site, DG_JIT_CACHE_DIR=value))

    assert verdict.state == "fail"
    assert "DG_JIT_CACHE_DIR" in verdict.advice


def test_deep_gemm_without_home_and_variable_has_no_cache(site: Path) -> None:
    install_deep_gemm(site)

    verdict = caches.deep_gemm_cache(machine(site))

    assert verdict.state == "fail"
    assert "DG_JIT_CACHE_DIR" in verdict.advice


def test_cache_check_works_under_nvrtc(tmp_path: Path, site: Path) -> None:
    install_deep_gemm(site)

    verdict = caches.deep_gemm_cache(machine(site, HOME=str(tmp_path), DG_JIT_USE_NVRTC="1"))

    assert verdict.state == "ok"


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"TRITON_CACHE_DIR": "/tmp/t", "HOME": "/home/x"}, "/tmp/t:"),
        ({"TRITON_HOME": "/tmp/th", "HOME": "/home/x"}, "/tmp/th/.triton/cache:"),
        ({"HOME": "/tmp/h"}, "/tmp/h/.triton/cache:"),
    ],
)
def test_triton_directory_follows_its_own_rule(site: Path, environment: dict[str, str], place: str) -> None:
    install(site, "triton", "3.8.0")

    assert caches.triton_cache(machine(site, **environment)).found.startswith(place)


def test_triton_without_any_home_would_use_a_directory_called_tilde(site: Path) -> None:
    install(site, "triton", "3.8.0")

    verdict = caches.triton_cache(machine(site))

    assert verdict.state == "fail"
    assert verdict.found.startswith("~/.triton/cache")


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("nfs4", "warn"),
        ("lustre", "warn"),
        ("fuse.sshfs", "warn"),
        ("fuse.fuse-overlayfs", "ok"),
        ("xfs", "ok"),
    ],
)
def test_network_file_system_is_a_warning(tmp_path: Path, site: Path, kind: str, state: State) -> None:
    install(site, "triton", "3.8.0")
    shared = Machine(
        environment={"TRITON_CACHE_DIR": str(tmp_path / "deep/cache")},
        packages=(str(site),),
        mounts=(Mount("/", "ext4"), Mount(str(tmp_path), "autofs"), Mount(str(tmp_path), kind)),
    )

    verdict = caches.triton_cache(shared)

    assert verdict.state == state
    assert kind in verdict.found


def test_cache_in_a_container_layer_is_told_to_be_mounted(tmp_path: Path, site: Path) -> None:
    install(site, "triton", "3.8.0")
    container = Machine(
        environment={"HOME": str(tmp_path)}, packages=(str(site),), mounts=(Mount("/", "overlay"),)
    )

    verdict = caches.mounts(container)

    assert verdict.state == "warn"
    assert str(tmp_path / ".triton/cache") in verdict.found


def test_nearly_full_disk_is_a_warning(small_disk: Path, site: Path) -> None:
    install(site, "triton", "3.8.0")

    verdict = caches.triton_cache(machine(site, TRITON_CACHE_DIR=str(small_disk)))

    assert verdict.state == "warn"
    assert "1 GiB" in verdict.advice


def test_read_only_file_system_fails_even_for_root(small_disk: Path, site: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    install(site, "triton", "3.8.0")

    verdict = caches.triton_cache(machine(site, TRITON_CACHE_DIR=str(small_disk / "cache")))

    assert verdict.state == "fail"
    assert "NOT writable" in verdict.found


def test_inodes_running_out_are_a_warning() -> None:
    place = caches.Place(
        path=Path("/c"), exists=True, writable=True, kind="ext4", free_bytes=1 << 40, inode_use=0.97
    )

    verdict = caches.judge(place, "default", "TRITON_CACHE_DIR")

    assert verdict.state == "warn"
    assert "97% of inodes" in verdict.found


@pytest.mark.parametrize(("value", "state"), [("", "warn"), ("home", "fail"), ("/proc/1/none", "warn")])
def test_home_must_be_set_absolute_and_writable(value: str, state: State) -> None:
    assert caches.home(machine(HOME=value)).state == state


def test_user_id_without_a_name_is_only_a_warning() -> None:
    assert caches.user(Machine(environment={}, uid=12345, user=None)).state == "warn"
