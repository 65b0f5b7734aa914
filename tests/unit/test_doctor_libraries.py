"""The doctor and the kernel libraries: packages told from their files, never imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_machines import install, install_deep_gemm, install_torch, machine

from prefetchd.doctor import libraries
from prefetchd.doctor.facts import State


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


@pytest.mark.parametrize(("new_line", "name"), [(True, "DeepJIT line"), (False, "older line")])
def test_deep_gemm_is_named_with_line_and_path(site: Path, new_line: bool, name: str) -> None:
    install_torch(site)
    install_deep_gemm(site, new_line=new_line)

    verdict = libraries.deep_gemm(machine(site))

    assert verdict.state == "ok"
    assert name in verdict.found
    assert str(site / "deep_gemm") in verdict.found


def test_deep_gemm_without_torch_fails(site: Path) -> None:
    install_deep_gemm(site)

    assert libraries.deep_gemm(machine(site)).state == "fail"


def test_all_python_deep_gemm_is_named_unusable(site: Path) -> None:
    (site / "deep_gemm").mkdir(parents=True)
    (site / "deep_gemm/__init__.py").touch()

    verdict = libraries.deep_gemm(machine(site))

    assert verdict.state == "fail"
    assert "sgl-deep-gemm" in verdict.advice


def test_copy_inside_an_engine_is_pointed_out(site: Path) -> None:
    copy = site / "vllm/third_party/deep_gemm"
    copy.mkdir(parents=True)

    verdict = libraries.deep_gemm(machine(site))

    assert verdict.state == "missing"
    assert str(copy) in verdict.found


def test_cpu_build_of_torch_fails_only_beside_deep_gemm(site: Path) -> None:
    install_torch(site, "2.14.1+cpu", cuda=None)
    alone = libraries.torch(machine(site))
    install_deep_gemm(site)

    assert (alone.state, libraries.torch(machine(site)).state) == ("warn", "fail")


def test_cuda_build_of_torch_is_named_with_its_cuda(site: Path) -> None:
    install_torch(site, "2.14.1+cu130")

    assert libraries.torch(machine(site)).found.startswith("2.14.1+cu130, CUDA 13.0")


@pytest.mark.parametrize(("version", "state"), [("3.5.1", "warn"), ("3.6.0", "ok"), ("3.10.0", "ok")])
def test_releases_older_than_any_tried_are_a_warning(site: Path, version: str, state: State) -> None:
    install(site, "triton", version)

    assert libraries.triton(machine(site)).state == state


@pytest.mark.parametrize(
    ("requirement", "broken"),
    [
        ("triton==3.8.0", False),
        ("triton==3.7.0; platform_system == 'Linux'", True),
        ("triton~=3.8.0", False),
        ("triton (~=3.8.1)", True),
        ("triton==3.8.*", False),
        ("triton==3.*", False),
        ("triton==2.*", True),
        ("triton>=9", False),
        ("triton==1.0; extra == 'npu'", False),
    ],
)
def test_broken_pin_among_kernel_libraries_fails(site: Path, requirement: str, broken: bool) -> None:
    install(site, "torch", "2.14.1", (requirement,))
    install(site, "triton", "3.8.0+local")

    verdict = libraries.library_pairs(machine(site))

    assert verdict.state == ("fail" if broken else "ok")
    assert ("torch requires triton" in verdict.found) == broken


def test_deep_gemm_linked_against_another_cuda_than_torch_fails(site: Path) -> None:
    install_torch(site)
    install_deep_gemm(site, cuda=12)

    verdict = libraries.library_pairs(machine(site))

    assert verdict.state == "fail"
    assert "libcudart.so.12" in verdict.found
