"""What every Python on the null device gets at its start, tried with small stand-ins for torch and Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefetchd.null_device.launcher import environment
from prefetchd.targets import load_target


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A `triton.runtime.autotuner` whose Autotuner keeps results, and an empty `torch`."""
    runtime = tmp_path / "triton/runtime"
    runtime.mkdir(parents=True)
    (tmp_path / "triton/__init__.py").touch()
    (runtime / "__init__.py").touch()
    (runtime / "autotuner.py").write_text(
        "class Autotuner:\n"
        "    def check_disk_cache(self, key, configs, bench_fn):\n"
        "        bench_fn()\n"
        "        open('kernel.autotune.json', 'w').close()\n"
        "        return True\n"
    )
    (tmp_path / "torch.py").write_text("value = 7\n")
    return tmp_path


def python(program: str, packages: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(packages)}
    child = {**environment(load_target("h200"), base), **variables}
    command = [sys.executable, *options, "-c", program]
    return subprocess.run(
        command, env=child, cwd=packages, capture_output=True, text=True, check=False, timeout=60
    )


AUTOTUNE = """
from triton.runtime.autotuner import Autotuner
ran = []
print(Autotuner().check_disk_cache("key", [], lambda: ran.append(1)), ran)
"""


def test_an_autotuner_measures_and_keeps_nothing(packages: Path) -> None:
    result = python(AUTOTUNE, packages)

    assert result.stdout == "False [1]\n", result.stderr
    assert not (packages / "kernel.autotune.json").exists()


def test_without_the_variable_nothing_is_changed(packages: Path) -> None:
    result = python(AUTOTUNE, packages, PREFETCHD_NULL="")

    assert result.stdout == "True [1]\n", result.stderr
    assert (packages / "kernel.autotune.json").exists()


def test_a_hooked_module_looks_as_if_it_were_not(packages: Path) -> None:
    result = python(
        "import inspect, torch\nprint(torch.value, type(torch.__loader__).__name__,"
        " torch.__spec__.loader is torch.__loader__, inspect.getsource(torch).strip())",
        packages,
    )

    assert result.stdout == "7 SourceFileLoader True value = 7\n", result.stderr


def test_a_module_that_is_not_there_stays_not_there(packages: Path) -> None:
    (packages / "torch.py").unlink()

    # Without the installed packages (-S), among which there may be a torch.
    result = python("import sitecustomize, torch", packages, "-S")

    assert "ModuleNotFoundError: No module named 'torch'" in result.stderr


def test_importing_torch_without_the_null_device_fails(packages: Path) -> None:
    result = python("import torch; print('on')", packages, LD_PRELOAD="")

    assert result.stdout == ""
    assert "NullDeviceBroken: the null device is not preloaded" in result.stderr


def test_the_hidden_sitecustomize_runs_too(packages: Path) -> None:
    (packages / "sitecustomize.py").write_text("print('the hidden one', __name__)\n")

    result = python("import sitecustomize; print(sitecustomize.__file__)", packages)

    assert result.stdout == f"the hidden one sitecustomize\n{packages}/sitecustomize.py\n", result.stderr


def test_torch_is_not_imported_before_the_program_does(packages: Path) -> None:
    result = python(
        "import sys; print([name for name in sys.modules if name in ('torch', 'triton', 'ctypes')])", packages
    )

    assert result.stdout == "[]\n", result.stderr
