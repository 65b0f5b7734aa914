"""A thin wrapper round each deep_gemm entry point: which call was it, when nvcc has run?

The stand-in for nvcc sees source and command, but neither op nor shapes. So each entry point is wrapped in a
function that calls it and then compares one word with its value before (see `spool.py`); nothing else happens
unless that has changed, no tensor is kept alive, and no clock is read. The subtle rule: the word is the whole
process's. Where another thread is inside a wrapper too, nobody can say whose compile it was, and it is left
without a call rather than given the wrong one.

A call that fails is looked at like one that returns: a compile that failed is the likeliest reason.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import CodeType, FrameType
from typing import Any, NamedTuple

from prefetchd.observing.call_site import call_site

# What compiles kernels, by the library's naming; the rest of its public names are settings and helpers.
_OPS = re.compile(r"\w*(gemm|einsum|mqa_logits|mega_|transform_|tma_aligned_\w*tensor|batched_sy)\w*")
# Of those, what calls cuBLASLt, torch or nothing.
_NOT_OPS = re.compile(r"cublaslt_|set_|get_(block_m|symm_buffer)|transform_(weights|scales)_")


class Call(NamedTuple):
    """One call of an entry point, for as long as it takes to look at it."""

    module: str
    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    site: str
    # Another thread was inside a wrapper as well.
    ambiguous: bool

    def arguments(self) -> dict[str, Any]:
        """By parameter name, defaults left out; a function without a signature gives them by position."""
        try:
            return dict(inspect.signature(self.function).bind(*self.args, **self.named).arguments)
        except (TypeError, ValueError):
            return {**{str(index): value for index, value in enumerate(self.args)}, **self.named}


# Told of a call in which the word changed. With `failing` the call raises already, and this must not.
Changed = Callable[[Call, bool], None]


class Cells:
    """The word that nvcc's stand-in changes, and its value when it was last looked at."""

    __slots__ = ("seen", "word")

    def __init__(self, word: memoryview) -> None:
        self.word, self.seen = word, word[0]

    def renew(self, word: memoryview) -> None:
        """In a forked child, which has a word of its own."""
        self.word, self.seen = word, word[0]


def watched(
    module: str, op: str, function: Callable[..., Any], cells: Cells, changed: Changed
) -> Callable[..., Any]:
    """The function, followed by one comparison."""

    def call(*args: Any, **named: Any) -> Any:
        try:
            result = function(*args, **named)
        except BaseException:
            if cells.word[0] != cells.seen:
                changed(_call(module, op, function, args, named), True)
            raise
        if cells.word[0] != cells.seen:
            changed(_call(module, op, function, args, named), False)
        return result

    return wraps(function)(call)


def entry_points(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The module's public functions that compile kernels."""
    for name, value in list(vars(module).items()):
        if (
            _OPS.fullmatch(name)
            and not _NOT_OPS.search(name)
            and callable(value)
            and not isinstance(value, type)
        ):
            yield name, value


class Wrappers:
    """Those put round the entry points of one module."""

    def __init__(self, module: Any, cells: Cells, changed: Changed) -> None:
        self._module = module
        self._previous: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        for name, function in entry_points(module):
            ours = watched(module.__name__, name, function, cells, changed)
            setattr(module, name, ours)
            self._previous[name] = (function, ours)

    def __len__(self) -> int:
        return len(self._previous)

    def remove(self) -> None:
        """Restores what is still ours; names that others imported keep calling through."""
        for name, (function, ours) in self._previous.items():
            if getattr(self._module, name, None) is ours:
                setattr(self._module, name, function)
        self._previous = {}


# What every wrapper runs, by which a thread's frames tell that it is in one.
_CODE: CodeType = watched("", "", print, Cells(memoryview(b"\0" * 8).cast("Q")), print).__code__


def _call(
    module: str, op: str, function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> Call:
    return Call(module, op, function, args, named, call_site(sys._getframe(1)), anyone_inside())


def anyone_inside() -> bool:
    """Whether another thread than this is in a call of an entry point."""
    own = sys._getframe()
    return any(_is_inside(frame, own) for frame in sys._current_frames().values())


def _is_inside(frame: FrameType | None, own: FrameType) -> bool:
    inside = False
    while frame is not None:
        if frame is own:
            # The thread that asks.
            return False
        inside = inside or frame.f_code is _CODE
        frame = frame.f_back
    return inside
