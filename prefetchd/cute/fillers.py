"""Which call of a library filled its dict: what a dict's kernel is compiled from again, elsewhere.

A dict's key does not say how its kernel was compiled; the frames that are there when it is compiled do. The
call is the outermost one of the dict's own module. Where that module only keeps what others hand it, the call
stands in another module of the dict's package that uses the DSL, again the outermost. The subtle rule: a
record of such a call is a stranger's data later, so here and there the same modules are asked, and no other.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from types import FrameType

from prefetchd.cute.callers import uses_dsl
from prefetchd.cute.calls import Call, Undescribable, describe
from prefetchd.cute.homes import Site
from prefetchd.kernel_packages import lies_in

log = logging.getLogger("prefetchd")

# A library is a few calls deep between its entry point and its dict.
MAX_FRAMES = 64


def near(site: Site, module: str) -> bool:
    """Whether this is the dict's module or one of its package, imported or not."""
    return module == site.module or lies_in(module, site.sources)


def may_fill(site: Site, module: str) -> bool:
    """Whether a function of this imported module may be called for what the dict keeps."""
    return module == site.module or (near(site, module) and uses_dsl(module))


def filling_call(site: Site, frame: FrameType | None) -> Call | None:
    """The call that is running and will fill the site's dict, as data; None if there is none that has a form.

    Its arguments are what its frame's variables hold now; where the function has changed one since, what is
    made from the record has another key and is refused.
    """
    running = [each for each in _functions(frame) if may_fill(site, _module(each))]
    own = [each for each in running if _module(each) == site.module]
    for found in reversed(own or running):
        code = found.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        arguments = {
            name: found.f_locals[name] for name in code.co_varnames[:count] if name in found.f_locals
        }
        try:
            return describe(_module(found), code.co_qualname, arguments)
        except Undescribable as error:
            log.info("prefetchd: a call of %s.%s is not kept: %s", _module(found), code.co_qualname, error)
    return None


def _functions(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of functions that can be called again by name and arguments, from inside out."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        if not frame.f_code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) and _is_function(frame):
            yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "")


def _is_function(frame: FrameType) -> bool:
    """Whether the frame runs a function that the module's name leads to, not a closure or a method."""
    found: object = frame.f_globals
    for part in frame.f_code.co_qualname.split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
    return getattr(found, "__code__", None) is frame.f_code
