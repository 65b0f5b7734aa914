"""How long a DeepGEMM kernel will compile, guessed from its generated source."""

from __future__ import annotations


def predicted_seconds(source: str) -> float:
    """Expected CPU seconds of nvcc on a generated source."""
    return 1.0 if "gemm" not in source else 5.0
