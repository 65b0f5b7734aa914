"""What the Triton compiler decides without Triton: where the cache is, what defeats it, how keys differ."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.compilers.triton import Triton
from prefetchd.compilers.triton_keys import KeyParts
from prefetchd.targets import load_target

PARTS = KeyParts(
    version="3.8.0",
    library="ab" * 32,
    source="cd" * 32,
    backend="ptxas: release 12.9\n-90",
    architecture=90,
    options={"num_warps": "4", "enable_fp_fusion": "True"},
    options_digest="ef" * 32,
    environment={"DISABLE_PTXAS_OPT": "false"},
    stages_hook=False,
)


def root(environment: Mapping[str, str]) -> Path:
    return Triton(load_target("h200"), environment).cache_root()


def differences(**changes: object) -> list[str]:
    return list(PARTS.differences(msgspec.structs.replace(PARTS, **changes)))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TRITON_CACHE_DIR": "/var/cache/triton", "HOME": "/home/me"}, "/var/cache/triton"),
        ({"TRITON_HOME": "/srv/triton", "HOME": "/home/me"}, "/srv/triton/.triton/cache"),
        ({"HOME": "/home/me"}, "/home/me/.triton/cache"),
    ],
)
def test_cache_is_where_the_library_puts_it(environment: dict[str, str], expected: str) -> None:
    assert root(environment) == Path(expected)


def test_without_a_home_the_users_own_is_taken_as_the_library_does() -> None:
    assert root({}) == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".triton/cache"


@pytest.mark.parametrize(
    "environment",
    [
        {"TRITON_CACHE_DIR": "cache"},
        {"TRITON_CACHE_DIR": ""},
        {"HOME": "me"},
        {"HOME": ""},
        {"TRITON_HOME": "."},
    ],
)
def test_relative_cache_is_refused_with_the_fix(environment: dict[str, str]) -> None:
    with pytest.raises(CompilerUnavailable, match=r"Set .*, here and in the engine"):
        root(environment)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRITON_ALWAYS_COMPILE", "1"),
        ("TRITON_KERNEL_OVERRIDE", "true"),
        ("TRITON_INTERPRET", "on"),
        ("TRITON_CACHE_MANAGER", "company.cache:Remote"),
    ],
)
def test_variable_that_defeats_the_cache_is_named(name: str, value: str) -> None:
    with pytest.raises(CompilerUnavailable, match=f"Unset {name}"):
        root({"HOME": "/home/me", name: value})


def test_variable_that_is_off_defeats_nothing() -> None:
    assert root({"HOME": "/home/me", "TRITON_ALWAYS_COMPILE": "0", "TRITON_INTERPRET": ""})


def test_constructing_one_imports_no_triton() -> None:
    code = (
        "import sys\n"
        "from prefetchd.compilers import load_compiler\n"
        "from prefetchd.targets import load_target\n"
        "load_compiler('triton', load_target('h200'), {'HOME': '/home/me'})\n"
        "sys.exit('triton' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_equal_parts_have_no_difference() -> None:
    assert differences() == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"version": "3.9.0"}, "triton.version: recorded '3.8.0', here '3.9.0'"),
        ({"environment": {}}, "triton.env.DISABLE_PTXAS_OPT: recorded 'false', here unset"),
        (
            {"options": {"num_warps": "8", "enable_fp_fusion": "True"}, "options_digest": "00"},
            "triton.option.num_warps: recorded '4', here '8'",
        ),
        ({"options_digest": "00"}, "triton.options: equal by name, but the content of a file they name"),
        ({"source": "00"}, "triton.source: the kernel's source"),
        ({"stages_hook": True}, "triton.stages_hook: recorded 'False', here 'True'"),
        (
            {"backend": "ptxas: release 13.4\n-90"},
            "triton.backend: recorded 'ptxas: release 12.9\\n-90', here",
        ),
    ],
)
def test_each_part_that_differs_is_named_with_both_values(changes: dict[str, object], line: str) -> None:
    (found,) = differences(**changes)

    assert found.startswith(line)
