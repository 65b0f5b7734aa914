"""The C modules Triton builds for itself in an engine, built ahead beside the kernels that need them.

Before its first launch an engine builds `cuda_utils` (about a second of gcc), and up to Triton 3.7 a launcher
for each signature as well. They lie in the same cache directory under keys of their own: of their source,
and in later versions of the options they are built with. The library does all of it here, key and build.

The subtle rule: among these options are the directories in which the *engine* finds libcuda. What is built
with the null device's is found by nobody, so `cuda_utils` is built only with directories that the engine, or
a person, has named; a launcher's key has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from prefetchd.compilers.triton_cache import key_of, publish_entry, writer
from prefetchd.null_device import guard

LEFT_TO_THE_ENGINE = (
    "Triton's own module cuda_utils is left to the engine, which builds it once, in about a second: its key "
    "holds the directories in which the engine finds libcuda. PREFETCHD_LIBCUDA_DIR names them"
)


class _Present(Exception):
    """Ends a build whose result is there already; never leaves this module."""


def build_helpers(source: Any, metadata: Path, cache: Path, root: Path, libcuda_dirs: Sequence[str]) -> None:
    """Builds into `cache` what the library would build for a compiled kernel and `root` lacks.

    A machine that cannot build them (no C compiler) says so in the job's log; the kernel is none the worse.
    """
    from triton.backends.nvidia import driver

    # The linker needs a libcuda by that name, and finds ours behind the named directories.
    paths = (os.environ.get("LIBRARY_PATH"), str(guard.LIBRARIES))
    os.environ["LIBRARY_PATH"] = ":".join(filter(None, paths))
    builds: list[Callable[[], Any]] = []
    if hasattr(driver, "make_launcher"):
        described = SimpleNamespace(**json.loads(metadata.read_bytes()))
        builds.append(lambda: driver.CudaLauncher(source, described))
    if libcuda_dirs:
        # Not by calling the class, which would answer with the one that serves this process.
        builds.append(lambda: driver.CudaUtils.__init__(object.__new__(driver.CudaUtils)))
    with _builds_into(cache, root), _libcuda_in(libcuda_dirs):
        for build in builds:
            try:
                build()
            except _Present:
                continue
            except Exception as error:
                print(f"left to the engine: {type(error).__name__}: {error}", file=sys.stderr)


def publish_helpers(cache: Path, kernel: str, root: Path) -> None:
    """Publishes the modules built beside a kernel; what someone else has published meanwhile stands."""
    for entry in cache.iterdir():
        if entry.name != kernel and _is_built(entry):
            publish_entry(entry, root / entry.name)


@contextlib.contextmanager
def _builds_into(cache: Path, root: Path) -> Iterator[None]:
    """The library's builds go to `cache`, and those whose result is in `root` or `cache` are not made."""
    from triton.runtime import build

    def open_cache(digest: str) -> Any:
        key = key_of(digest)
        if _is_built(root / key) or (cache / key).exists():
            raise _Present
        return writer(cache / key)

    with mock.patch.object(build, "get_cache_manager", open_cache):
        yield


@contextlib.contextmanager
def _libcuda_in(directories: Sequence[str]) -> Iterator[None]:
    from triton.backends.nvidia import driver

    if not directories:
        yield
        return
    named = [driver.libdevice_dir, *directories]
    with mock.patch.object(driver, "library_dirs", return_value=named):
        yield


def _is_built(entry: Path) -> bool:
    """The library writes the one file of such an entry in one step."""
    return any(entry.glob("*.so"))
