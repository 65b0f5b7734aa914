"""Finding the real nvcc, its messages, and the stand-in that takes its place."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fake_deep_gemm import make_nvcc

from prefetchd.compilers import nvcc as module
from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.compilers.nvcc import STAND_IN, Nvcc, find_nvcc

LIBRARY_VARIABLE = "DG_JIT_NVCC_COMPILER"


def find(environment: dict[str, str]) -> Nvcc:
    return find_nvcc(environment, minimum=(12, 9), compiler_variables=(LIBRARY_VARIABLE,))


def stand_in(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run([STAND_IN, *arguments], env=base, capture_output=True, text=True)


def test_each_place_gives_way_to_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["default/bin/nvcc", "path/nvcc", "cuda/bin/nvcc", "library/nvcc", "ours/nvcc"]
    places = [make_nvcc(tmp_path / name) for name in names]
    variables = [
        {},
        {"PATH": f"{tmp_path / 'path'}:{os.environ['PATH']}"},
        {"CUDA_HOME": str(tmp_path / "cuda")},
        {LIBRARY_VARIABLE: str(places[3])},
        {"PREFETCHD_REAL_NVCC": str(places[4])},
    ]
    monkeypatch.setattr(module, "DEFAULT_CUDA_HOME", tmp_path / "default")
    environment = {"PATH": "/usr/bin:/bin"}

    for place, addition in zip(places, variables, strict=True):
        environment |= addition
        assert find(environment).path == place


def test_release_and_text_are_read(tmp_path: Path) -> None:
    found = find(
        {"CUDA_HOME": str(make_nvcc(tmp_path / "bin/nvcc", release="12.9").parents[1]), "PATH": "/bin"}
    )

    assert found.release == (12, 9)
    assert found.version_text == "Cuda tools, release 12.9, V12.9.88\n"


def test_none_at_all_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEFAULT_CUDA_HOME", tmp_path)

    with pytest.raises(
        CompilerUnavailable, match=r"no nvcc was found.*Install a CUDA compiler and set CUDA_HOME"
    ):
        find({"PATH": str(tmp_path)})


@pytest.mark.parametrize("variable", ["PREFETCHD_REAL_NVCC", LIBRARY_VARIABLE, "CUDA_HOME", "CUDA_PATH"])
def test_a_variable_that_leads_nowhere_is_named(tmp_path: Path, variable: str) -> None:
    with pytest.raises(CompilerUnavailable, match=f"{variable} leads to {tmp_path}"):
        find({"PATH": os.environ["PATH"], variable: str(tmp_path / "absent")})


def test_too_old_is_explained(tmp_path: Path) -> None:
    place = make_nvcc(tmp_path / "nvcc", release="12.8")

    with pytest.raises(CompilerUnavailable, match=r"is nvcc 12\.8; .* needs 12\.9 or newer"):
        find({"PREFETCHD_REAL_NVCC": str(place), "PATH": os.environ["PATH"]})


@pytest.mark.parametrize(
    "script",
    ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho hello\n", r"#!/bin/sh" "\n" r"printf '\377\n'", "not a program"],
)
def test_a_broken_one_is_named(tmp_path: Path, script: str) -> None:
    place = tmp_path / "nvcc"
    place.write_text(script)
    place.chmod(0o755)

    with pytest.raises(CompilerUnavailable, match=str(place)):
        find({"PREFETCHD_REAL_NVCC": str(place), "PATH": os.environ["PATH"]})


def test_our_stand_in_is_never_taken_for_the_real_one(tmp_path: Path) -> None:
    (tmp_path / "nvcc").symlink_to(STAND_IN)
    real = make_nvcc(tmp_path / "cuda/bin/nvcc")

    environment = {
        LIBRARY_VARIABLE: str(tmp_path / "nvcc"),
        "CUDA_HOME": str(tmp_path / "cuda"),
        "PATH": "/bin",
    }

    assert find(environment).path == real


def test_the_stand_in_answers_with_the_real_text(tmp_path: Path) -> None:
    real = make_nvcc(tmp_path / "nvcc", release="13.0")

    assert (
        stand_in("--version", PREFETCHD_REAL_NVCC=str(real)).stdout
        == find({"PREFETCHD_REAL_NVCC": str(real), "PATH": os.environ["PATH"]}).version_text
    )


@pytest.mark.parametrize("output", [["-o", "{}"], ["--output-file", "{}"], ["--output-file={}"]])
def test_the_stand_in_records_arguments_as_they_are(tmp_path: Path, output: list[str]) -> None:
    cubin = tmp_path / "a b/kernel.cubin"
    cubin.parent.mkdir()
    arguments = ["kernel.cu", "-DX=a b", "", "-I/x'y", *[part.format(cubin) for part in output], "new\nline"]

    done = stand_in(*arguments, PREFETCHD_NVCC_MODE="capture")

    assert done.returncode == 0, done.stderr
    assert cubin.stat().st_size > 0
    assert (cubin.parent / "prefetchd.argv").read_bytes() == b"".join(
        part.encode() + b"\0" for part in arguments
    )


def test_the_stand_in_fails_outside_a_trace(tmp_path: Path) -> None:
    done = stand_in("kernel.cu", "-o", str(tmp_path / "kernel.cubin"))

    assert done.returncode == 1
    assert "outside a trace" in done.stderr
    assert not (tmp_path / "kernel.cubin").exists()


def test_the_stand_in_fails_without_an_output() -> None:
    done = stand_in("kernel.cu", PREFETCHD_NVCC_MODE="capture")

    assert done.returncode == 1
    assert "without an output" in done.stderr
