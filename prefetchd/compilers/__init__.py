"""How kernels are compiled and cached, one module a compile system. Cache layouts are known here only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from prefetchd.compilers.base import Compiler
from prefetchd.targets import Target

# Imported by name, so that a machine without Triton can still use DeepGEMM.
_CLASSES = {
    "deep_jit": ("prefetchd.compilers.deep_jit", "DeepJit"),
    "triton": ("prefetchd.compilers.triton", "Triton"),
    "cute_dsl": ("prefetchd.compilers.cute_dsl", "CuteDsl"),
    "flashinfer_cute": ("prefetchd.compilers.cute_dsl_flashinfer", "FlashInferCute"),
    "flashinfer_modules": ("prefetchd.compilers.flashinfer_modules", "FlashInferModules"),
    "quack_cute": ("prefetchd.compilers.cute_dsl_quack", "QuackCute"),
}


# Every compiler there is.
COMPILERS = tuple(_CLASSES)


def compiler_class(name: str) -> type[Compiler]:
    """What is known of a compiler before it is made for a target. Raises `KeyError` for an unknown name."""
    module, attribute = _CLASSES[name]
    found: type[Compiler] = getattr(import_module(module), attribute)
    return found


def load_compiler(name: str, target: Target, environment: Mapping[str, str]) -> Compiler:
    """The compiler of that name for a target and the engine's environment.

    Raises `KeyError` for an unknown name and `CompilerUnavailable` when this machine lacks what it needs.
    """
    # A concrete compiler takes these two; the base class has no constructor of its own.
    made: Callable[[Target, Mapping[str, str]], Compiler] = compiler_class(name)
    return made(target, environment)
