"""The null device's C side under sanitizers, driven by test_null_shim.c, and its symbol tables.

The library is compiled afresh with each sanitizer: nothing here needs an installed build.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from prefetchd.null_device.launcher import to_environment
from prefetchd.targets import Target

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "prefetchd/null_device/csrc"
DRIVER = Path(__file__).with_suffix(".c")
WARNINGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]
TARGET = Target(
    name="Test device",
    major=9,
    minor=0,
    sm_count=77,
    memory_bytes=1 << 30,
    l2_bytes=1234567,
    shared_bytes_per_block_optin=232448,
    shared_bytes_per_sm=233472,
    clock_khz=1,
    memory_clock_khz=1,
    memory_bus_bits=1,
)


def build_library(folder: Path, *flags: str) -> Path:
    library = folder / "libcuda.so.1"
    sources = [str(path) for part in ("cuda", "common") for path in (CSRC / part).glob("*.c")]
    command = ["cc", *WARNINGS, *flags, "-pthread", "-fPIC", "-shared", "-o", str(library), *sources, "-ldl"]
    subprocess.run(command, check=True)
    return library


def build(folder: Path, sanitizer: str) -> tuple[Path, Path]:
    """The library and the program that drives it, both with the sanitizer."""
    flags = ["-g", "-O1", f"-fsanitize={sanitizer}"]
    program = folder / "driver"
    command = ["cc", *WARNINGS, *flags, "-pthread", "-o", str(program), str(DRIVER), "-ldl"]
    subprocess.run(command, check=True)
    return build_library(folder, *flags), program


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("address"), "address,undefined")


def drive(built: tuple[Path, Path], mode: str, target: str | None) -> subprocess.CompletedProcess[str]:
    library, program = built
    # The leak check needs ptrace, which containers refuse; released memory is checked by its sum instead.
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}
    if target is not None:
        environment["PREFETCHD_NULL_TARGET"] = target
    return subprocess.run(
        [str(program), str(library), mode],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_done(result: subprocess.CompletedProcess[str]) -> None:
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_every_answer_is_right_under_address_sanitizer(checked: tuple[Path, Path]) -> None:
    assert_done(drive(checked, "all", to_environment(TARGET)))


def test_threads_are_safe_under_address_sanitizer(checked: tuple[Path, Path]) -> None:
    assert_done(drive(checked, "threads", to_environment(TARGET)))


def test_threads_are_safe_under_thread_sanitizer(tmp_path: Path) -> None:
    built = build(tmp_path, "thread")

    assert_done(drive(built, "threads", to_environment(TARGET)))


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        (None, "is not set"),
        ("", "is not set"),
        ("name=x;major=9", "lacks the field minor"),
        (
            to_environment(TARGET).replace("sm_count=77", "sm_count=many"),
            "no whole number in the field sm_count",
        ),
        (
            to_environment(TARGET).replace("sm_count=77", "sm_count=-1"),
            "no whole number in the field sm_count",
        ),
        (to_environment(TARGET).replace("name=Test device;", ""), "lacks a usable field name"),
    ],
)
def test_a_missing_or_malformed_target_is_no_device_and_says_so(
    checked: tuple[Path, Path], target: str | None, complaint: str
) -> None:
    result = drive(checked, "no-target", target)

    assert_done(result)
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


def names_of(table: str) -> set[str]:
    return set(re.findall(r"NAME\((\w+)\)", (CSRC / table).read_text()))


@pytest.fixture(scope="module")
def symbols(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every exported function of a plain build with nm's letter: T is implemented, W is a stub."""
    library = build_library(tmp_path_factory.mktemp("plain"), "-O0")
    table = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    return {name: letter for letter, name in re.findall(r" ([TWD]) (\w+)$", table.stdout, re.M)}


def test_every_name_of_the_tables_is_exported(symbols: dict[str, str]) -> None:
    wanted = (
        names_of("cuda/driver_names.inc")
        | names_of("cuda/runtime_names.inc")
        | names_of("cuda/cublas_names.inc")
    )

    assert len(wanted) > 1800
    assert wanted - symbols.keys() == set()


def test_nothing_but_cuda_names_and_our_own_is_exported(symbols: dict[str, str]) -> None:
    assert {name for name in symbols if not re.match(r"(__)?cu|prefetchd_null_", name)} == set()


def test_an_implemented_function_is_implemented_in_its_per_thread_spelling_too(
    symbols: dict[str, str],
) -> None:
    stubs = {name for name, letter in symbols.items() if letter == "W"}
    forgotten = {name for name in stubs if symbols.get(re.sub(r"_pt[sd][sz]$", "", name)) == "T"}

    assert forgotten == set()


def test_the_newest_version_of_an_implemented_driver_function_is_implemented(symbols: dict[str, str]) -> None:
    """`cuGetProcAddress` answers with the newest version: a stub there would hide the implementation."""

    def versions(name: str) -> list[str]:
        return [name + suffix for suffix in ("_v4", "_v3", "_v2") if name + suffix in symbols]

    implemented = [name for name, letter in symbols.items() if letter == "T" and re.match(r"cu[A-Z]", name)]
    hidden = {name for name in implemented for newest in versions(name)[:1] if symbols[newest] == "W"}

    assert hidden == set()
