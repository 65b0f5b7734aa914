"""Which deep_gemm is installed, told from its files without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_deep_gemm import make_package

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.compilers.deep_gemm_package import (
    Line,
    Package,
    find_package,
    include_digest,
    vendors_default,
)


@pytest.mark.parametrize(
    ("new", "line", "version"), [(True, Line.DEEP_JIT, "0.2.5"), (False, Line.OLDER, "0.1.7")]
)
def test_the_line_is_read_from_the_headers(tmp_path: Path, new: bool, line: Line, version: str) -> None:
    package = find_package(make_package(tmp_path, new=new))

    assert (package.line, package.version) == (line, version)


def test_what_python_would_import_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_package(tmp_path, new=True)
    (directory / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)

    assert find_package().directory == directory


def test_headers_are_read_once_and_again_when_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = find_package(make_package(tmp_path, new=True))
    header = package.directory / "include/deep_gemm/one.cuh"
    header.write_text("first")
    read: list[str] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or read_bytes(path))

    first = include_digest(package)
    assert "one.cuh" in read
    read.clear()
    assert include_digest(package) == first
    assert read == []
    header.write_text("another")
    assert include_digest(package) != first
    header.rename(header.with_name("two.cuh"))
    assert include_digest(package) not in (first, "")


def test_no_package_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)

    with pytest.raises(CompilerUnavailable, match="deep_gemm is not installed"):
        find_package()


def test_an_all_python_package_is_explained(tmp_path: Path) -> None:
    directory = make_package(tmp_path, new=False)
    (directory / "_C.so").unlink()

    with pytest.raises(CompilerUnavailable, match="Install sgl-deep-gemm instead"):
        find_package(directory)


def test_a_package_without_a_version_is_still_usable(tmp_path: Path) -> None:
    directory = make_package(tmp_path, new=True)
    (directory / "VERSION").unlink()

    assert find_package(directory).version == "unknown"


def test_the_engines_own_copy_is_found_where_no_other_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "vllm/third_party/deep_gemm"
    (copy / "include/deep_gemm").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('located, not imported')")
    (copy / "_C.so").write_bytes(b"ELF .committed")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)

    found = find_package()

    assert (found.directory, found.line) == (copy, Line.DEEP_JIT)


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({}, "/home/me/.cache/vllm/deep_gemm"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/vllm/deep_gemm"),
        ({"XDG_CACHE_HOME": "/cache", "VLLM_CACHE_ROOT": "/volume"}, "/volume/deep_gemm"),
        ({"VLLM_CACHE_ROOT": "~/v"}, "/home/me/v/deep_gemm"),
    ],
)
def test_an_engines_own_copy_keeps_its_kernels_where_the_engine_says(
    environment: dict[str, str], root: str
) -> None:
    copy = Package(directory=Path("/site/vllm/third_party/deep_gemm"), line=Line.DEEP_JIT, version="x")

    assert vendors_default(copy, environment, Path("/home/me")) == Path(root)


def test_any_other_package_keeps_its_kernels_where_the_library_says() -> None:
    package = Package(directory=Path("/site/deep_gemm"), line=Line.DEEP_JIT, version="x")

    assert vendors_default(package, {"VLLM_CACHE_ROOT": "/volume"}, Path("/home/me")) is None
