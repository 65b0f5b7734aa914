"""Which homes of KDA and of the gated delta rule are CuTe DSL kernels; pure Python, for planning too.

The subtle rules: an op has one name in each home, so the home decides which provider serves a site; a home
named `cute:` and a module's dotted path is any module whose functions have the ops' names. And it is unknown
where the token count enters a key or a library's choice of kernel, so prefills are asked for at every power
of two and steps at the very number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

FLASHINFER = "flashinfer"
TENSORRT_LLM = "tensorrt_llm"
PREFIX = "cute:"


# Below, a prefill is a step to every library that is known.
LEAST_PREFILL = 2


def is_cute(home: str) -> bool:
    """Whether a site of this home is served by the providers of CuTe kernels."""
    return home in (FLASHINFER, TENSORRT_LLM) or home.startswith(PREFIX)


def prefill_class(tokens: int) -> int:
    """The count that stands for this one: the next power of two."""
    return max(LEAST_PREFILL, 1 << (tokens - 1).bit_length())


def powers(first: int, most: int) -> Iterator[int]:
    """Powers of two from `first` to the first that is not below `most`."""
    count = first
    while count < most:
        yield count
        count *= 2
    yield count
