"""CuTe DSL kernels on the null device: compiled as ever, launched never."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prefetchd.null_device.cute_launches import on_compiler, on_runtime


class Compiled:
    def __call__(self, *_: Any) -> None:
        raise RuntimeError("cudaErrorNotSupported")

    def export_to_c(self, name: str) -> str:
        return f"object of {name}"


class CompileCallable:
    def __call__(self, function: str) -> Any:
        if function == "wrong":
            raise ValueError(function)
        return Compiled() if function else None


@pytest.fixture
def compile_callable() -> Any:
    module = SimpleNamespace(CompileCallable=type("CompileCallable", (), dict(vars(CompileCallable))))
    on_compiler(module)  # type: ignore[arg-type]
    return module.CompileCallable()


def test_compiled_kernel_is_not_launched(compile_callable: Any) -> None:
    assert compile_callable("kernel")(1, 2, stream=3) is None


def test_compiled_kernel_is_exported_as_ever(compile_callable: Any) -> None:
    assert compile_callable("kernel").export_to_c("f") == "object of f"


def test_compile_that_fails_fails(compile_callable: Any) -> None:
    with pytest.raises(ValueError, match="wrong"):
        compile_callable("wrong")


def test_what_is_no_kernel_is_left_alone(compile_callable: Any) -> None:
    assert compile_callable("") is None


def test_loaded_kernels_are_not_launched_either() -> None:
    runtime = SimpleNamespace(load_module=lambda path: SimpleNamespace(f=Compiled(), path=path))
    on_runtime(runtime)  # type: ignore[arg-type]

    loaded = runtime.load_module("/a.o")

    assert loaded.f(1) is None
    assert loaded.path == "/a.o"


def test_runtime_without_a_loader_is_left_alone() -> None:
    runtime = SimpleNamespace()

    on_runtime(runtime)  # type: ignore[arg-type]

    assert vars(runtime) == {}
