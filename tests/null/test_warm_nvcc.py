"""nvcc missing, too old, failing, hanging or killed: what is said, what is published, what is left."""

from __future__ import annotations

from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from warming import SMALL_VARIANTS, Bench

# The one kernel of the small profile that is no GEMM.
ONLY_TRANSPOSE = "grep -q transpose_fp32 $source && "


def test_nvcc_that_is_missing_ends_the_command_with_what_to_set(bench: Bench) -> None:
    done = bench.warm(changes={"DG_JIT_NVCC_COMPILER": "/nowhere/nvcc"})

    assert done.status == 2
    assert done.out == ""
    assert "DG_JIT_NVCC_COMPILER leads to /nowhere/nvcc, which is not an executable file" in done.err
    assert "Set DG_JIT_NVCC_COMPILER to an installed CUDA compiler" in done.err
    assert "Traceback" not in done.err


def test_nvcc_that_is_too_old_ends_the_command_with_the_version_it_needs(bench: Bench) -> None:
    version = bench.nvcc.directory / "version.txt"
    version.write_text(version.read_text().replace("release 13.0", "release 12.4"))

    done = bench.warm()

    assert done.status == 2
    assert f"{bench.nvcc.path} (DG_JIT_NVCC_COMPILER) is nvcc 12.4" in done.err
    assert "needs 12.9 or newer" in done.err


def test_nvrtc_ends_the_command_with_the_variable_to_unset(bench: Bench) -> None:
    done = bench.warm(changes={"DG_JIT_USE_NVRTC": "1"})

    assert done.status == 2
    assert "Unset DG_JIT_USE_NVRTC, here and in the engine" in done.err


def test_one_failing_kernel_leaves_the_others_published_and_its_requests_uncovered(bench: Bench) -> None:
    bench.nvcc.behave(ONLY_TRANSPOSE + "{ echo 'error: no such tile'; exit 2; }")

    done = bench.warm()

    assert done.status == 1
    assert done.counts("variants", "compiled", "failed") == (SMALL_VARIANTS, SMALL_VARIANTS - 1, 1)
    assert len(bench.entries()) == SMALL_VARIANTS - 1
    compile_problem, *misses = done.figures["problems"]
    assert compile_problem["kind"] == "compile"
    assert "exit code 2" in compile_problem["text"]
    assert "error: no such tile" in compile_problem["text"]
    assert {miss["kind"] for miss in misses} == {"miss"}
    assert all("scale_layout" in miss["what"] for miss in misses)
    assert done.figures["uncovered"] == len(misses)
    assert bench.leftovers() == []


def test_every_request_of_a_failing_layout_is_counted(bench: Bench) -> None:
    tile = "grep -q sm90_fp8_gemm_1d2d_impl $source"
    bench.nvcc.behave(f"{tile} && exit 2")

    done = bench.warm()

    assert done.status == 1
    assert done.counts("compiled", "failed") == (1, SMALL_VARIANTS - 1)
    assert done.figures["uncovered"] == done.figures["requests"]


def test_nvcc_that_hangs_is_ended_with_all_it_started(bench: Bench) -> None:
    pids = bench.place / "pids"
    bench.nvcc.behave(f"{ONLY_TRANSPOSE}{{ sleep 1000 & echo $$ $! >{pids}; wait; }}")

    done = bench.warm(changes={"PREFETCHD_JOB_TIMEOUT_S": "1"})

    assert done.status == 1
    assert done.counts("compiled", "failed") == (SMALL_VARIANTS - 1, 1)
    assert "did not end within its time limit (1 s)" in done.figures["problems"][0]["text"]
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    assert not any(psutil.pid_exists(pid) for pid in started)


def test_nvcc_that_is_killed_fails_its_kernel_alone(bench: Bench) -> None:
    bench.nvcc.behave(ONLY_TRANSPOSE + "kill -9 $$")

    done = bench.warm()

    assert done.status == 1
    assert done.counts("compiled", "failed") == (SMALL_VARIANTS - 1, 1)
    assert "killed by SIGKILL" in done.figures["problems"][0]["text"]


def test_output_for_another_device_is_never_published(bench: Bench) -> None:
    wrong = bench.nvcc.directory / "100.cubin"
    bench.nvcc.behave(f"{ONLY_TRANSPOSE}cubin={wrong}")

    done = bench.warm()

    assert done.status == 1
    assert done.counts("compiled", "failed") == (SMALL_VARIANTS - 1, 1)
    assert "compiled for sm_100, not for sm_90" in done.figures["problems"][0]["text"]
    assert not any("transpose" in entry.name for entry in bench.entries())


@pytest.mark.parametrize("name", ["DG_JIT_NVCC_COMPILER", "CUDA_HOME"])
def test_nvcc_is_taken_from_where_the_library_takes_it(bench: Bench, name: str) -> None:
    home = bench.place / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "bin/nvcc").symlink_to(bench.nvcc.path)
    places: dict[str, str | None] = {"DG_JIT_NVCC_COMPILER": None, "CUDA_HOME": None}
    places[name] = str(home if name == "CUDA_HOME" else bench.nvcc.path)

    done = bench.warm(changes=places)

    assert done.status == 0
    assert len(bench.nvcc.compiles()) == SMALL_VARIANTS
    assert Path(bench.nvcc.compiles()[0]).name == "kernel.cu"
