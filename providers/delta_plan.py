"""From the kernel sites of a profile to requests of KDA and the gated delta rule; pure Python.

The subtle rule: hardly anything about a batch decides a variant. What does - the bucket of the token count,
whether it is 1 or a multiple of 16 - is decided by each kernel's own rule here, so that a universe is a dozen
requests and a batch maps onto the same ones. Only the rules of fla's kernels were measured; other homes get
the finest rule, which asks for a few requests too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from prefetchd.profiles import Profile
from prefetchd.profiles.flag_sets import flag_alternatives, list_fields
from prefetchd.profiles.sites import KernelSite
from prefetchd.profiles.token_classes import Rule, representative, representatives
from prefetchd.protocol import Batch, MalformedRequest, op_of, request_from_fields
from prefetchd.requests.delta import (
    DEFAULT_CHUNK,
    ChunkRecurrence,
    Delta,
    Gate,
    GatedNorm,
    PackedDecode,
    Recurrence,
    ShortConvolution,
    StepRecurrence,
)
from prefetchd.requests.kda import FusedKdaDecode, KdaStateCommit

from .cute_homes import LEAST_PREFILL, is_cute, powers, prefill_class

# The home whose kernels' dependence on the token count is known.
MEASURED_HOME = "fla"
# Flag of a convolution's site: whether its caller convolves q, k and v one by one or together.
SPLIT = "split"
CONV_SIZES = ("key_channels", "value_channels", "conv")
# Batch sizes of a dense convolution, one of each kind that Triton tells apart.
DENSE_BATCHES = (1, 2, 16)


class Template(NamedTuple):
    """A request at any token count, and how its count comes from a batch's."""

    request: Delta
    rows_per_token: int
    rule: Rule

    def at(self, tokens: int) -> Delta:
        """The request of the class that so many tokens (or sequences, for a step) fall into."""
        if is_cute(self.request.home):
            return self._with(prefill_class(tokens) if isinstance(self.request, ChunkRecurrence) else tokens)
        return self._with(representative(tokens, self.rows_per_token, self.rule))

    def all(self, max_tokens: int) -> Iterator[Delta]:
        """One request of every class up to the largest batch."""
        unit = _per_sequence(self.request)
        if is_cute(self.request.home):
            first = LEAST_PREFILL if isinstance(self.request, ChunkRecurrence) else 1
            for tokens in dict.fromkeys(powers(first, max(max_tokens // unit, 1))):
                yield self._with(tokens)
            return
        for tokens in representatives(max(max_tokens // unit, 1), self.rows_per_token, self.rule):
            yield self._with(tokens)

    def _with(self, tokens: int) -> Delta:
        request = self.request
        if isinstance(request, ChunkRecurrence):
            # No sequence is empty, and an aligned one is a whole chunk at least.
            aligned = request.lengths == "aligned"
            unit = (request.chunk_size or DEFAULT_CHUNK) if aligned else 1
            tokens = max(-(-tokens // unit), request.sequences) * unit
        sequences = getattr(request, "sequences", 1)
        return _replace(request, tokens=max(tokens, 1) * _per_sequence(request) * _dense(request, sequences))


def templates(
    profile: Profile, kinds: dict[str, type[Delta]], serves: Callable[[str], bool] = lambda _home: True
) -> list[Template]:
    """What the sites of these ops and homes ask for, each once. Raises `ValueError` naming the site."""
    found: dict[Delta, Template] = {}
    for site in profile.kernels:
        if site.op in kinds and serves(site.home):
            for request in _requests(site, kinds[site.op]):
                found.setdefault(request, Template(request, *_rule(request)))
    return list(found.values())


def requests_of_batch(items: Iterable[Template], batch: Batch) -> Iterator[Delta]:
    """The requests this step may cause; a kernel that only prefill launches is left out without any."""
    prefill = sum(batch.prefill_lengths)
    for item in items:
        request = item.request
        if isinstance(request, StepRecurrence):
            yield from _steps(item, batch)
        elif isinstance(request, (PackedDecode, FusedKdaDecode)) or (
            isinstance(request, ShortConvolution) and request.decode
        ):
            if batch.decodes:
                yield item.at(batch.decodes)
        elif isinstance(request, (ChunkRecurrence, ShortConvolution)):
            # Some engines run the decodes of a mixed batch through the prefill kernels, some do not.
            for tokens in sorted({prefill, batch.tokens}) if prefill else ():
                yield item.at(tokens)
        elif batch.tokens > 0:
            yield item.at(batch.tokens)


def _is_step(request: Delta) -> bool:
    """Whether it is one token for each sequence that decodes."""
    if isinstance(request, ShortConvolution):
        return request.decode
    return isinstance(request, (PackedDecode, FusedKdaDecode))


def _steps(item: Template, batch: Batch) -> Iterator[Delta]:
    """Decode; with drafts also their verification, whether they are counted for each sequence or in all."""
    if not batch.decodes:
        return
    request = item.request
    if _per_sequence(request) == 1:
        yield item.at(batch.decodes)
    elif batch.speculative_tokens:
        drafts = {batch.speculative_tokens, -(-batch.speculative_tokens // batch.decodes)}
        for count in sorted(drafts):
            verified = _replace(request, per_sequence=count + 1)
            yield item._replace(request=verified).at(batch.decodes)


def _requests(site: KernelSite, kind: type[Delta]) -> Iterator[Delta]:
    """The site's request for each combination of flags, at one token."""
    for flags in flag_alternatives(site, list_fields(kind)):
        if issubclass(kind, ShortConvolution):
            yield from _convolutions(site, kind, flags)
        else:
            yield _build(site, kind, dict(site.sizes) | flags)


def _convolutions(site: KernelSite, kind: type[Delta], flags: dict[str, Any]) -> Iterator[Delta]:
    """q, k and v one by one (k is as wide as q), or all three in one call."""
    for size in site.sizes:
        if size not in CONV_SIZES:
            raise ValueError(f"site {site.name!r}: unknown size {size!r}; it has {', '.join(CONV_SIZES)}")
    try:
        keys, values, conv = (site.sizes[size] for size in CONV_SIZES)
    except KeyError as missing:
        raise ValueError(f"site {site.name!r}: the size {missing} is missing; add it to sizes") from None
    widths = {keys, values} if flags.get(SPLIT) else {2 * keys + values}
    fields = {name: value for name, value in flags.items() if name != SPLIT}
    if fields.get("decode"):
        # A step always has its cache and one token a sequence, whatever prefill does.
        fields |= {"initial_state": True, "final_state": False, "varlen": True}
    batches = DENSE_BATCHES if not fields.get("varlen", True) else (1,)
    for channels in sorted(widths):
        for sequences in batches:
            yield _build(site, kind, {**fields, "channels": channels, "conv": conv, "sequences": sequences})


def _build(site: KernelSite, kind: type[Delta], fields: dict[str, Any]) -> Delta:
    known = set(kind.__struct_fields__) - {"tokens", "home"}
    for name in fields:
        if name not in known:
            what = "size" if name in site.sizes else "flag"
            raise ValueError(
                f"site {site.name!r}: {site.op} has no {what} {name!r}; it has {', '.join(sorted(known))}"
            )
    try:
        request = request_from_fields({"op": site.op, "home": site.home, "tokens": 1, **fields})
    except MalformedRequest as error:
        raise ValueError(f"site {site.name!r}: {error}") from None
    assert isinstance(request, Delta)
    return request


def _rule(request: Delta) -> tuple[int, Rule]:
    """Rows of a norm for each token, and how the token count matters to this request's kernels."""
    measured = request.home == MEASURED_HOME
    match request:
        case ChunkRecurrence():
            if not measured:
                return request.heads, "blocks"
            # fla's sigmoid kernel is specialised on the number of elements.
            return request.heads, "divisible" if request.beta_sigmoid else "buckets"
        case GatedNorm():
            return request.heads, "buckets" if measured else "divisible"
        case ShortConvolution() if not request.decode:
            return 1, "divisible"
        case Recurrence() | PackedDecode() | Gate() | ShortConvolution() | KdaStateCommit():
            return 1, "any" if measured else "divisible"
        case FusedKdaDecode():
            # Its only homes have rules of their own.
            return 1, "any"
    raise TypeError(f"no rule for {op_of(request)}")


def _per_sequence(request: Delta) -> int:
    return request.per_sequence if isinstance(request, StepRecurrence) else 1


def _dense(request: Delta, sequences: int) -> int:
    """A dense batch has so many tokens in each of its sequences."""
    return sequences if isinstance(request, ShortConvolution) else 1


def _replace(request: Delta, **changes: Any) -> Delta:
    return msgspec.structs.replace(request, **changes)
