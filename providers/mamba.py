"""Mamba2: the scan of a prefill, the decode step, the short convolution and the gated norm.

Triton tells batches apart only by what their integers are divisible by, so a handful of token counts stands
for all (`mamba_classes.py`): the universe is these, for every set of flags that the site's callers pass. The
subtle rule: an engine cuts prefill and decode out of one batch, so a tensor's first row may lie behind others
and its address lose the alignment that a fresh tensor has. Where that can happen, it is a request too.

Not driven: verification of drafted tokens, states stored in mid-sequence for prefix caching, training.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import msgspec

from prefetchd.profiles import Profile
from prefetchd.profiles.flag_sets import flag_alternatives, list_fields
from prefetchd.profiles.sites import KernelSite
from prefetchd.protocol import Batch, MalformedRequest, Request, op_of, request_from_fields
from prefetchd.provider import Limits, Provider, Unavailable
from prefetchd.requests.mamba import CausalConv1d, GatedNorm, Mamba2, Mamba2Decode, Mamba2Prefill, Role

from .mamba_classes import (
    all_scan_classes,
    chunk_spread,
    class_of,
    count_class,
    count_classes,
    natural_chunks,
    possible_chunks,
    scan_classes,
)

if TYPE_CHECKING:
    from .mamba_ops.homes import Home

OPS: dict[str, type[Mamba2]] = {
    op_of(kind): kind for kind in (Mamba2Prefill, Mamba2Decode, CausalConv1d, GatedNorm)
}
# The library itself takes one tensor a call; every other known home is an engine that slices its batch.
LIBRARY = "mamba_ssm"
# What is imported ahead where it is installed; any other home is imported by the trace that names it.
KNOWN_HOMES = (LIBRARY, "vllm", "sglang")
# What Triton asks of a pointer.
ALIGNED_BYTES = 16
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Batches that repeat are planned once; decoding repeats a few hundred sizes.
PLANS_REMEMBERED = 4096
# CUDA graphs run a batch padded to a size that is usually a multiple of this.
PADDED = 16


class MambaProvider(Provider):
    """The Mamba2 family."""

    name: ClassVar[str] = "mamba"
    compilers: ClassVar[tuple[str, ...]] = ("triton",)

    def __init__(self) -> None:
        self._homes: dict[str, Home] = {}
        self._planned: tuple[Profile, Callable[[Batch], tuple[Request, ...]]] | None = None
        self._chunks: tuple[Profile, tuple[int, ...]] | None = None

    def plan(self, batch: Batch, profile: Profile) -> Iterable[Request]:
        """The representatives of this batch's classes; a site it cannot serve asks for nothing."""
        if self._planned is None or self._planned[0] is not profile:
            self._planned = (profile, _planner(profile))
        return self._planned[1](batch)

    def batch_keys(self, batch: Batch, profile: Profile) -> tuple[Hashable, ...]:
        """The three counts, and what the lengths say about the number of chunks."""
        if self._chunks is None or self._chunks[0] is not profile:
            self._chunks = (profile, _chunk_sizes(profile))
        lengths = batch.prefill_lengths
        spread = tuple(chunk_spread(lengths, chunk) for chunk in self._chunks[1])
        return ("tokens", batch.tokens), ("decodes", batch.decodes), ("prefill", sum(lengths), spread)

    def universe(self, profile: Profile, limits: Limits) -> Iterable[Request]:
        """One request of every class that the limits reach, for every set of flags of every site."""
        for template in _templates(profile):
            for request in _members(template, limits.max_tokens):
                yield from _aligned_or_not(request)

    def warm_up(self) -> None:
        """Imports torch, Triton and those of the known homes that are installed."""
        try:
            import torch  # noqa: F401
            import triton  # noqa: F401

            from .mamba_ops import conv, decode, norm, scan  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            raise Unavailable(f"torch and triton do not load: {error}") from error
        for name in KNOWN_HOMES:
            try:
                self._home(name)
            except Unavailable:
                # A request for it will say why; others may be for a home of another name.
                continue

    def run(self, request: Request) -> None:
        """One call of the home's own function."""
        from .mamba_ops import conv, decode, norm, scan

        match request:
            case Mamba2Prefill():
                scan.run(self._home(request.home), request)
            case Mamba2Decode():
                decode.run(self._home(request.home), request)
            case CausalConv1d():
                conv.run(self._home(request.home), request)
            case GatedNorm():
                norm.run(self._home(request.home), request)
            case _:
                raise Unavailable(f"this provider cannot run {op_of(request)!r}")

    def _home(self, name: str) -> Home:
        found = self._homes.get(name)
        if found is None:
            from .mamba_ops.homes import Home

            self._homes[name] = found = Home(name)
        return found


def templates(site: KernelSite) -> list[Mamba2]:
    """The site's requests, one for each set of flags, at a count of one. Raises `ValueError` naming it."""
    kind = OPS[site.op]
    known = set(kind.__struct_fields__)
    found = []
    for flags in flag_alternatives(site, list_fields(kind)):
        unknown = sorted(set(flags) - known)
        if unknown:
            raise ValueError(
                f"site {site.name!r}: {site.op} has no flag {unknown[0]!r}; it has {', '.join(sorted(known))}"
            )
        sizes = {name: size for name, size in site.sizes.items() if name in known}
        fields = {"op": site.op, "home": site.home, str(kind.sweep_field): 1, **sizes, **flags}
        try:
            found.append(request_from_fields(fields))
        except MalformedRequest as error:
            raise ValueError(f"site {site.name!r}: {error}") from None
    return found  # type: ignore[return-value]


def _templates(profile: Profile) -> Iterator[Mamba2]:
    for site in profile.kernels:
        if site.op in OPS:
            found = templates(site)
            yield from found
            # A layer that convolves its prefills updates its decodes.
            if "decode" not in site.flags and not any(getattr(one, "decode", True) for one in found):
                yield from (msgspec.structs.replace(one, decode=True) for one in found)


def _cut(request: Mamba2Prefill) -> bool:
    """Whether the home counts chunks that end with their sequence: every known engine's copy does."""
    return request.home != LIBRARY


def _members(template: Mamba2, max_tokens: int) -> Iterator[Mamba2]:
    if not isinstance(template, Mamba2Prefill):
        for count in count_classes(max_tokens):
            yield _at(template, count)
        return
    classes = scan_classes(template.chunk, max_tokens, template.row, cut=_cut(template))
    for tokens, chunks in classes.values():
        yield _scan_at(template, tokens, chunks)


def _at(template: Mamba2, count: int) -> Mamba2:
    return msgspec.structs.replace(template, **{str(template.sweep_field): count})


def _scan_at(template: Mamba2Prefill, tokens: int, chunks: int) -> Mamba2Prefill:
    named = 0 if chunks == natural_chunks(tokens, template.chunk) else chunks
    return msgspec.structs.replace(template, tokens=tokens, chunks=named)


def _aligned_or_not(request: Mamba2) -> Iterator[Mamba2]:
    """The request, and what becomes of it when its rows lie behind those of other sequences."""
    yield request
    if request.home == LIBRARY or request.unaligned:
        return
    rows, indices = _rows_behind(request), _indices_behind(request)
    # Each by itself and both, where there are any.
    for roles in dict.fromkeys((rows, indices, rows + indices)):
        if roles:
            yield msgspec.structs.replace(request, unaligned=roles)


def _rows_behind(request: Mamba2) -> tuple[Role, ...]:
    """The tensors whose address a row of the projected buffer moves, if that breaks their alignment."""
    if request.row * ELEMENT_BYTES[request.dtype] % ALIGNED_BYTES == 0:
        return ()
    match request:
        case Mamba2Prefill():
            return ("dt",)
        case Mamba2Decode():
            return ("x", "dt", "B", "C")
        case CausalConv1d():
            return ("x",)
        case _:
            # The norm runs over the whole batch.
            return ()


def _indices_behind(request: Mamba2) -> tuple[Role, ...]:
    """The slot numbers are four bytes each, and a batch's decodes and prefills share one tensor of them."""
    named = isinstance(request, (Mamba2Decode, CausalConv1d)) and request.indices
    return ("indices",) if named else ()


def _chunk_sizes(profile: Profile) -> tuple[int, ...]:
    """Those of the scans whose number of chunks depends on more than the tokens."""
    try:
        scans = [one for one in _templates(profile) if isinstance(one, Mamba2Prefill) and _cut(one)]
    except ValueError:
        return ()
    return tuple(sorted({one.chunk for one in scans}))


def _planner(profile: Profile) -> Callable[[Batch], tuple[Request, ...]]:
    try:
        known = list(_templates(profile))
    except ValueError:
        # `universe` says what is wrong with the profile; beside the scheduler nothing may raise.
        known = []

    @lru_cache(maxsize=PLANS_REMEMBERED)
    def planned(batch: Batch) -> tuple[Request, ...]:
        members = (member for template in known for member in _planned(template, batch))
        return tuple(request for member in members for request in _aligned_or_not(member))

    return planned


def _planned(template: Mamba2, batch: Batch) -> Iterator[Mamba2]:
    lengths = tuple(length for length in batch.prefill_lengths if length > 0)
    match template:
        case Mamba2Prefill():
            yield from _planned_scan(template, lengths)
        case CausalConv1d(decode=False):
            yield from (_at(template, count_class(sum(lengths))) for _ in lengths[:1])
        case GatedNorm():
            yield from _planned_count(template, batch.tokens)
        case _:
            yield from _planned_count(template, batch.decodes)


def _planned_scan(template: Mamba2Prefill, lengths: tuple[int, ...]) -> Iterator[Mamba2]:
    if not lengths:
        return
    tokens, cut = sum(lengths), _cut(template)
    known = all_scan_classes(template.chunk, template.row, cut=cut)
    counts = possible_chunks(lengths, template.chunk, cut=cut)
    classes = (class_of(tokens, template.chunk, chunks, template.row) for chunks in counts)
    # In the order of first appearance, each once.
    for found in dict.fromkeys(classes):
        yield _scan_at(template, *known[found])


def _planned_count(template: Mamba2, count: int) -> Iterator[Mamba2]:
    """The count's class, and that of the size to which a graph may pad it."""
    if count > 0:
        for member in dict.fromkeys((count_class(count), PADDED)):
            yield _at(template, member)
