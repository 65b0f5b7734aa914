"""Which call of a library filled its dict: what a dict's kernel is compiled from again, elsewhere.

A dict's key does not say how its kernel was compiled; the frames that are there when it is compiled do. The
call is the outermost one of the dict's own module. Where that module only keeps what others hand it, the call
stands in another module of the dict's package that uses the DSL, again the outermost. The subtle rule: a
record of such a call is a stranger's data later, so here and there the same modules are asked, and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import FrameType

from prefetchd.cute.callers import uses_dsl
from prefetchd.cute.calls import Call, Undescribable
from prefetchd.cute.frames import call_of, layers_of, module_of, takes_any_number
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
    """The call that is running and will fill the site's dict, as data; None if none has a form."""
    running = [each for each in _functions(frame) if may_fill(site, module_of(each))]
    own = [each for each in running if module_of(each) == site.module]
    for found in reversed(own or running):
        try:
            return call_of(found)
        except Undescribable as error:
            name = f"{module_of(found)}.{found.f_code.co_qualname}"
            log.info("prefetchd: a call of %s is not kept: %s", name, error)
    return None


def _functions(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of functions that their names lead to, no closures or methods, from inside out."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        if not takes_any_number(frame) and len(layers_of(frame)) == 1:
            yield frame
        frame = frame.f_back
