"""Machines that are not this one: temporary packages and fake compilers, for the tests of the doctor."""

from __future__ import annotations

from pathlib import Path

from prefetchd.doctor.facts import Machine, Mount


def install(site: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    """The metadata of an installed distribution."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires), ""]))


def install_torch(site: Path, version: str = "2.14.1", cuda: str | None = "13.0") -> None:
    install(site, "torch", version)
    (site / "torch/lib").mkdir(parents=True)
    (site / "torch/__init__.py").write_text("raise AssertionError('the doctor imported torch')")
    (site / "torch/version.py").write_text(f"from typing import Optional\ncuda: Optional[str] = {cuda!r}\n")
    if cuda:
        (site / "torch/lib/libtorch_cuda.so").touch()


def install_deep_gemm(site: Path, *, new_line: bool = True, cuda: int = 13) -> None:
    install(site, "sgl-deep-gemm", "0.2.5" if new_line else "0.1.7")
    package = site / "deep_gemm"
    (package / "include/deep_gemm").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the doctor imported deep_gemm')")
    marker = b".committed\0" if new_line else b""
    (package / "_C.so").write_bytes(b"\x7fELF..." + f"libcudart.so.{cuda}\0".encode() + marker)


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fake_cuda(root: Path, release: str = "13.0") -> Path:
    """A CUDA home whose nvcc answers its version and a dry run, with the runtime's header."""
    include = root / "targets/include"
    include.mkdir(parents=True)
    (include / "cuda_runtime.h").touch()
    return script(
        root / "bin/nvcc",
        f"""case "$*" in
        --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
        *-dryrun*)
            echo '#$ INCLUDES="-I{root}/bin/../targets/include"  '
            echo '#$ SYSTEM_INCLUDES="-isystem" "{root}/bin/../targets/include/cccl"  '
            echo '#$ c++ -D__CUDA_ARCH_LIST__=750 -E -x c++ -D__CUDACC__ -o "/tmp/x.ii"' ;;
        *) exit 9 ;;
        esac""",
    )


def machine(site: Path | None = None, **environment: str) -> Machine:
    """A machine with one package directory and nothing in its environment but what is given."""
    return Machine(
        environment={"PATH": "/nowhere", **environment},
        packages=(str(site),) if site else (),
        mounts=(Mount("/", "ext4"),),
        uid=1000,
        user="someone",
    )
