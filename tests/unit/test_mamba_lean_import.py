from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LEAN = "import sys; from prefetchd.lean_import import lean_import; "


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A library whose top package fails at import, around kernels that need nothing of it."""
    kernels = tmp_path / "library" / "ops" / "kernels"
    kernels.mkdir(parents=True)
    (tmp_path / "library" / "__init__.py").write_text("raise ImportError('no extension')\n")
    (tmp_path / "library" / "ops" / "__init__.py").write_text("")
    (kernels / "__init__.py").write_text("")
    (kernels / "scan.py").write_text("from library.ops.shared import VALUE\n")
    (tmp_path / "library" / "ops" / "shared.py").write_text("VALUE = 7\n")
    return tmp_path


def python(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LEAN + code],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


def output(site: Path, code: str) -> str:
    done = python(site, code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_import_though_their_library_does_not(site: Path) -> None:
    code = "print(lean_import('library.ops.kernels', 'scan')['scan'].VALUE)"
    assert output(site, code) == "7"


def test_a_module_the_package_lacks_is_left_out(site: Path) -> None:
    assert output(site, "print(sorted(lean_import('library.ops.kernels', 'scan', 'conv')))") == "['scan']"


def test_the_library_still_imports_in_earnest_in_another_process(site: Path) -> None:
    (site / "library" / "__init__.py").write_text("READY = True\n")
    output(site, "lean_import('library.ops.kernels', 'scan')")
    assert output(site, "import library.ops.kernels.scan; print(library.READY)") == "True"


def test_a_library_that_is_already_imported_stays_as_it_is(site: Path) -> None:
    (site / "library" / "__init__.py").write_text("READY = True\n")
    code = "import library; lean_import('library.ops.kernels', 'scan'); print(sys.modules['library'].READY)"
    assert output(site, code) == "True"


def test_parents_that_turn_out_to_be_needed_are_imported_in_earnest(site: Path) -> None:
    (site / "library" / "__init__.py").write_text("VERSION = 3\n")
    (site / "library" / "ops" / "kernels" / "scan.py").write_text("from library import VERSION as VALUE\n")
    code = "print(lean_import('library.ops.kernels', 'scan')['scan'].VALUE, sys.modules['library'].VERSION)"
    assert output(site, code) == "3 3"


def test_a_missing_package_is_named_and_leaves_nothing_behind(site: Path) -> None:
    code = """
try:
    lean_import('library.nothing.kernels', 'scan')
except ModuleNotFoundError as error:
    print(error.name, 'library' in sys.modules)
"""
    done = python(site, f"exec({code!r})")
    assert (done.returncode, done.stdout.strip()) == (0, "library.nothing False"), done.stderr


def test_what_is_wrong_inside_the_kernels_is_the_error_that_shows(site: Path) -> None:
    (site / "library" / "ops" / "kernels" / "scan.py").write_text("import no_such_dependency\n")
    done = python(site, "lean_import('library.ops.kernels', 'scan')")
    assert "No module named 'no_such_dependency'" in done.stderr.splitlines()[-1]
