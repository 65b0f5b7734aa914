"""The environment of a null process, and the refusal to start anything when it would not hold.

A driver that is not ours is a small C library of the real one's name; the program that must not run writes
a file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from prefetchd.null_device import guard, launcher
from prefetchd.null_device.guard import NullDeviceBroken
from prefetchd.null_device.launcher import environment, to_environment, verify
from prefetchd.targets import Target, TargetError, load_target, preset_names

ROOT = Path(__file__).parents[2]
H200 = load_target("h200")
BASE = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}


def test_the_target_is_written_field_by_field() -> None:
    written = dict(entry.split("=") for entry in to_environment(H200).split(";"))

    assert written.keys() == set(Target.__struct_fields__)
    assert written["name"] == H200.name
    assert int(written["memory_bytes"]) == H200.memory_bytes


@pytest.mark.parametrize("name", ["a;b", "a=b", "new\nline", "é" * 48])
def test_a_name_that_the_form_cannot_carry_is_refused(name: str) -> None:
    values = {field: getattr(H200, field) for field in Target.__struct_fields__}

    with pytest.raises(TargetError, match="name"):
        to_environment(Target(**{**values, "name": name}))


@pytest.mark.parametrize("interpreter", ["/nonexistent/python", "/", ""])
def test_an_interpreter_that_cannot_be_started_is_named(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)

    with pytest.raises(NullDeviceBroken, match="cannot be started"):
        verify(environment(H200, BASE))


def test_ours_comes_first_and_the_users_own_is_kept() -> None:
    base = {
        "LD_PRELOAD": "/a.so /b.so",
        "LD_LIBRARY_PATH": "/x:/y",
        "PYTHONPATH": "/p",
        "CUDA_VISIBLE_DEVICES": "3",
        "A": "1",
    }

    child = environment(H200, base)

    assert child["LD_PRELOAD"].split(":") == [str(guard.CUDA), "/a.so", "/b.so"]
    assert child["LD_LIBRARY_PATH"].split(":") == [str(guard.LIBRARIES), "/x", "/y"]
    assert child["PYTHONPATH"].split(":") == [str(launcher.SITE), "/p"]
    assert (child["CUDA_VISIBLE_DEVICES"], child["PREFETCHD_NULL"], child["A"]) == ("0", "1", "1")
    assert base["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_null_process_started_by_a_null_process_has_the_same_environment() -> None:
    once = environment(H200, BASE)

    assert environment(H200, once) == once


def test_no_empty_entry_adds_the_working_directory_to_a_search_path() -> None:
    child = environment(H200, {**BASE, "LD_LIBRARY_PATH": "", "PYTHONPATH": ":"})

    assert all("" not in child[name].split(":") for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH"))


def test_timings_are_not_kept_even_if_the_user_wants_them_kept() -> None:
    child = environment(H200, {**BASE, "TRITON_CACHE_AUTOTUNING": "1", "FLA_CACHE_RESULTS": "1"})

    assert (child["TRITON_CACHE_AUTOTUNING"], child["FLA_CACHE_RESULTS"]) == ("0", "0")


def test_integer_operators_are_off_unless_asked_for() -> None:
    assert "PREFETCHD_NULL_INTEGER_OPS" not in environment(H200, BASE)
    assert environment(H200, BASE, integer_ops=True)["PREFETCHD_NULL_INTEGER_OPS"] == "1"


def test_a_device_that_is_not_built_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "CUDA", tmp_path / "libcuda.so.1")

    with pytest.raises(NullDeviceBroken, match=r"libcuda\.so\.1 is missing.*pip install"):
        environment(H200, BASE)


def test_a_place_that_the_linker_would_split_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "with blank" / "libcuda.so.1"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(guard, "CUDA", library)

    with pytest.raises(NullDeviceBroken, match="splits LD_PRELOAD"):
        environment(H200, BASE)


def test_a_good_environment_is_verified() -> None:
    verify(environment(H200, BASE))


@pytest.fixture
def real_driver(tmp_path: Path) -> Path:
    """A directory with a driver and an NVML that are not ours, which would report success to anybody."""
    folder = tmp_path / "driver"
    folder.mkdir()
    source = folder / "driver.c"
    source.write_text(
        "int cuInit(unsigned f) { (void)f; return 0; }\nint nvmlInit_v2(void) { return 0; }\n"
        "int cuDeviceGetAttribute(int *v, int a, int d) { (void)a; (void)d; *v = 90; return 0; }\n"
    )
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
        subprocess.run(command, check=True)
    return folder


def test_a_real_driver_first_on_the_users_path_is_not_reached(real_driver: Path) -> None:
    verify(environment(H200, {**BASE, "LD_LIBRARY_PATH": str(real_driver)}))


def broken_environments(real_driver: Path) -> dict[str, tuple[Mapping[str, str], str]]:
    """Ways in which a real driver could be reached, with what the refusal says."""
    good = environment(H200, BASE)
    without_preload = {name: value for name, value in good.items() if name != "LD_PRELOAD"}
    with_driver = {**good, "LD_LIBRARY_PATH": f"{real_driver}:{good['LD_LIBRARY_PATH']}"}
    also_preloaded = environment(H200, {**BASE, "LD_PRELOAD": str(real_driver / "libcuda.so.1")})
    return {
        "no preload": (without_preload, "not preloaded"),
        "a preload that does not load": (
            {**good, "LD_PRELOAD": "/nonexistent/libcuda.so.1"},
            "not preloaded",
        ),
        "a driver instead of the preload": (
            {**with_driver, "LD_PRELOAD": str(real_driver / "libcuda.so.1")},
            "not preloaded",
        ),
        "a driver before our directory": (with_driver, "libnvidia-ml.so.1 leads to a library that is not"),
        "a driver preloaded as well": (also_preloaded, f"loaded: {real_driver}/libcuda.so.1"),
        "another target": ({**good, "PREFETCHD_NULL_TARGET": "name=x;major=9"}, "does not start"),
    }


BROKEN = (
    "no preload",
    "a preload that does not load",
    "a driver instead of the preload",
    "a driver before our directory",
    "a driver preloaded as well",
    "another target",
)


@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_environment_is_refused(way: str, real_driver: Path) -> None:
    broken, reason = broken_environments(real_driver)[way]

    with pytest.raises(NullDeviceBroken) as refusal:
        verify(broken)
    assert reason in str(refusal.value)


RUN = """
import sys
from prefetchd.null_device.launcher import run_on_null_device
from prefetchd.targets import load_target
run_on_null_device(load_target("h200"), sys.argv[1:])
"""


def run(*argv: str, root: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *argv],
        cwd=root,
        env={**BASE, "PYTHONPATH": str(root), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_program_is_never_started_beside_a_real_driver(real_driver: Path, tmp_path: Path) -> None:
    result = run("touch", str(tmp_path / "started"), LD_PRELOAD=str(real_driver / "libcuda.so.1"))

    assert "NullDeviceBroken" in result.stderr
    assert not (tmp_path / "started").exists()


def test_the_program_is_never_started_when_our_library_was_replaced(
    real_driver: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "prefetchd", copy / "prefetchd")
    shutil.copy(real_driver / "libcuda.so.1", copy / "prefetchd/null_device/lib/libcuda.so.1")

    result = run("touch", str(tmp_path / "started"), root=copy)

    assert "not preloaded" in result.stderr
    assert not (tmp_path / "started").exists()


def test_the_exit_status_is_the_programs_own() -> None:
    assert run("sh", "-c", "exit 42").returncode == 42


def test_a_signal_ends_the_program_as_it_would_alone() -> None:
    assert run("sh", "-c", "kill -TERM $$").returncode == -15


def test_the_program_ignores_no_signal_that_it_would_not_ignore_alone() -> None:
    show = ("grep", "SigIgn", "/proc/self/status")
    # As a shell starts its commands.
    alone = subprocess.run(show, capture_output=True, text=True, check=True, restore_signals=True)

    assert run(*show).stdout == alone.stdout


def test_a_missing_command_exits_as_in_a_shell() -> None:
    result = run("no-such-command-anywhere")

    assert (result.returncode, result.stderr) == (
        127,
        "prefetchd null: no-such-command-anywhere: command not found or not executable\n",
    )


@pytest.mark.parametrize("text", ["echo no interpreter is named", "#!/nonexistent/interpreter\n"])
def test_a_program_that_the_kernel_refuses_exits_as_in_a_shell(tmp_path: Path, text: str) -> None:
    program = tmp_path / "program"
    program.write_text(text)
    program.chmod(0o755)

    result = run(str(program))

    assert result.returncode == 126
    assert f"prefetchd null: {program}: cannot be started" in result.stderr
    assert "Traceback" not in result.stderr


def on_null_device(program: str, target: Target = H200) -> str:
    """Output of a Python program on the null device, with the repository's packages and no others."""
    child = environment(target, {**BASE, "PYTHONPATH": str(ROOT)})
    return subprocess.run(
        [sys.executable, "-c", program], env=child, capture_output=True, text=True, check=True, timeout=60
    ).stdout


@pytest.mark.parametrize("name", preset_names())
def test_probing_the_device_gives_the_target_back(name: str) -> None:
    probed = on_null_device(
        "from prefetchd.targets import probe_target; print(probe_target())", load_target(name)
    )

    assert probed == f"{load_target(name)}\n"


@pytest.mark.parametrize("name", ["libcuda.so", "libcuda.so.1"])
def test_every_name_of_the_driver_leads_to_the_one_instance(name: str) -> None:
    program = f"""
import ctypes
from prefetchd.null_device.guard import require_null_device
def marker(library):
    return ctypes.addressof(ctypes.c_int.in_dll(library, "prefetchd_null_device"))
print(marker(ctypes.CDLL({name!r})) == marker(ctypes.CDLL(None)))
require_null_device()
"""

    assert on_null_device(program) == "True\n"


def test_nvml_and_the_driver_describe_the_same_device() -> None:
    program = """
import ctypes
nvml, cuda = ctypes.CDLL("libnvidia-ml.so"), ctypes.CDLL("libcuda.so.1")
device, text, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), (ctypes.c_ulonglong * 3)()
pointer, uuid = ctypes.c_void_p(), (ctypes.c_ubyte * 16)()
major, minor = ctypes.c_int(), ctypes.c_int()
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 30)) == 0
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
assert nvml.nvmlDeviceGetName(device, text, 96) == 0
name = text.value.decode()
assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
assert nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
assert nvml.nvmlDeviceGetUUID(device, text, 96) == 0 and cuda.cuDeviceGetUuid_v2(uuid, 0) == 0
same_uuid = text.value.decode().removeprefix("GPU-").replace("-", "") == bytes(uuid).hex()
print(name, *memory, major.value, minor.value, same_uuid, nvml.nvmlDeviceGetPowerUsage(device, 0), sep="|")
"""

    total = H200.memory_bytes
    expected = (H200.name, total, total - (1 << 30), 1 << 30, H200.major, H200.minor, True, 3)
    assert on_null_device(program) == "|".join(map(str, expected)) + "\n"
