"""The doctor and the programs a compile starts: fake compilers that answer as real ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_machines import fake_cuda, install, install_deep_gemm, machine, script

from prefetchd.doctor import tools
from prefetchd.doctor.facts import Machine, ProgramFailed, State


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


def test_new_enough_nvcc_is_named_with_its_release(tmp_path: Path) -> None:
    nvcc = fake_cuda(tmp_path / "cuda")

    verdict = tools.nvcc(machine(CUDA_HOME=str(tmp_path / "cuda")))

    assert (verdict.state, verdict.found) == ("ok", f"{nvcc}, release 13.0")


def test_the_variable_of_deep_gemm_wins_over_cuda_home(tmp_path: Path) -> None:
    fake_cuda(tmp_path / "cuda", "12.9")
    named = fake_cuda(tmp_path / "other")

    verdict = tools.nvcc(machine(CUDA_HOME=str(tmp_path / "cuda"), DG_JIT_NVCC_COMPILER=str(named)))

    assert verdict.found.startswith(str(named))


@pytest.mark.parametrize(
    ("release", "new_line", "state"),
    [("12.8", True, "fail"), ("12.9", True, "ok"), ("12.8", False, "ok"), ("12.2", False, "fail")],
)
def test_each_line_of_deep_gemm_has_its_oldest_nvcc(
    tmp_path: Path, site: Path, release: str, new_line: bool, state: State
) -> None:
    fake_cuda(tmp_path / "cuda", release)
    install_deep_gemm(site, new_line=new_line)

    assert tools.nvcc(machine(site, CUDA_HOME=str(tmp_path / "cuda"))).state == state


def test_old_nvcc_without_deep_gemm_is_only_a_warning_that_says_what_to_install(tmp_path: Path) -> None:
    fake_cuda(tmp_path / "cuda", "12.4")

    verdict = tools.nvcc(machine(CUDA_HOME=str(tmp_path / "cuda")))

    assert verdict.state == "warn"
    assert "12.9" in verdict.advice


def test_nvcc_that_cannot_run_fails_only_where_deep_gemm_needs_it(tmp_path: Path, site: Path) -> None:
    variables = {"CUDA_HOME": str(tmp_path / "gone")}
    without = tools.nvcc(machine(site, **variables))
    install_deep_gemm(site)

    with_library = tools.nvcc(machine(site, **variables))

    assert (without.state, with_library.state) == ("missing", "fail")
    assert "CUDA_HOME" in with_library.found


def test_headers_are_sought_where_nvcc_itself_looks(tmp_path: Path) -> None:
    fake_cuda(tmp_path / "cuda")
    wrapper = script(tmp_path / "bin/nvcc", f'exec {tmp_path}/cuda/bin/nvcc "$@"')

    verdict = tools.cuda_headers(machine(DG_JIT_NVCC_COMPILER=str(wrapper)))

    assert (verdict.state, verdict.found) == ("ok", f"{tmp_path}/cuda/targets/include/cuda_runtime.h")


def test_absent_headers_name_the_directories_that_were_searched(tmp_path: Path, site: Path) -> None:
    fake_cuda(tmp_path / "cuda")
    (tmp_path / "cuda/targets/include/cuda_runtime.h").unlink()
    install_deep_gemm(site)

    verdict = tools.cuda_headers(machine(site, CUDA_HOME=str(tmp_path / "cuda")))

    assert verdict.state == "fail"
    assert f"{tmp_path}/cuda/targets/include/cccl" in verdict.found


def test_maths_headers_may_come_from_cpath(tmp_path: Path) -> None:
    fake_cuda(tmp_path / "cuda")
    (tmp_path / "maths").mkdir()
    (tmp_path / "maths/curand.h").touch()
    home = str(tmp_path / "cuda")

    without = tools.maths_headers(machine(CUDA_HOME=home))
    added = tools.maths_headers(machine(CUDA_HOME=home, CPATH=str(tmp_path / "maths")))

    assert (without.state, added.state) == ("warn", "ok")


def test_host_compiler_must_really_know_cpp(tmp_path: Path, site: Path) -> None:
    fake_cuda(tmp_path / "cuda")
    install_deep_gemm(site)
    variables = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": str(tmp_path / "bin")}
    script(tmp_path / "bin/c++", "exit 0")
    good = tools.host_compiler(machine(site, **variables))
    script(tmp_path / "bin/c++", "echo cannot execute cc1plus >&2; exit 1")

    bad = tools.host_compiler(machine(site, **variables))

    assert (good.state, good.found) == ("ok", str(tmp_path / "bin/c++"))
    assert bad.state == "fail"
    assert "cc1plus" in bad.found


def test_nvcc_without_a_host_compiler_says_what_to_install(tmp_path: Path, site: Path) -> None:
    script(tmp_path / "bin/nvcc", '[ "$1" = --version ] && echo "release 13.0," && exit; echo fatal; exit 1')
    install_deep_gemm(site)

    verdict = tools.host_compiler(machine(site, PATH=str(tmp_path / "bin")))

    assert verdict.state == "fail"
    assert "g++" in verdict.advice


def test_unset_path_is_named_as_the_cause(tmp_path: Path, site: Path) -> None:
    nvcc = script(tmp_path / "nvcc", '[ "$1" = --version ] && echo "release 13.0," && exit; exit 1')
    install_deep_gemm(site)
    bare = Machine(environment={"DG_JIT_NVCC_COMPILER": str(nvcc)}, packages=(str(site),))

    assert tools.host_compiler(bare).advice.startswith("PATH is not set")


def test_output_of_a_failed_program_keeps_the_line_that_says_why(tmp_path: Path) -> None:
    failing = script(tmp_path / "fail", "echo no cc1plus >&2; echo fatal >&2; exit 3")

    with pytest.raises(ProgramFailed, match="status 3: no cc1plus / fatal"):
        machine().run(str(failing))


def test_cuobjdump_is_optional_until_a_dump_is_asked_for() -> None:
    assert tools.cuobjdump(machine()).state == "missing"
    assert tools.cuobjdump(machine(DG_JIT_DUMP_SASS="0")).state == "missing"
    assert tools.cuobjdump(machine(DG_JIT_DUMP_SASS="1")).state == "fail"


def test_cuobjdump_beside_nvcc_is_found(tmp_path: Path) -> None:
    fake_cuda(tmp_path / "cuda")
    beside = script(tmp_path / "cuda/bin/cuobjdump", "exit 0")

    assert tools.cuobjdump(machine(CUDA_HOME=str(tmp_path / "cuda"))).found == str(beside)


def test_c_compiler_is_needed_by_triton_only(site: Path) -> None:
    without = tools.c_compiler(machine(site))
    install(site, "triton", "3.8.0")

    assert (without.state, tools.c_compiler(machine(site)).state) == ("missing", "fail")


def test_cc_may_hold_a_launcher_and_must_exist(tmp_path: Path) -> None:
    script(tmp_path / "bin/ccache", "exit 0")
    path = str(tmp_path / "bin")

    assert tools.c_compiler(machine(PATH=path, CC="ccache gcc")).state == "ok"
    assert tools.c_compiler(machine(PATH=path, CC="icc")).state == "fail"


@pytest.mark.parametrize(("value", "state"), [("1", "fail"), ("0", "ok"), ("", "ok")])
def test_nvrtc_is_a_failure_with_its_fix(value: str, state: State) -> None:
    verdict = tools.nvrtc(machine(DG_JIT_USE_NVRTC=value))

    assert verdict.state == state
    assert ("unset DG_JIT_USE_NVRTC" in verdict.advice) == (state == "fail")


def test_hanging_program_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetchd.doctor.facts.PROGRAM_TIMEOUT_S", 0.1)
    hanging = script(tmp_path / "hang", "read never < /dev/zero")

    with pytest.raises(ProgramFailed, match=r"no answer within 0\.1 s"):
        machine().run(str(hanging))
