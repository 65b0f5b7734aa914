"""A CUDA directory of a test's own: the real compiler behind a wrapper that counts, the rest of a toolkit.

FlashInfer takes compiler, headers and libraries from one directory. A bare compiler has neither the headers
of the maths libraries, which torch's packages bring, nor a driver's library to link with.
"""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import distribution
from pathlib import Path

from prefetchd.compilers.nvcc import locate_nvcc
from prefetchd.null_device import guard


class CudaToolkit:
    """Made in a directory that does not exist; `CUDA_HOME` is to be set to it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._count = place / "compiles"
        real = _real_directory()
        for name in ("bin", "include", "lib64/stubs"):
            (place / name).mkdir(parents=True)
        packages = Path(str(distribution("torch").locate_file("")))
        for headers in (real / "include", *packages.glob("nvidia/cu*/include")):
            for header in headers.iterdir():
                # The compiler's own first: those of two releases do not go together.
                if not (place / "include" / header.name).exists():
                    (place / "include" / header.name).symlink_to(header)
        libraries = next(real / name for name in ("lib64", "lib") if (real / name).is_dir())
        for library in libraries.glob("libcudart*"):
            (place / "lib64" / library.name).symlink_to(library)
        (place / "lib64/stubs/libcuda.so").symlink_to(guard.CUDA)
        nvcc = place / "bin/nvcc"
        nvcc.write_text(
            f'#!/bin/sh\ncase "$*" in *" -c "*) echo >>"{self._count}";; esac\nexec "{real}/bin/nvcc" "$@"\n'
        )
        nvcc.chmod(0o755)

    @property
    def compiles(self) -> int:
        """How often it was started to compile."""
        return len(self._count.read_text().splitlines()) if self._count.exists() else 0


def _real_directory() -> Path:
    """The directory of the compiler itself, behind links and wrappers."""
    found, _ = locate_nvcc(os.environ, ())
    said = subprocess.run([found, "--dryrun", "x.cu"], capture_output=True, text=True, check=False).stderr
    (top,) = (line.partition("=")[2] for line in said.splitlines() if line.startswith("#$ TOP="))
    return Path(top).resolve()
