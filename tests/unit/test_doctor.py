"""The doctor on machines that are not this one: temporary packages, fake compilers, invented mounts."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prefetchd import doctor, doctor_caches, doctor_libraries, doctor_self, doctor_tools
from prefetchd.doctor import Check, Findings, examine, render
from prefetchd.doctor_facts import Machine, Mount, ProgramFailed, State, this_machine
from prefetchd.null_device.guard import NullDeviceBroken
from prefetchd.targets import Target, TargetError, load_target

ROOT = Path(doctor.__file__).parents[1]
STRANGER = 12345
EXAMINE = """
import json, os, sys
from prefetchd.doctor import examine
findings = examine(os.environ)
print(json.dumps({"ok": findings.ok, "torch": "torch" in sys.modules,
                  "checks": {c.name: [c.state, c.found, c.advice] for c in findings.checks}}))
"""


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
    if new_line:
        (package / "include/deep_jit").mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the doctor imported deep_gemm')")
    (package / "_C.so").write_bytes(b"\x7fELF..." + f"libcudart.so.{cuda}\0".encode())


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


class TestTools:
    def test_new_enough_nvcc_is_named_with_its_release(self, tmp_path: Path) -> None:
        nvcc = fake_cuda(tmp_path / "cuda")

        verdict = doctor_tools.nvcc(machine(CUDA_HOME=str(tmp_path / "cuda")))

        assert (verdict.state, verdict.found) == ("ok", f"{nvcc}, release 13.0")

    def test_the_variable_of_deep_gemm_wins_over_cuda_home(self, tmp_path: Path) -> None:
        fake_cuda(tmp_path / "cuda", "12.9")
        named = fake_cuda(tmp_path / "other")

        verdict = doctor_tools.nvcc(
            machine(CUDA_HOME=str(tmp_path / "cuda"), DG_JIT_NVCC_COMPILER=str(named))
        )

        assert verdict.found.startswith(str(named))

    @pytest.mark.parametrize(
        ("release", "new_line", "state"),
        [("12.8", True, "fail"), ("12.9", True, "ok"), ("12.8", False, "ok"), ("12.2", False, "fail")],
    )
    def test_each_line_of_deep_gemm_has_its_oldest_nvcc(
        self, tmp_path: Path, site: Path, release: str, new_line: bool, state: State
    ) -> None:
        fake_cuda(tmp_path / "cuda", release)
        install_deep_gemm(site, new_line=new_line)

        assert doctor_tools.nvcc(machine(site, CUDA_HOME=str(tmp_path / "cuda"))).state == state

    def test_old_nvcc_without_deep_gemm_is_only_a_warning_that_says_what_to_install(
        self, tmp_path: Path
    ) -> None:
        fake_cuda(tmp_path / "cuda", "12.4")

        verdict = doctor_tools.nvcc(machine(CUDA_HOME=str(tmp_path / "cuda")))

        assert verdict.state == "warn"
        assert "12.9" in verdict.advice

    def test_nvcc_that_cannot_run_fails_only_where_deep_gemm_needs_it(
        self, tmp_path: Path, site: Path
    ) -> None:
        variables = {"CUDA_HOME": str(tmp_path / "gone")}
        without = doctor_tools.nvcc(machine(site, **variables))
        install_deep_gemm(site)

        with_library = doctor_tools.nvcc(machine(site, **variables))

        assert (without.state, with_library.state) == ("missing", "fail")
        assert "CUDA_HOME" in with_library.found

    def test_headers_are_sought_where_nvcc_itself_looks(self, tmp_path: Path) -> None:
        fake_cuda(tmp_path / "cuda")
        wrapper = script(tmp_path / "bin/nvcc", f'exec {tmp_path}/cuda/bin/nvcc "$@"')

        verdict = doctor_tools.cuda_headers(machine(DG_JIT_NVCC_COMPILER=str(wrapper)))

        assert (verdict.state, verdict.found) == ("ok", f"{tmp_path}/cuda/targets/include/cuda_runtime.h")

    def test_absent_headers_name_the_directories_that_were_searched(self, tmp_path: Path, site: Path) -> None:
        fake_cuda(tmp_path / "cuda")
        (tmp_path / "cuda/targets/include/cuda_runtime.h").unlink()
        install_deep_gemm(site)

        verdict = doctor_tools.cuda_headers(machine(site, CUDA_HOME=str(tmp_path / "cuda")))

        assert verdict.state == "fail"
        assert f"{tmp_path}/cuda/targets/include/cccl" in verdict.found

    def test_maths_headers_may_come_from_cpath(self, tmp_path: Path) -> None:
        fake_cuda(tmp_path / "cuda")
        (tmp_path / "maths").mkdir()
        (tmp_path / "maths/curand.h").touch()
        home = str(tmp_path / "cuda")

        without = doctor_tools.maths_headers(machine(CUDA_HOME=home))
        added = doctor_tools.maths_headers(machine(CUDA_HOME=home, CPATH=str(tmp_path / "maths")))

        assert (without.state, added.state) == ("warn", "ok")

    def test_host_compiler_must_really_know_cpp(self, tmp_path: Path, site: Path) -> None:
        fake_cuda(tmp_path / "cuda")
        install_deep_gemm(site)
        variables = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": str(tmp_path / "bin")}
        script(tmp_path / "bin/c++", "exit 0")
        good = doctor_tools.host_compiler(machine(site, **variables))
        script(tmp_path / "bin/c++", "echo cannot execute cc1plus >&2; exit 1")

        bad = doctor_tools.host_compiler(machine(site, **variables))

        assert (good.state, good.found) == ("ok", str(tmp_path / "bin/c++"))
        assert bad.state == "fail"
        assert "cc1plus" in bad.found

    def test_nvcc_without_a_host_compiler_says_what_to_install(self, tmp_path: Path, site: Path) -> None:
        script(
            tmp_path / "bin/nvcc", '[ "$1" = --version ] && echo "release 13.0," && exit; echo fatal; exit 1'
        )
        install_deep_gemm(site)

        verdict = doctor_tools.host_compiler(machine(site, PATH=str(tmp_path / "bin")))

        assert verdict.state == "fail"
        assert "g++" in verdict.advice

    def test_unset_path_is_named_as_the_cause(self, tmp_path: Path, site: Path) -> None:
        nvcc = script(tmp_path / "nvcc", '[ "$1" = --version ] && echo "release 13.0," && exit; exit 1')
        install_deep_gemm(site)
        bare = Machine(environment={"DG_JIT_NVCC_COMPILER": str(nvcc)}, packages=(str(site),))

        assert doctor_tools.host_compiler(bare).advice.startswith("PATH is not set")

    def test_output_of_a_failed_program_keeps_the_line_that_says_why(self, tmp_path: Path) -> None:
        failing = script(tmp_path / "fail", "echo no cc1plus >&2; echo fatal >&2; exit 3")

        with pytest.raises(ProgramFailed, match="status 3: no cc1plus / fatal"):
            machine().run(str(failing))

    def test_cuobjdump_is_optional_until_a_dump_is_asked_for(self) -> None:
        assert doctor_tools.cuobjdump(machine()).state == "missing"
        assert doctor_tools.cuobjdump(machine(DG_JIT_DUMP_SASS="0")).state == "missing"
        assert doctor_tools.cuobjdump(machine(DG_JIT_DUMP_SASS="1")).state == "fail"

    def test_cuobjdump_beside_nvcc_is_found(self, tmp_path: Path) -> None:
        fake_cuda(tmp_path / "cuda")
        beside = script(tmp_path / "cuda/bin/cuobjdump", "exit 0")

        assert doctor_tools.cuobjdump(machine(CUDA_HOME=str(tmp_path / "cuda"))).found == str(beside)

    def test_c_compiler_is_needed_by_triton_only(self, site: Path) -> None:
        without = doctor_tools.c_compiler(machine(site))
        install(site, "triton", "3.8.0")

        assert (without.state, doctor_tools.c_compiler(machine(site)).state) == ("missing", "fail")

    def test_cc_may_hold_a_launcher_and_must_exist(self, tmp_path: Path) -> None:
        script(tmp_path / "bin/ccache", "exit 0")
        path = str(tmp_path / "bin")

        assert doctor_tools.c_compiler(machine(PATH=path, CC="ccache gcc")).state == "ok"
        assert doctor_tools.c_compiler(machine(PATH=path, CC="icc")).state == "fail"

    @pytest.mark.parametrize(("value", "state"), [("1", "fail"), ("0", "ok"), ("", "ok")])
    def test_nvrtc_is_a_failure_with_its_fix(self, value: str, state: State) -> None:
        verdict = doctor_tools.nvrtc(machine(DG_JIT_USE_NVRTC=value))

        assert verdict.state == state
        assert ("unset DG_JIT_USE_NVRTC" in verdict.advice) == (state == "fail")

    def test_hanging_program_is_given_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("prefetchd.doctor_facts.PROGRAM_TIMEOUT_S", 0.1)
        hanging = script(tmp_path / "hang", "read never < /dev/zero")

        with pytest.raises(ProgramFailed, match=r"no answer within 0\.1 s"):
            machine().run(str(hanging))


class TestLibraries:
    @pytest.mark.parametrize(("new_line", "name"), [(True, "DeepJIT line"), (False, "older line")])
    def test_deep_gemm_is_named_with_line_and_path(self, site: Path, new_line: bool, name: str) -> None:
        install_torch(site)
        install_deep_gemm(site, new_line=new_line)

        verdict = doctor_libraries.deep_gemm(machine(site))

        assert verdict.state == "ok"
        assert name in verdict.found
        assert str(site / "deep_gemm") in verdict.found

    def test_deep_gemm_without_torch_fails(self, site: Path) -> None:
        install_deep_gemm(site)

        assert doctor_libraries.deep_gemm(machine(site)).state == "fail"

    def test_all_python_deep_gemm_is_named_unusable(self, site: Path) -> None:
        (site / "deep_gemm").mkdir(parents=True)
        (site / "deep_gemm/__init__.py").touch()

        verdict = doctor_libraries.deep_gemm(machine(site))

        assert verdict.state == "fail"
        assert "sgl-deep-gemm" in verdict.advice

    def test_copy_inside_an_engine_is_pointed_out(self, site: Path) -> None:
        copy = site / "vllm/third_party/deep_gemm"
        copy.mkdir(parents=True)

        verdict = doctor_libraries.deep_gemm(machine(site))

        assert verdict.state == "missing"
        assert str(copy) in verdict.found

    def test_cpu_build_of_torch_fails_only_beside_deep_gemm(self, site: Path) -> None:
        install_torch(site, "2.14.1+cpu", cuda=None)
        alone = doctor_libraries.torch(machine(site))
        install_deep_gemm(site)

        assert (alone.state, doctor_libraries.torch(machine(site)).state) == ("warn", "fail")

    def test_cuda_build_of_torch_is_named_with_its_cuda(self, site: Path) -> None:
        install_torch(site, "2.14.1+cu130")

        assert doctor_libraries.torch(machine(site)).found.startswith("2.14.1+cu130, CUDA 13.0")

    @pytest.mark.parametrize(("version", "state"), [("3.5.1", "warn"), ("3.6.0", "ok"), ("3.10.0", "ok")])
    def test_releases_older_than_any_tried_are_a_warning(
        self, site: Path, version: str, state: State
    ) -> None:
        install(site, "triton", version)

        assert doctor_libraries.triton(machine(site)).state == state

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
    def test_broken_pin_among_kernel_libraries_fails(
        self, site: Path, requirement: str, broken: bool
    ) -> None:
        install(site, "torch", "2.14.1", (requirement,))
        install(site, "triton", "3.8.0+local")

        verdict = doctor_libraries.library_pairs(machine(site))

        assert verdict.state == ("fail" if broken else "ok")
        assert ("torch requires triton" in verdict.found) == broken

    def test_deep_gemm_linked_against_another_cuda_than_torch_fails(self, site: Path) -> None:
        install_torch(site)
        install_deep_gemm(site, cuda=12)

        verdict = doctor_libraries.library_pairs(machine(site))

        assert verdict.state == "fail"
        assert "libcudart.so.12" in verdict.found


class TestCaches:
    def test_default_directories_follow_line_and_home(self, tmp_path: Path, site: Path) -> None:
        install_deep_gemm(site)
        install(site, "triton", "3.8.0")
        before = machine(site, HOME=str(tmp_path))

        directories = doctor_caches.cache_directories(before)

        assert directories == [tmp_path / ".dj", tmp_path / ".triton/cache"]
        assert str(tmp_path / ".dj") in doctor_caches.mounts(before).found

    def test_older_line_has_its_own_default(self, tmp_path: Path, site: Path) -> None:
        install_deep_gemm(site, new_line=False)

        verdict = doctor_caches.deep_gemm_cache(machine(site, HOME=str(tmp_path)))

        assert verdict.found.startswith(str(tmp_path / ".deep_gemm"))

    def test_every_root_of_a_list_is_to_be_mounted_and_the_first_is_judged(
        self, tmp_path: Path, site: Path
    ) -> None:
        install_deep_gemm(site)
        listed = machine(site, DG_JIT_CACHE_DIR=f"{tmp_path}/own:{tmp_path}/baked")
        (tmp_path / "baked").mkdir()

        verdict = doctor_caches.deep_gemm_cache(listed)

        assert verdict.state == "ok"
        assert verdict.found.startswith(f"{tmp_path}/own: not made yet, writable")
        assert doctor_caches.cache_directories(listed) == [tmp_path / "own", tmp_path / "baked"]

    def test_root_of_a_list_that_cannot_be_read_is_a_warning(self, tmp_path: Path, site: Path) -> None:
        install_deep_gemm(site)

        verdict = doctor_caches.deep_gemm_cache(
            machine(site, DG_JIT_CACHE_DIR=f"{tmp_path}/own:{tmp_path}/gone")
        )

        assert verdict.state == "warn"
        assert f"{tmp_path}/gone" in verdict.advice

    @pytest.mark.parametrize("value", ["cache", "/absolute:relative", ""])
    def test_relative_directory_of_deep_gemm_fails(self, site: Path, value: str) -> None:
        install_deep_gemm(site)

        verdict = doctor_caches.deep_gemm_cache(machine(site, DG_JIT_CACHE_DIR=value))

        assert verdict.state == "fail"
        assert "DG_JIT_CACHE_DIR" in verdict.advice

    def test_deep_gemm_without_home_and_variable_has_no_cache(self, site: Path) -> None:
        install_deep_gemm(site)

        verdict = doctor_caches.deep_gemm_cache(machine(site))

        assert verdict.state == "fail"
        assert "DG_JIT_CACHE_DIR" in verdict.advice

    def test_cache_check_works_under_nvrtc(self, tmp_path: Path, site: Path) -> None:
        install_deep_gemm(site)

        verdict = doctor_caches.deep_gemm_cache(machine(site, HOME=str(tmp_path), DG_JIT_USE_NVRTC="1"))

        assert verdict.state == "ok"

    @pytest.mark.parametrize(
        ("environment", "place"),
        [
            ({"TRITON_CACHE_DIR": "/tmp/t", "HOME": "/home/x"}, "/tmp/t:"),
            ({"TRITON_HOME": "/tmp/th", "HOME": "/home/x"}, "/tmp/th/.triton/cache:"),
            ({"HOME": "/tmp/h"}, "/tmp/h/.triton/cache:"),
        ],
    )
    def test_triton_directory_follows_its_own_rule(
        self, site: Path, environment: dict[str, str], place: str
    ) -> None:
        install(site, "triton", "3.8.0")

        assert doctor_caches.triton_cache(machine(site, **environment)).found.startswith(place)

    def test_triton_without_any_home_would_use_a_directory_called_tilde(self, site: Path) -> None:
        install(site, "triton", "3.8.0")

        verdict = doctor_caches.triton_cache(machine(site))

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
    def test_network_file_system_is_a_warning(
        self, tmp_path: Path, site: Path, kind: str, state: State
    ) -> None:
        install(site, "triton", "3.8.0")
        shared = Machine(
            environment={"TRITON_CACHE_DIR": str(tmp_path / "deep/cache")},
            packages=(str(site),),
            mounts=(Mount("/", "ext4"), Mount(str(tmp_path), "autofs"), Mount(str(tmp_path), kind)),
        )

        verdict = doctor_caches.triton_cache(shared)

        assert verdict.state == state
        assert kind in verdict.found

    def test_cache_in_a_container_layer_is_told_to_be_mounted(self, tmp_path: Path, site: Path) -> None:
        install(site, "triton", "3.8.0")
        container = Machine(
            environment={"HOME": str(tmp_path)}, packages=(str(site),), mounts=(Mount("/", "overlay"),)
        )

        verdict = doctor_caches.mounts(container)

        assert verdict.state == "warn"
        assert str(tmp_path / ".triton/cache") in verdict.found

    def test_nearly_full_disk_is_a_warning(self, small_disk: Path, site: Path) -> None:
        install(site, "triton", "3.8.0")

        verdict = doctor_caches.triton_cache(machine(site, TRITON_CACHE_DIR=str(small_disk)))

        assert verdict.state == "warn"
        assert "1 GiB" in verdict.advice

    def test_read_only_file_system_fails_even_for_root(self, small_disk: Path, site: Path) -> None:
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        install(site, "triton", "3.8.0")

        verdict = doctor_caches.triton_cache(machine(site, TRITON_CACHE_DIR=str(small_disk / "cache")))

        assert verdict.state == "fail"
        assert "NOT writable" in verdict.found

    def test_inodes_running_out_are_a_warning(self) -> None:
        place = doctor_caches.Place(
            path=Path("/c"), exists=True, writable=True, kind="ext4", free_bytes=1 << 40, inode_use=0.97
        )

        verdict = doctor_caches.judge(place, "default", "TRITON_CACHE_DIR")

        assert verdict.state == "warn"
        assert "97% of inodes" in verdict.found

    @pytest.mark.parametrize(("value", "state"), [("", "warn"), ("home", "fail"), ("/proc/1/none", "warn")])
    def test_home_must_be_set_absolute_and_writable(self, value: str, state: State) -> None:
        assert doctor_caches.home(machine(HOME=value)).state == state

    def test_user_id_without_a_name_is_only_a_warning(self) -> None:
        assert doctor_caches.user(Machine(environment={}, uid=STRANGER, user=None)).state == "warn"


class TestSelf:
    def test_job_runner_that_was_not_built_fails(self, tmp_path: Path) -> None:
        assert doctor_self.job_runner(machine(), tmp_path / "job_runner").state == "fail"

    def test_job_runner_that_is_not_executable_fails(self, tmp_path: Path) -> None:
        program = tmp_path / "job_runner"
        program.touch(mode=0o644)

        assert doctor_self.job_runner(machine(), program).state == "fail"
        program.chmod(0o755)
        assert doctor_self.job_runner(machine(), program).state == "ok"

    def test_absent_gpu_is_no_fault(self) -> None:
        def no_driver() -> Target:
            raise TargetError("no driver")

        verdict = doctor_self.gpu(machine(), no_driver)

        assert verdict.state == "missing"
        assert "--target" in verdict.advice

    def test_gpu_is_described(self) -> None:
        assert "132 SMs" in doctor_self.gpu(machine(), lambda: load_target("h200")).found

    def test_misspelt_variable_is_named_with_the_nearest_one(self) -> None:
        verdict = doctor_self.variables(machine(PREFETCHD_MAX_TOKEN="1", PREFETCHD_JOBS="2"))

        assert verdict.state == "warn"
        assert "did you mean PREFETCHD_MAX_TOKENS" in verdict.advice
        assert "PREFETCHD_JOBS" not in verdict.found

    def test_settings_that_differ_from_their_default_are_listed(self) -> None:
        assert doctor_self.settings(machine(PREFETCHD_JOBS="3")).found == "jobs=3"
        assert doctor_self.settings(machine(PREFETCHD_JOBS="many")).state == "fail"

    def test_null_device_that_does_not_answer_fails_with_the_fix(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(environment: dict[str, str]) -> None:
            raise NullDeviceBroken("the marker symbol is absent")

        monkeypatch.setattr(doctor_self, "verify", broken)

        verdict = doctor_self.null_device(machine())

        assert (verdict.state, verdict.found) == ("fail", "the marker symbol is absent")
        assert "reinstall" in verdict.advice


class TestWhole:
    def test_check_that_breaks_is_itself_a_finding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(_: Machine) -> Any:
            raise RuntimeError("strange kernel")

        monkeypatch.setattr(doctor, "CHECKS", {"odd": broken, "user": doctor_caches.user})

        findings = examine({})

        assert [check.name for check in findings.checks] == ["odd", "user"]
        assert findings.checks[0].state == "fail"
        assert "RuntimeError: strange kernel" in findings.checks[0].found
        assert not findings.ok

    def test_absence_and_warnings_leave_it_ok(self) -> None:
        assert Findings([Check("a", "missing", ""), Check("b", "warn", ""), Check("c", "ok", "")]).ok
        assert not Findings([Check("a", "ok", ""), Check("b", "fail", "")]).ok

    def test_table_fits_eighty_columns_and_shows_text_as_it_is(self) -> None:
        text = io.StringIO()
        findings = Findings([Check("a [red]check", "fail", "/a/very/long/path" * 12, "do [bold]this[/bold]")])

        render(findings, Console(file=text, width=80))

        lines = text.getvalue().splitlines()
        assert max(map(len, lines)) <= 80
        assert "a [red]check" in lines[0]
        assert any("-> do [bold]this[/bold]" in line for line in lines)
        assert lines[-1] == "Not right: a [red]check."

    def test_machine_with_nothing_but_the_base_package_has_no_failure(self, tmp_path: Path) -> None:
        bare = Machine(environment={}, mounts=(Mount("/", "ext4"),), uid=STRANGER)
        of_libraries = {
            name: check
            for name, check in doctor.CHECKS.items()
            if check.__module__ != "prefetchd.doctor_self"
        }

        states = {name: check(bare).state for name, check in of_libraries.items()}

        assert len(states) > 10
        assert {name: state for name, state in states.items() if state == "fail"} == {}

    def test_empty_environment_has_a_working_null_device_and_no_home(self) -> None:
        """As under `env -i`."""
        command = [sys.executable, "-c", EXAMINE]

        done = subprocess.run(command, env={}, cwd=ROOT, capture_output=True, text=True, check=True)

        answer = json.loads(done.stdout)
        assert answer["checks"]["null device"][0] == "ok"
        assert answer["checks"]["job runner"][0] == "ok"
        assert answer["checks"]["HOME"][0] == "warn"
        assert answer["torch"] is False

    def test_empty_environment_and_stranger_without_a_home(self, tmp_path: Path) -> None:
        """As `env -i` in a container that runs as a user id nobody named; torch is never imported."""
        command = [sys.executable, "-c", EXAMINE]
        if os.geteuid() == 0:
            identity = ["--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups"]
            command = ["setpriv", *identity, *command]

        done = subprocess.run(
            command, env={"PYTHONPATH": str(ROOT)}, cwd="/", capture_output=True, text=True, check=True
        )

        answer = json.loads(done.stdout)
        broken = {name: found for name, (_, found, _) in answer["checks"].items() if "check broke" in found}
        assert broken == {}
        assert answer["torch"] is False
        assert answer["checks"]["HOME"][0] == "warn"
        assert set(answer["checks"]) == set(doctor.CHECKS)

    def test_stranger_cannot_publish_into_a_foreign_home(self, tmp_path: Path, site: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("becoming another user needs root")
        install(site, "triton", "3.8.0")
        home = tmp_path / "home"
        home.mkdir(mode=0o700)
        for directory in (site, *site.rglob("*"), tmp_path, *tmp_path.parents):
            if directory.is_relative_to(tmp_path.parents[1]):
                directory.chmod(0o755)
        code = EXAMINE.replace("findings =", f"sys.path.append({str(site)!r}); findings =")
        identity = ["--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups"]
        environment = {"HOME": str(home), "PYTHONPATH": str(ROOT)}

        done = subprocess.run(
            ["setpriv", *identity, sys.executable, "-c", code],
            env=environment, cwd="/", capture_output=True, text=True, check=True,
        )  # fmt: skip

        checks = json.loads(done.stdout)["checks"]
        assert checks["user"][0] == "warn"
        assert checks["Triton cache"][0] == "fail"
        assert "NOT writable" in checks["Triton cache"][1]

    def test_whole_examination_takes_less_than_two_seconds(self) -> None:
        start = time.monotonic()

        findings = examine(os.environ)

        assert time.monotonic() - start < 2
        assert [check.name for check in findings.checks] == list(doctor.CHECKS)

    def test_this_machine_sees_its_own_root_mount(self) -> None:
        assert any(mount.point == "/" for mount in this_machine({}).mounts)
