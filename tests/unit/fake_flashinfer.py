"""FlashInfer's parts that describe and build modules, as few as are looked at; builds by the real ninja."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_cubin import fake_cubin

WORKSPACE = "0.7.4/90a"
NAME = "silu"
NINJA = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
needs_ninja = pytest.mark.skipif(NINJA is None, reason="no ninja is installed")


def manifest(root: Path, flags: str = "-O3") -> str:
    """A build file as the library's: absolute paths, one compile with its headers, one link."""
    directory, source = root / WORKSPACE / "cached_ops" / NAME, root / WORKSPACE / "generated" / f"{NAME}.cu"
    return f"""\
rule cuda_compile
  command = cp $in $out && echo "$out: $in" > $out.d # {flags}
  depfile = $out.d
  deps = gcc

rule link
  command = cp $in $out

build {directory}/{NAME}.cuda.o: cuda_compile {source}
build {directory}/{NAME}.so: link {directory}/{NAME}.cuda.o
default {directory}/{NAME}.so
"""


def write_module(root: Path, *, flags: str = "-O3", content: bytes | None = None) -> Path:
    """The module's directory with its build file, and its generated source."""
    directory, generated = root / WORKSPACE / "cached_ops" / NAME, root / WORKSPACE / "generated"
    for each in (directory, generated):
        each.mkdir(parents=True, exist_ok=True)
    (directory / "build.ninja").write_text(manifest(root, flags))
    (generated / f"{NAME}.cu").write_bytes(fake_cubin() if content is None else content)
    return directory


def run_ninja(directory: Path) -> None:
    """As the library does."""
    command = [str(NINJA), "-C", str(directory), "-f", str(directory / "build.ninja")]
    subprocess.run(command, check=True, capture_output=True)


@dataclasses.dataclass
class JitSpecNvcc:
    """The library's description of a module."""

    name: str
    sources: tuple[str, ...] = ()
    extra_cflags: tuple[str, ...] = ()
    extra_cuda_cflags: tuple[str, ...] = ()
    extra_ldflags: tuple[str, ...] = ()
    extra_include_dirs: tuple[str, ...] = ()
    needs_device_linking: bool = False
    embedded_cubin_factory: Any = None
    is_aot: bool = False

    @property
    def jit_library_path(self) -> Path:
        environment: Any = sys.modules["flashinfer.jit.env"]
        return Path(environment.FLASHINFER_JIT_DIR / self.name / f"{self.name}.so")

    def build(self, outcome: Callable[[Path], None] = lambda _: None) -> None:
        outcome(self.jit_library_path)

    def build_and_load(self) -> str:
        self.build()
        return "loaded"


def install(monkeypatch: pytest.MonkeyPatch, base: Path) -> ModuleType:
    """The library's modules, whose cache directory is `base`; a module of generators that may be filled."""
    environment, core = ModuleType("flashinfer.jit.env"), ModuleType("flashinfer.jit.core")
    places = {"CACHE_DIR": "", "WORKSPACE_DIR": "", "JIT_DIR": "cached_ops", "GEN_SRC_DIR": "generated"}
    for name, below in places.items():
        path = base if name == "CACHE_DIR" else base / WORKSPACE / below
        setattr(environment, f"FLASHINFER_{name}", path)

    def text(**known: Any) -> str:
        return manifest(environment.FLASHINFER_CACHE_DIR, " ".join(known["extra_cuda_cflags"]))

    fresh = dataclasses.make_dataclass("JitSpecNvcc", [], bases=(JitSpecNvcc,))
    core.__dict__.update(JitSpecNvcc=fresh, generate_ninja_build_for_op=text)
    generators = ModuleType("flashinfer.jit.fake")
    generators.__dict__["core"] = core
    for module in (
        ModuleType("flashinfer"),
        ModuleType("flashinfer.jit"),
        environment,
        core,
        generators,
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(GENERATORS, generators.__dict__)
    return generators


GENERATORS = """
import functools

@functools.cache
def gen_silu_module(fast, size=16, name="silu", **unused):
    return core.JitSpecNvcc(name)

def gen_act_module(kind, sizes=(1, 2), fast=True):
    return _made(kind)

def gen_outer_module(kind):
    return gen_act_module(kind, [kind, 3])

def _gen_private_module(kind):
    return core.JitSpecNvcc(kind)

def public_module(kind):
    return _gen_private_module(kind)

def _made(kind):
    return core.JitSpecNvcc(kind, extra_cuda_cflags=("-D" + kind,))

def make(kind):
    return _made(kind)

def gen_customized_module(declaration):
    return core.JitSpecNvcc("custom")
"""
