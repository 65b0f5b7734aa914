"""The kernel launches ("sites") of a model on one rank, and which M each matrix product can meet.

A planner beside the scheduler turns a batch into requests by these alone, and `warm` enumerates them whole.
The subtle rule is M: most sites see the tokens of the batch, the experts see routed rows padded by the
library's alignment, and MLA's context expansion sees lengths that no batch bounds. Each site therefore names
its rule. A rule may ask for an M that never comes (one trace too many); it must not leave out one that does.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from prefetchd.profiles.architectures import ProfileError
from prefetchd.profiles.model_sizes import MOST
from prefetchd.protocol import Batch

RULES = ("tokens", "routed", "expected", "context")

# DeepGEMM's layout choice depends on M through ceil(M / block), every block a multiple of 16 rows: it was
# constant on every window of 16 in all cases traced, so one M a window is enough where M is unbounded.
WINDOW = 16

LITERAL = re.compile(r"(\d+)(?:\s*\.\.\s*(\d+)(?:\s*/\s*(\d+))?)?")


class GemmSite(msgspec.Struct, frozen=True, kw_only=True):
    """One weight matrix: `op` computes M x K times K x N, for `groups` experts where there are any.

    `m` is a rule ("tokens", "routed", "expected", "context") or a list of ranges, "1..4096, 8192..65536/64".
    `options` are further fields of the op's request.
    """

    name: str
    op: str
    n: int
    k: int
    groups: int = 0
    m: str
    options: dict[str, int | str | bool] = {}

    def __post_init__(self) -> None:
        for field in ("name", "op"):
            if not getattr(self, field):
                raise ProfileError(f"site {self.name!r}: {field} is empty; give it a text")
        for field, least in (("n", 1), ("k", 1), ("groups", 0)):
            if getattr(self, field) < least:
                raise ProfileError(
                    f"site {self.name!r}: {field} = {getattr(self, field)}: must be {least} or more"
                )
            if getattr(self, field) > MOST:
                raise ProfileError(
                    f"site {self.name!r}: {field} = {getattr(self, field)}: must be {MOST} or less"
                )
        if self.m in ("routed", "expected") and not self.groups:
            raise ProfileError(
                f"site {self.name!r}: m = {self.m!r} needs experts and groups = 0; set groups to their number"
            )
        if self.m not in RULES:
            _literal_ranges(self.m, self.name)


Flag = int | str | bool


class KernelSite(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel of a layer that is no matrix product: `op` of the kernels in `home`, on one rank's `sizes`.

    `flags` are further fields of the op's request, or `set`: the name of a caller whose flags they are, or
    several names. A list stands for each of its values. What sizes and flags there are, the provider says.
    """

    name: str
    op: str
    home: str = "fla"
    sizes: dict[str, int]
    flags: dict[str, Flag | tuple[Flag, ...]] = {}

    def __post_init__(self) -> None:
        for field in ("name", "op", "home"):
            if not getattr(self, field):
                raise ProfileError(f"site {self.name!r}: {field} is empty; give it a text")
        for size, value in self.sizes.items():
            if not 1 <= value <= MOST:
                raise ProfileError(f"site {self.name!r}: {size} = {value}: must be 1 to {MOST}")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Every site of a model on one rank of a deployment. `notes` say what was left out and why."""

    version: int = 1
    model: str
    architecture: str
    tp: int
    ep: int
    dp: int
    quantization: str
    top_k: int = 0
    # DeepGEMM's contiguous-layout alignment: each expert's rows start at a multiple of it.
    alignment: int = 128
    context_tokens: int
    notes: tuple[str, ...] = ()
    gemms: tuple[GemmSite, ...] = ()
    kernels: tuple[KernelSite, ...] = ()

    def __post_init__(self) -> None:
        if self.version != 1:
            raise ProfileError(
                f"version = {self.version}: this prefetchd reads version 1; write the profile anew"
            )
        for field in ("tp", "ep", "dp", "alignment", "context_tokens"):
            if getattr(self, field) < 1:
                raise ProfileError(f"{field} = {getattr(self, field)}: must be 1 or more")
        if self.top_k < 0:
            raise ProfileError(f"top_k = {self.top_k}: must be 0 or more")
        names: set[str] = set()
        for name in [*(site.name for site in self.gemms), *(site.name for site in self.kernels)]:
            if name in names:
                raise ProfileError(f"site {name!r}: the name occurs twice; give each site its own")
            names.add(name)
        for site in self.gemms:
            if site.m in ("routed", "expected") and not self.top_k:
                raise ProfileError(
                    f"site {site.name!r}: m = {site.m!r}: top_k = 0; set top_k to the experts a token goes to"
                )


def m_ranges(site: GemmSite, profile: Profile, max_tokens: int) -> tuple[range, ...]:
    """Every M the site can meet when a batch holds up to `max_tokens`; listed ranges stand as they are.

    Where an expert's rows go to padded places, the bound is rounded up to the alignment: engines that do not
    know the counts size their buffer so.
    """
    if max_tokens < 1:
        raise ProfileError(f"max_tokens = {max_tokens}: must be 1 or more")
    tokens = range(1, max_tokens + 1)
    match site.m:
        case "tokens" | "expected":
            return (tokens,)
        case "routed":
            step = profile.alignment
            last = _routed_bound(site, profile, max_tokens)
            if last > MOST:
                raise ProfileError(
                    f"site {site.name!r}: m = 'routed' is more than {MOST} rows; lower max_tokens, dp or "
                    "top_k"
                )
            return (range(step, last + 1, step),)
        case "context":
            last = profile.context_tokens
            first = max_tokens // WINDOW * WINDOW + WINDOW
            windows = range(first, last + 1, WINDOW)
            rest = range(last, last + 1) if last % WINDOW and last > max_tokens else range(0)
            return tuple(part for part in (tokens, windows, rest) if part)
        case _:
            return _literal_ranges(site.m, site.name)


def m_for_batch(site: GemmSite, profile: Profile, batch: Batch) -> tuple[int, ...]:
    """The Ms this step may cause at the site, ascending; too many rather than too few.

    tokens: the batch. context: its prefill tokens and the whole batch; how much context is expanded is not in
    a batch, only `m_ranges` covers that. routed: from perfectly packed experts to each one padded, and from
    the smallest when other ranks hold experts too, for any share may come here. expected: the estimates
    engines make (mean rounded either way, one and a half times it in steps of 16) and the batch as bound.
    listed ranges: the next listed M, for such engines pad the batch up.
    """
    tokens = batch.tokens
    if tokens < 1:
        return ()
    match site.m:
        case "tokens":
            return (tokens,)
        case "context":
            return tuple(sorted({tokens, sum(batch.prefill_lengths)} - {0}))
        case "routed":
            step = profile.alignment
            least = 1 if profile.ep > 1 else _up(profile.dp * tokens * profile.top_k, step) // step
            return tuple(range(least * step, _routed_bound(site, profile, tokens) + 1, step))
        case "expected":
            rows, experts = profile.dp * tokens * profile.top_k, site.groups * profile.ep
            estimate = _up(max(3 * rows // (2 * experts), 1), WINDOW)
            return tuple(sorted({-(-rows // experts), rows // experts + 1, estimate, tokens}))
        case _:
            listed = (_next(part, tokens) for part in _literal_ranges(site.m, site.name))
            found = [m for m in listed if m is not None]
            return (min(found),) if found else ()


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _routed_bound(site: GemmSite, profile: Profile, tokens: int) -> int:
    """Every routed row here, and every expert's padding."""
    rows = profile.dp * tokens * profile.top_k
    return _up(rows + site.groups * (profile.alignment - 1), profile.alignment)


def _next(part: range, least: int) -> int | None:
    """The first number of a range that is not below `least`."""
    if least <= part[0]:
        return part[0]
    value = part[0] + _up(least - part[0], part.step)
    return value if value <= part[-1] else None


@lru_cache(maxsize=256)
def _literal_ranges(text: str, site: str) -> tuple[range, ...]:
    """`"1..4096, 8192..65536/64"`; raises `ProfileError` naming the site and the part."""
    found = []
    for part in text.split(","):
        match = LITERAL.fullmatch(part.strip())
        if not match:
            raise ProfileError(
                f"site {site!r}: m = {text!r}: {part.strip()!r} is neither a rule ({', '.join(RULES)}) nor a "
                "range such as 1..4096, 64..1024/64 or 2048; correct it"
            )
        first, last, step = (int(number) if number else None for number in match.groups())
        assert first is not None
        last, step = first if last is None else last, 1 if step is None else step
        if first < 1 or last < first or step < 1 or last > MOST:
            raise ProfileError(
                f"site {site!r}: m = {text!r}: {part.strip()!r} is empty, starts below 1 or ends "
                f"beyond {MOST}; write first..last/step"
            )
        found.append(range(first, last + 1, step))
    return tuple(found)
