"""Builds the C parts at install: the null device's two libraries and the job runner.

Only a C compiler is needed (gcc or clang, `CC` if set), no CUDA header. The results lie beside their
Python modules, in a wheel as in an editable install.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NULL_DEVICE = Path("prefetchd/null_device")
WARNINGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
SHARED = ["-fPIC", "-shared", "-pthread"]

# A program may open a driver by the name that only linkers need. An object of that name which merely needs
# ours leads to the very same instance; a wheel cannot hold the usual symbolic link.
FORWARD = [*SHARED, "-Wl,--no-as-needed"]

# output, sources, flags before the sources, libraries after them (`{base}` is where the outputs lie)
NATIVE: list[tuple[Path, list[str], list[str], list[str]]] = [
    (
        NULL_DEVICE / "lib/libcuda.so.1",
        ["prefetchd/null_device/csrc/cuda/*.c", "prefetchd/null_device/csrc/common/*.c"],
        [*SHARED, "-Wl,-soname,libcuda.so.1"],
        ["-ldl"],
    ),
    (
        NULL_DEVICE / "lib/libnvidia-ml.so.1",
        ["prefetchd/null_device/csrc/nvml/*.c", "prefetchd/null_device/csrc/common/*.c"],
        [*SHARED, "-Wl,-soname,libnvidia-ml.so.1"],
        ["-ldl"],
    ),
    (NULL_DEVICE / "lib/libcuda.so", [], FORWARD, [f"{{base}}/{NULL_DEVICE}/lib/libcuda.so.1"]),
    (NULL_DEVICE / "lib/libnvidia-ml.so", [], FORWARD, [f"{{base}}/{NULL_DEVICE}/lib/libnvidia-ml.so.1"]),
    (Path("prefetchd/job_runner/job_runner"), ["prefetchd/job_runner/*.c"], [], []),
]


class BuildNative(build_ext):
    """Compiles the three objects with the system compiler; setuptools' own rules are for Python modules."""

    def run(self) -> None:
        compiler = os.environ.get("CC", "cc")
        base = ROOT if self.editable_mode or self.inplace else Path(self.build_lib)
        for output, patterns, flags, libraries in NATIVE:
            sources = sorted(str(path) for pattern in patterns for path in ROOT.glob(pattern))
            target = base / output
            target.parent.mkdir(parents=True, exist_ok=True)
            # A process that has the old file mapped keeps it, and one that starts meanwhile finds a whole
            # one.
            fresh = target.with_name(target.name + ".new")
            command = [compiler, *WARNINGS, *flags, "-o", str(fresh), *sources]
            command += [library.format(base=base) for library in libraries]
            subprocess.run(command, check=True, cwd=ROOT)
            fresh.replace(target)

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / output) for output, *_ in NATIVE]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        files = [path for _, patterns, *_ in NATIVE for pattern in patterns for path in ROOT.glob(pattern)]
        headers = [
            path
            for folder in ("null_device/csrc", "job_runner")
            for pattern in ("*.h", "*.inc")
            for path in (ROOT / "prefetchd" / folder).rglob(pattern)
        ]
        return [str(path.relative_to(ROOT)) for path in [*files, *headers]]


# The named extension makes the wheel a platform wheel and calls build_ext; its file is never built.
setup(ext_modules=[Extension("prefetchd._native", sources=[])], cmdclass={"build_ext": BuildNative})
