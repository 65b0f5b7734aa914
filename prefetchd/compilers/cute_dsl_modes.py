"""What a helper does where a CuTe compile is met: record it, refuse it, or really compile one of many.

While a call is traced, every compile gives a stand-in that does nothing when it is launched, and the
library goes on to its next one. The subtle rule: for a dict the stand-in keeps the compile it stands for,
because only when the library puts it into its dict is it known whether that was the wanted one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from prefetchd.cute.artifacts import Found, find
from prefetchd.cute.calls import Call, Undescribable, describe_current
from prefetchd.cute.canonical import Node
from prefetchd.cute.fillers import filling_call, near
from prefetchd.cute.homes import Site
from prefetchd.cute.hooks import Place, unwrapped
from prefetchd.cute.loading import load

Text = Annotated[str, msgspec.Meta(max_length=1 << 15)]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """How one compile is reached again, and the name under which it is to be published."""

    name: Text
    namespace: Text
    node: Node
    number: int = 0
    architecture: Text
    # For a dict's key: the call of the library that missed it; else the one that had it compiled. A known
    # cached function is called by its key.
    call: Call | None = None


class Miss(RuntimeError):
    """The engine would compile here; the text says what it would not find."""


class Reached(BaseException):
    """The wanted kernel is exported; nothing that would follow matters. No library catches this."""


class StandIn:
    """In place of a compiled function. Launched, it does nothing; `run` is the compile it stands for.

    `call` is the library's that will put it into its dict, where that is known.
    """

    def __init__(self, run: Callable[[], Any], call: Call | None = None) -> None:
        self.run, self.call = run, call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """In place of the launch."""


class _Missed(threading.local):
    """Of this thread: the key that a dict was asked for and lacked, until it is given one."""

    place: Place | None = None

    def filling_call(self) -> Call | None:
        """The call by which the running compile fills that dict, if it has a form."""
        return filling_call(self.place.site, sys._getframe(1)) if self.place is not None else None


class Left:
    """Compiles without a name that are the library's own affair; what they were of is kept for people."""

    def __init__(self) -> None:
        self.subjects: set[str] = set()

    def compile(self, subject: Any, run: Callable[[], Any]) -> Any:
        """Does what the library would have done."""
        self.subjects.add(describe_subject(subject))
        return run()


class Recorder:
    """Tracing: each keyed compile becomes a variant, once. Kept in a file too: a crashed trace goes on.

    A compile without a name gives a stand-in, or is `left` to the library, unless it is for a dict and the
    call that fills it has a form.
    """

    def __init__(
        self, path: Path, architecture: str, name_of: Callable[[Place], str], left: Left | None = None
    ) -> None:
        self.variants: dict[str, Variant] = {}
        self._left = left
        self._missed = _Missed()
        self._path, self._architecture, self._name_of = path, architecture, name_of
        # The last line may be half a record: a crash came while it was written.
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
            variant = msgspec.json.decode(line, type=Variant)
            self.variants[variant.name] = variant

    def look_up(self, place: Place) -> Any | None:
        """See `Mode`."""
        self._missed.place = place
        return None

    def assigned(self, place: Place, value: Any) -> None:
        """See `Mode`."""
        self._missed.place = None
        stand_in = unwrapped(value)
        if isinstance(stand_in, StandIn):
            self._add(place, _call_of(place) or stand_in.call)

    def compile(self, place: Place | None, subject: Any, run: Callable[[], Any]) -> Any:
        """See `Mode`."""
        if place is not None:
            self._add(place, place.call)
            return StandIn(run)
        call = self._missed.filling_call()
        if call is None and self._left is not None:
            return self._left.compile(subject, run)
        return StandIn(run, call)

    def unkeyable(self, site: Site, reason: str) -> None:
        """See `Mode`: what follows is a compile without a place, which the proof will call a miss."""

    def installed(self, site: Site) -> None:
        """See `Mode`."""

    def _add(self, place: Place, call: Call | None) -> None:
        name = self._name_of(place)
        if name not in self.variants:
            variant = Variant(
                name=name,
                namespace=place.site.namespace,
                node=place.node,
                number=place.number,
                architecture=self._architecture,
                call=call,
            )
            self.variants[name] = variant
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(variant) + b"\n")


class Refuser:
    """Proving: what the store holds is loaded, everything else is a miss. Misses with a name are variants.

    One without a name may be `left` to the library.
    """

    def __init__(self, root: Path, recorder: Recorder, left: Left | None = None) -> None:
        self._root, self._recorder, self._left = root, recorder, left
        self._missed = _Missed()

    def look_up(self, place: Place) -> Any | None:
        """See `Mode`."""
        found = self._load(place)
        self._missed.place = place if found is None else None
        return found

    def assigned(self, place: Place, value: Any) -> None:
        """See `Mode`."""
        self._missed.place = None

    def compile(self, place: Place | None, subject: Any, run: Callable[[], Any]) -> Any:
        """See `Mode`."""
        if place is None and self._left is not None:
            missed = self._missed.place
            if missed is not None and self._missed.filling_call() is not None:
                raise self._miss(missed)
            return self._left.compile(subject, run)
        if place is None:
            raise Miss(
                f"{describe_subject(subject)} is compiled where no dict or function that we know keeps it"
            )
        found = self._load(place)
        if found is None:
            self._recorder.compile(place, subject, run)
            raise self._miss(place)
        return found

    def unkeyable(self, site: Site, reason: str) -> None:
        """See `Mode`."""

    def installed(self, site: Site) -> None:
        """See `Mode`."""

    def _miss(self, place: Place) -> Miss:
        return Miss(f"{place.site.namespace} is not in {self._root} for {place.key}")

    def _load(self, place: Place) -> Any | None:
        found: Found | None = find(self._root, self._recorder._name_of(place))
        return load(found.path, found.artifact) if found is not None else None


class CompileOne:
    """Compiling: the wanted compile is made and exported, every other one is a stand-in."""

    def __init__(
        self, variant: Variant, name_of: Callable[[Place], str], export: Callable[[Any], None]
    ) -> None:
        self.names: list[str] = []
        self._variant, self._name_of, self._export = variant, name_of, export

    def look_up(self, place: Place) -> Any | None:
        """See `Mode`."""
        return None

    def assigned(self, place: Place, value: Any) -> None:
        """See `Mode`."""
        stand_in = unwrapped(value)
        if isinstance(stand_in, StandIn) and self._wanted(place):
            self._finish(stand_in.run)

    def compile(self, place: Place | None, subject: Any, run: Callable[[], Any]) -> Any:
        """See `Mode`."""
        if place is not None and self._wanted(place):
            self._finish(run)
        return StandIn(run)

    def unkeyable(self, site: Site, reason: str) -> None:
        """See `Mode`."""

    def installed(self, site: Site) -> None:
        """See `Mode`."""

    def _wanted(self, place: Place) -> bool:
        wanted = (self._variant.namespace, self._variant.node, self._variant.number)
        if (place.site.namespace, place.node, place.number) != wanted:
            return False
        name = self._name_of(place)
        self.names.append(name)
        return name == self._variant.name

    def _finish(self, run: Callable[[], Any]) -> None:
        self._export(unwrapped(run()))
        raise Reached


def describe_subject(subject: Any) -> str:
    """What is compiled, for people."""
    name = getattr(subject, "__qualname__", type(subject).__qualname__)
    return f"{getattr(subject, '__module__', type(subject).__module__)}.{name}"


def _call_of(place: Place) -> Call | None:
    try:
        call = describe_current()
    except Undescribable:
        return None
    return call if call is not None and near(place.site, call.module) else None
