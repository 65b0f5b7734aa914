"""How a compiled function may be called: by names and with defaults, which an object file does not keep.

The DSL puts a function of its own in front of what it compiled, which knows the names of the arguments and
their defaults; what is loaded from an object takes arguments by position and all of them. So the signature
is noted when a kernel is compiled, kept in its record, and the same put in front of what is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import msgspec

from prefetchd.cute.canonical import Node, Unkeyable, decode, encode

# Of tvm_ffi; absent in versions whose functions know no names.
MODULE, MAKER = "tvm_ffi.utils.kwargs_wrapper", "make_kwargs_wrapper"

Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=256)]


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments by name, the defaults of the last of them, and those that are given by name alone."""

    names: Names
    defaults: Annotated[tuple[Node, ...], msgspec.Meta(max_length=256)] = ()
    keyword_names: Names = ()
    keyword_defaults: dict[str, Node] = {}


class Uncallable(ValueError):
    """What is loaded could not be called as the compiled function is; the text says why."""


@contextmanager
def noted() -> Iterator[list[dict[str, Any]]]:
    """Within it the list gets what the DSL tells of each function that it compiles."""
    found: list[dict[str, Any]] = []
    try:
        module: Any = import_module(MODULE)
        before = getattr(module, MAKER)
    except (ImportError, AttributeError):
        yield found
        return

    def make(target: Any, **known: Any) -> Any:
        found.append(known)
        return before(target, **known)

    setattr(module, MAKER, make)
    try:
        yield found
    finally:
        setattr(module, MAKER, before)


def signature_of(compiled: Any, told: list[dict[str, Any]]) -> Signature | None:
    """That of what was compiled last; None where it takes arguments by position. Raises `Uncallable`."""
    if getattr(getattr(compiled, "execution_args", None), "has_pointer_address_arg_specs", False):
        raise Uncallable("the DSL makes pointers of its arguments at each call")
    if not told:
        return None
    known = told[-1]
    if known.get("map_dataclass_to_tuple"):
        raise Uncallable("the DSL takes a dataclass among its arguments apart at each call")
    try:
        return Signature(
            names=tuple(known["arg_names"]),
            defaults=tuple(encode(each) for each in known.get("arg_defaults") or ()),
            keyword_names=tuple(known.get("kwonly_names") or ()),
            keyword_defaults={
                name: encode(each) for name, each in (known.get("kwonly_defaults") or {}).items()
            },
        )
    except Unkeyable as error:
        raise Uncallable(f"a default of its arguments: {error}") from error


def callable_as(function: Callable[..., Any], signature: Signature | None) -> Callable[..., Any]:
    """A loaded function, called as the compiled one is. Raises `ImportError`, `Unkeyable`, `ValueError`."""
    if signature is None:
        return function
    made: Callable[..., Any] = getattr(import_module(MODULE), MAKER)(
        function,
        arg_names=list(signature.names),
        arg_defaults=tuple(decode(each) for each in signature.defaults),
        kwonly_names=list(signature.keyword_names),
        kwonly_defaults={name: decode(each) for name, each in signature.keyword_defaults.items()},
    )
    return made
