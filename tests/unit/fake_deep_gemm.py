"""A deep_gemm without kernels: its files, its nvcc, and the part of it that reads and fills the JIT cache.

`FakeLibrary.compile` does what both lines of the library do around one compile, in the same order and through
a real shell, so that the stand-in, capture and forbid are tested with nothing of them replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

from fake_cubin import fake_cubin

from prefetchd.compilers.deep_jit import DeepJit
from prefetchd.targets import Target, load_target

H200 = load_target("h200")
META_OPTIONS = {"arch": "90a", "post_hook": None}


class CompileFailed(Exception):
    """What the library raises when nvcc failed."""


def make_package(directory: Path, *, new: bool) -> Path:
    """The files by which an installed package is told, as a directory named deep_gemm."""
    package = directory / "deep_gemm"
    (package / "include/deep_gemm").mkdir(parents=True)
    (package / "include/deep_gemm/common.cuh").write_text("// header")
    (package / "_C.so").write_bytes(b"\0.committed\0" if new else b"")
    (package / "VERSION").write_text("0.2.5\n" if new else "0.1.7\n")
    return package


def make_nvcc(path: Path, *, release: str = "13.0", architecture: int = 90, body: str = "") -> Path:
    """An nvcc that answers --version, and otherwise runs `body`, then writes a cubin to its output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cubin = path.with_suffix(".cubin")
    cubin.write_bytes(fake_cubin(architecture))
    path.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && {{ echo "Cuda tools, release {release}, V{release}.88"; exit 0; }}\n'
        'for a in "$@"; do case $a in *.cubin) output=$a ;; *.cu) source=$a ;; esac; done\n'
        f"{body}\n"
        f'cat "{cubin}" > "$output"\n'
    )
    path.chmod(0o755)
    return path


class Site:
    """One machine of a test: a package, an nvcc, an engine's cache root and environment."""

    def __init__(self, directory: Path, *, new: bool = True, **nvcc: str) -> None:
        self.directory = directory
        self.new = new
        self.package = make_package(directory / "site-packages", new=new)
        self.nvcc = make_nvcc(directory / "cuda/bin/nvcc", **nvcc)  # type: ignore[arg-type]
        self.root = directory / "root"
        self.environment = {
            "PATH": os.environ["PATH"],
            "CUDA_HOME": str(directory / "cuda"),
            "DG_JIT_CACHE_DIR": str(self.root),
        }

    def compiler(self, target: Target = H200, **environment: str) -> DeepJit:
        return DeepJit(target, {**self.environment, **environment}, package_directory=self.package)

    def library(self, **environment: str) -> FakeLibrary:
        """The library as in an engine: with the engine's environment."""
        return FakeLibrary(self, {**self.environment, **environment})

    def traced_library(self) -> FakeLibrary:
        """The library in this process: it reads what capture and forbid have set."""
        return FakeLibrary(self, {**self.environment, **os.environ})


class FakeLibrary:
    """What deep_gemm does for one kernel; `starts` counts the compiles it asked for."""

    def __init__(self, site: Site, environment: Mapping[str, str]) -> None:
        self._site = site
        self._environment = dict(environment)
        self.starts = 0

    def compile(self, name: str, source: str, *, arch: str = "sm_90a", hook: str | None = None) -> Path:
        """The entry that the library would load its kernel from."""
        nvcc = self._environment.get("DG_JIT_NVCC_COMPILER") or f"{self._environment['CUDA_HOME']}/bin/nvcc"
        version = self._run(f"{nvcc} --version")
        include = str(self._site.package / "include")
        flags = [f"--gpu-architecture={arch}", "-O3"]
        hashed = flags if self._site.new else [*flags, f"-I{include}"]
        digest = hashlib.md5("\0".join([version, source, *hashed]).encode()).hexdigest()
        key = f"{name}.{digest}" if self._site.new else f"kernel.{name}.{digest}"
        roots = [Path(root) for root in self._environment["DG_JIT_CACHE_DIR"].split(":")]
        marker = ".committed" if self._site.new else ""
        for root in roots:
            if (root / "cache" / key / marker).exists():
                assert (root / "cache" / key / "kernel.cubin").is_file(), "the engine dies of this entry"
                return root / "cache" / key
        return self._miss(roots[0], key, source, nvcc, flags, include, hook)

    def _miss(
        self, root: Path, key: str, source: str, nvcc: str, flags: list[str], include: str, hook: str | None
    ) -> Path:
        self.starts += 1
        temporary = root / "tmp" / f"{os.getpid()}-{uuid.uuid4()}"
        temporary.mkdir(parents=True)
        cu, cubin = temporary / "kernel.cu", temporary / "kernel.cubin"
        try:
            cu.write_text(source)
            if self._site.new:
                parts = [
                    nvcc,
                    str(cu),
                    "--cubin",
                    "--output-file",
                    str(cubin),
                    *flags,
                    "--include-path",
                    include,
                ]
            else:
                parts = [nvcc, str(cu), "-cubin", "-o", str(cubin), *flags, f"-I{include}"]
            self._run(f"cd {temporary} && {' '.join(parts)}")
            if self._site.new:
                options = {**META_OPTIONS, "post_hook": hook}
                info = {"path": nvcc, "version": "text"}
                meta = {
                    "command": " ".join(parts),
                    "config": {},
                    "compiler_info": info,
                    "compiler_options": options,
                }
                (temporary / "meta.json").write_text(json.dumps(meta))
                (temporary / ".committed").touch()
            (root / "cache").mkdir(exist_ok=True)
            temporary.rename(root / "cache" / key)
        except BaseException:
            shutil.rmtree(temporary)
            raise
        return root / "cache" / key

    def _run(self, command: str) -> str:
        done = subprocess.run(
            f"{command} 2>&1",
            shell=True,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise CompileFailed(done.stdout)
        return done.stdout
