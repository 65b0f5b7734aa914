"""What `prefetchd run` adds to an engine's environment and to the daemon's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from as_user import as_nameless_user
from fake_deep_gemm import make_nvcc

from prefetchd.compilers.nvcc import STAND_IN
from prefetchd.config import Settings
from prefetchd.engine_environment import (
    SITE,
    Addition,
    daemon_environment,
    engine_environment,
    key_additions,
    observed_additions,
)

DEEP_JIT = b"...committed"


@pytest.fixture
def packages() -> Iterator[Path]:
    """A directory that every user may enter, as pytest's own are not."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def install(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs empty packages of these names, and nothing else, for this interpreter."""
    # Kept are the places of the standard library, which the code under test may still import from.
    kept = [entry for entry in sys.path if "-packages" not in entry]
    monkeypatch.setattr(sys, "path", [str(packages), *kept])
    monkeypatch.setattr(
        sys, "meta_path", [one for one in sys.meta_path if "__editable__" not in type(one).__module__]
    )
    for name in ("deep_gemm", "triton", "vllm", "sglang", "tensorrt_llm"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def make(*names: str, extension: bytes = DEEP_JIT) -> None:
        for name in names:
            package = packages / name
            (package / "include/deep_gemm").mkdir(parents=True)
            (package / "__init__.py").write_text("raise AssertionError('imported')\n")
            (package / "_C.so").write_bytes(extension)

    return make


def added(environment: dict[str, str]) -> dict[str, str]:
    return {one.name: one.value for one in key_additions(environment)}


def test_each_installed_librarys_cache_is_set_to_its_own_default(install: Callable[..., None]) -> None:
    install("deep_gemm", "triton")

    assert added({"HOME": "/home/me"}) == {
        "TRITON_CACHE_AUTOTUNING": "1",
        "DG_JIT_CACHE_DIR": "/home/me/.dj",
        "TRITON_CACHE_DIR": "/home/me/.triton/cache",
    }


def test_the_older_deep_gemm_has_another_default(install: Callable[..., None]) -> None:
    install("deep_gemm", extension=b"older")

    assert added({"HOME": "/home/me"})["DG_JIT_CACHE_DIR"] == "/home/me/.deep_gemm"


def test_a_mere_directory_of_an_engines_name_is_not_that_engine(
    install: Callable[..., None], packages: Path
) -> None:
    install("deep_gemm")
    (packages / "vllm").mkdir()

    assert added({"HOME": "/home/me"})["DG_JIT_CACHE_DIR"] == "/home/me/.dj"


def test_a_library_that_is_not_installed_gets_no_directory(install: Callable[..., None]) -> None:
    install()

    assert added({"HOME": "/home/me"}) == {"TRITON_CACHE_AUTOTUNING": "1"}


@pytest.mark.parametrize("variable", ["TRITON_CACHE_AUTOTUNING", "DG_JIT_CACHE_DIR", "TRITON_CACHE_DIR"])
@pytest.mark.parametrize("value", ["relative", ""])
def test_what_is_set_is_left_alone_even_if_empty_or_relative(
    install: Callable[..., None], variable: str, value: str
) -> None:
    install("deep_gemm", "triton")

    assert variable not in added({"HOME": "/home/me", variable: value})


def test_the_newer_deep_gemms_second_variable_counts_as_set(install: Callable[..., None]) -> None:
    install("deep_gemm")

    assert "DG_JIT_CACHE_DIR" not in added({"HOME": "/home/me", "DJ_JIT_CACHE_DIR": "/x"})


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm"])
def test_an_engine_with_a_deep_gemm_cache_of_its_own_keeps_it(
    install: Callable[..., None], engine: str
) -> None:
    install("deep_gemm", "triton", engine)

    assert set(added({"HOME": "/home/me"})) == {"TRITON_CACHE_AUTOTUNING", "TRITON_CACHE_DIR"}


def test_tritons_home_moves_its_default(install: Callable[..., None]) -> None:
    install("triton")

    assert added({"HOME": "/home/me", "TRITON_HOME": "/scratch"})["TRITON_CACHE_DIR"] == (
        "/scratch/.triton/cache"
    )


def test_a_relative_default_is_made_absolute_at_the_same_place(
    install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("deep_gemm", "triton")
    monkeypatch.chdir(tmp_path)

    assert added({"HOME": "here"}) == {
        "TRITON_CACHE_AUTOTUNING": "1",
        "DG_JIT_CACHE_DIR": f"{tmp_path}/here/.dj",
        "TRITON_CACHE_DIR": f"{tmp_path}/here/.triton/cache",
    }


def test_without_home_the_defaults_are_where_the_libraries_make_them(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("deep_gemm", "triton")
    monkeypatch.chdir("/")

    found = as_nameless_user(lambda: added({}))

    # deep_gemm takes the empty home; Triton's Python leaves `~` as it is where there is no passwd entry.
    assert found["DG_JIT_CACHE_DIR"] == "/.dj"
    assert found["TRITON_CACHE_DIR"] == "/~/.triton/cache"


ADDED = [Addition("TRITON_CACHE_DIR", "/c", "why")]


def test_the_engine_is_switched_on_with_ours_in_front() -> None:
    child = engine_environment({"A": "1", "PYTHONPATH": "/p:/q"}, ADDED)

    assert child == {
        "A": "1",
        "TRITON_CACHE_DIR": "/c",
        "PREFETCHD": "1",
        "PYTHONPATH": f"{SITE}:/p:/q",
    }


def test_run_within_run_adds_nothing() -> None:
    once = engine_environment({"PYTHONPATH": "/p"}, ADDED)

    assert engine_environment(once, []) == once


@pytest.mark.parametrize("value", ["", ":"])
def test_no_empty_entry_adds_the_working_directory(value: str) -> None:
    assert engine_environment({"PYTHONPATH": value}, [])["PYTHONPATH"] == str(SITE)


def test_the_daemon_gets_what_enters_keys_and_nothing_that_makes_an_engine() -> None:
    engine = engine_environment({"A": "1", "PYTHONPATH": "/p"}, ADDED)

    assert daemon_environment(engine, ADDED) == {"A": "1", "TRITON_CACHE_DIR": "/c", "PYTHONPATH": "/p"}


def test_the_daemon_does_not_speak_to_the_engines_service_manager() -> None:
    manager = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "7"}

    assert daemon_environment({"A": "1", **manager}, []) == {"A": "1"}
    assert engine_environment(manager, []).items() >= manager.items()


def test_our_directory_holds_what_python_looks_for() -> None:
    assert (SITE / "sitecustomize.py").is_file()
    assert os.pathsep not in str(SITE)


def observed(environment: dict[str, str], **settings: Any) -> dict[str, str]:
    found = observed_additions(environment, msgspec.convert(settings, Settings))
    return {one.name: one.value for one in found}


def test_nvccs_stand_in_runs_before_the_nvcc_that_the_engine_would_start(
    install: Callable[..., None], tmp_path: Path
) -> None:
    install("deep_gemm")
    nvcc = make_nvcc(tmp_path / "cuda/bin/nvcc")

    assert observed({"CUDA_HOME": str(tmp_path / "cuda")}) == {
        "DG_JIT_NVCC_COMPILER": str(STAND_IN),
        "PREFETCHD_NVCC_MODE": "observe",
        "PREFETCHD_REAL_NVCC": str(nvcc),
    }
    mine = {"DG_JIT_NVCC_COMPILER": str(nvcc)}
    (reason,) = [one.reason for one in observed_additions(mine, Settings()) if one.name in mine]
    assert reason == f"to see what nvcc compiles; {nvcc} runs behind it"


def test_an_engine_within_another_keeps_its_stand_in(install: Callable[..., None], tmp_path: Path) -> None:
    install("deep_gemm")
    environment = {"CUDA_HOME": str(make_nvcc(tmp_path / "cuda/bin/nvcc").parents[1])}

    assert observed({**environment, **observed(environment)}) == {}


def test_nvcc_is_left_alone_where_nothing_uses_it_or_nobody_observes(
    install: Callable[..., None], tmp_path: Path
) -> None:
    install("triton")
    environment = {"CUDA_HOME": str(make_nvcc(tmp_path / "cuda/bin/nvcc").parents[1])}
    assert observed(environment) == {}
    assert observed(environment, observe_nvcc=["PYTORCH_NVCC"])["PYTORCH_NVCC"] == str(STAND_IN)

    install("deep_gemm")
    assert observed(environment, observe=False) == {}
    assert observed({**environment, "DG_JIT_USE_NVRTC": "1"}) == {}


def test_the_daemon_gets_nothing_of_the_stand_in(install: Callable[..., None], tmp_path: Path) -> None:
    install("deep_gemm")
    environment = {"CUDA_HOME": str(make_nvcc(tmp_path / "cuda/bin/nvcc").parents[1]), "HOME": "/home/me"}

    child = daemon_environment(environment, key_additions(environment))

    assert "DG_JIT_NVCC_COMPILER" not in child
    assert "PREFETCHD_NVCC_MODE" not in child
