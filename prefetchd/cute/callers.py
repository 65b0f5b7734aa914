"""Which function of a library had something compiled: the name of a kernel that is kept where we cannot look.

Engines keep most of their own kernels in an object's attribute or behind `functools.cache`, at hundreds of
places. So nobody lists them: when the DSL is asked, the innermost function of an allowed package that can be
called again names the compile, and its arguments are how it is reached again elsewhere. What is compiled is
told by `subjects`; a function with a cache of the library's own is told by its arguments as well, which are
all that its result may depend on. The subtle rules: the walk ends at the first package that is not allowed,
since a library in between may keep the kernel itself; and since the record of a call is a stranger's data
later, only functions that have something compiled by the DSL are callers, here and there.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec

from prefetchd.cute.calls import Call, Undescribable
from prefetchd.cute.canonical import Node, Unkeyable, encode
from prefetchd.cute.frames import call_of, layers_of, module_of, takes_any_number
from prefetchd.cute.homes import COMPANIONS
from prefetchd.cute.subjects import digest_of
from prefetchd.kernel_packages import lies_in

log = logging.getLogger("prefetchd")

# A library is a few calls deep between its cache and the DSL.
MAX_FRAMES = 32
# Between a library's call and the hooks, by the beginning of a module's name: ours and the DSL's.
BETWEEN = ("prefetchd", "cutlass")
# In the source of a module that uses the DSL, at whatever depth; some are handed it by another module.
_USE = re.compile(r"^\s*(?:import|from)\s+cutlass\b|\bcute\.compile\b", re.MULTILINE)


class Caller(NamedTuple):
    """A function that is running, as data, and whether the library caches what it returns."""

    call: Call
    cached: bool


def caller_of(frame: FrameType | None, packages: tuple[str, ...]) -> Caller | None:
    """The innermost function of these packages that can be called again; None where there is none."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        module = module_of(frame)
        if lies_in(module, packages):
            found = _called(frame, module, packages)
            if found is not None:
                return found
        elif not module.startswith(BETWEEN):
            break
        frame = frame.f_back
    return None


def node_of(caller: Caller, subject: tuple[Any, ...], packages: tuple[str, ...]) -> Node:
    """The key of what this caller has compiled. Raises `Unkeyable`."""
    try:
        digest = digest_of(subject, (*packages, *COMPANIONS))
    except Unkeyable:
        if not caller.cached:
            raise
        digest = ""
    if not caller.cached:
        return encode(digest)
    arguments = hashlib.sha256(msgspec.json.encode(sorted(caller.call.arguments.items()))).hexdigest()
    return encode((digest, arguments))


def compiles_kernels(function: Any, module: str) -> bool:
    """Whether this function of an imported module has something compiled by the DSL, as far as its code says.

    That is a function that names a compile, in a module that imports the DSL or names its `cute.compile`.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and any("compile" in name for name in code.co_names) and uses_dsl(module)


@lru_cache(maxsize=256)
def uses_dsl(module: str) -> bool:
    """Whether an imported module imports the DSL or names its `cute.compile`."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    try:
        return file.endswith(".py") and _USE.search(Path(file).read_text()) is not None
    except (OSError, UnicodeDecodeError):
        return False


def _called(frame: FrameType, module: str, packages: tuple[str, ...]) -> Caller | None:
    if takes_any_number(frame):
        return None
    layers = layers_of(frame)
    if not layers or not compiles_kernels(layers[0], module):
        return None
    try:
        call = call_of(frame, packages)
    except Undescribable as error:
        log.debug("prefetchd: %s.%s cannot be called again: %s", module, frame.f_code.co_qualname, error)
        return None
    return Caller(call, any(hasattr(layer, "cache_parameters") for layer in layers))
