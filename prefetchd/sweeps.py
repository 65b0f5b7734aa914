"""Many requests of one site as one value: a template and the ranges of the field that varies.

A model's universe is tens of sites and a hundred thousand requests which differ in one integer. They are
planned, sent and reported as sweeps; a single request is a sweep of one and has one form, without values.
The subtle rule: grouping keeps exactly the set of requests (duplicates fall together, the order within a
sweep is ascending), so nothing may be inferred from a sweep that was not asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import msgspec

from prefetchd.codec import (
    AnyRequest,
    MalformedRequest,
    decode_request,
    encode_request,
    op_of,
    request_to_fields,
)
from prefetchd.request import Request, UnknownRequest

# One arithmetic progression: first, one past the last, step.
Span = tuple[int, int, int]
# Fewer members than this are not called a progression: any two numbers are one.
SHORTEST_PROGRESSION = 3


class Sweep(msgspec.Struct, frozen=True):
    """`request` with its sweep field taking each of `values` (ascending, disjoint); () is `request` alone."""

    request: AnyRequest
    values: tuple[Span, ...] = ()

    def __len__(self) -> int:
        return self.size

    @property
    def size(self) -> int:
        """Requests in it; unlike `len` also beyond the machine's integers."""
        return sum((stop - start - 1) // step + 1 for start, stop, step in self.values) if self.values else 1

    def expand(self) -> Iterator[Request]:
        """Each request of the sweep, ascending."""
        field = self.request.sweep_field
        if not self.values or field is None:
            yield self.request
            return
        fields = msgspec.structs.asdict(self.request)
        kind = type(self.request)
        for span in self.values:
            for fields[field] in range(*span):
                yield kind(**fields)

    def holds(self, value: int) -> bool:
        """Whether the field takes this value, for spans in their order; others may hide some."""
        place = bisect_right(self.values, value, key=itemgetter(0)) - 1
        return place >= 0 and value in range(*self.values[place])

    def label(self) -> str:
        """For people: `fp8_gemm_nt n=2112 k=7168 m=1..8192`; defaults are left out."""
        swept = self.request.sweep_field if self.values else None
        parts = [op_of(self.request)]
        parts += [f"{name}={value}" for name, value in _telling_fields(self.request) if name != swept]
        if swept is not None:
            parts.append(f"{swept}={','.join(_span_text(span) for span in self.values)}")
        return " ".join(parts)


def sweeps(requests: Iterable[Request]) -> list[Sweep]:
    """Requests that are equal but for their sweep field, put together; in the order of first appearance."""
    groups: dict[tuple[Any, ...], tuple[Request, list[int]]] = {}
    for request in requests:
        kind = type(request)
        swept, rest = _accessors(kind)
        key = (kind, rest(request))
        group = groups.get(key)
        if group is None:
            groups[key] = group = (request, [])
        if swept is not None:
            group[1].append(swept(request))
    return [_sweep(request, values) for request, values in groups.values()]


def spans(values: Iterable[int]) -> tuple[Span, ...]:
    """The distinct values as ascending progressions; expanding them gives exactly these values."""
    ordered = sorted(set(values))
    found: list[Span] = []
    start = 0
    while start < len(ordered):
        step = ordered[start + 1] - ordered[start] if start + 1 < len(ordered) else 1
        end = start + 1
        while end < len(ordered) and ordered[end] - ordered[end - 1] == step:
            end += 1
        if end - start < SHORTEST_PROGRESSION and step > 1:
            end, step = start + 1, 1
        found.append((ordered[start], ordered[end - 1] + 1, step))
        start = end
    return tuple(found)


def apart(items: Iterable[Sweep], most: int, in_all: int) -> Iterator[Sweep]:
    """Sweeps of up to `most` requests as single ones, `in_all` at most; all others as they are.

    What batches need next are a few shapes of a site, never the same few twice: only apart they are found
    again, in what was planned before or in the model's universe.
    """
    for item in items:
        if item.values and item.size <= min(most, in_all):
            in_all -= item.size
            yield from map(Sweep, item.expand())
        else:
            yield item


def site_of(request: Request) -> tuple[Hashable, int | None]:
    """What the request shares with all that differ from it in the sweep field alone, and its own value."""
    kind = type(request)
    swept, rest = _accessors(kind)
    return (kind, rest(request)), (swept(request) if swept else None)


def encode_sweeps(items: Iterable[Sweep]) -> bytes:
    """Sweeps on the wire: per sweep the template request and its spans."""
    wire = [(msgspec.Raw(encode_request(item.request)), item.values) for item in items]
    return msgspec.msgpack.encode(wire)


def decode_sweeps(data: bytes) -> list[Sweep]:
    """The inverse; unknown ops are kept. Raises `MalformedRequest` naming what does not fit."""
    try:
        wire = msgspec.msgpack.decode(data, type=list[tuple[msgspec.Raw, tuple[Span, ...]]])
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"not a list of sweeps: {error}") from None
    return [_checked(Sweep(decode_request(raw), values)) for raw, values in wire]


def _checked(sweep: Sweep) -> Sweep:
    for start, stop, step in sweep.values:
        if step < 1 or not 0 < start < stop:
            raise MalformedRequest(f"sweep {op_of(sweep.request)!r}: ({start}, {stop}, {step}) is no range")
    if sweep.values and sweep.request.sweep_field is None and not isinstance(sweep.request, UnknownRequest):
        raise MalformedRequest(f"sweep {op_of(sweep.request)!r}: this op has no field to sweep")
    field = sweep.request.sweep_field
    if not sweep.values or field is None:
        return sweep
    return _one_form(sweep, field)


def _sweep(request: Request, values: list[int]) -> Sweep:
    field = request.sweep_field
    if field is None:
        return Sweep(request)
    return _one_form(Sweep(request, spans(values)), field)


def _one_form(sweep: Sweep, field: str) -> Sweep:
    """Equal sets give equal sweeps: the template carries the first value, and one request has no values."""
    request = msgspec.structs.replace(sweep.request, **{field: sweep.values[0][0]})
    return Sweep(request, sweep.values if sweep.size > 1 else ())


@cache
def _accessors(kind: type[Request]) -> tuple[Any, Any]:
    if kind is UnknownRequest:
        # Its fields are of any type; the request itself knows how to be a key.
        return None, lambda request: request
    swept = kind.sweep_field
    rest = [name for name in kind.__struct_fields__ if name != swept]
    return (attrgetter(swept) if swept else None), (attrgetter(*rest) if rest else lambda _: ())


def _telling_fields(request: Request) -> Iterator[tuple[str, Any]]:
    if isinstance(request, UnknownRequest):
        yield from ((name, value) for name, value in request_to_fields(request).items() if name != "op")
        return
    for field in msgspec.structs.fields(request):
        value = getattr(request, field.name)
        if value != field.default:
            yield field.name, value


def _span_text(span: Span) -> str:
    numbers = range(*span)
    if len(numbers) == 1:
        return str(span[0])
    return f"{numbers[0]}..{numbers[-1]}" + (f"/{span[2]}" if span[2] > 1 else "")


def expand(items: Iterable[Sweep]) -> Iterator[Request]:
    """Every request of several sweeps."""
    return chain.from_iterable(item.expand() for item in items)
