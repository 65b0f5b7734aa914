"""A model's profile learned from shape logs: the sites that engines really launched, as TOML for the planner.

A record tells one call. What differs between calls of one site is the number of tokens, so calls that are
equal otherwise are one site, and the numbers they were seen with say how its M comes from the tokens. The
subtle rule: a log holds what happened to be compiled, and the next batch has another number. So a site gets
the widest rule that its numbers agree with, which asks for what was seen and for what lies between.

How many experts a token goes to stands in no call; with it (`top_k`) the experts' rows follow from the
tokens, without it they are a range, that only a whole universe covers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from prefetchd.config import MOST_TOKENS, load_settings
from prefetchd.kernel_packages import HOME_PACKAGES, home_problem
from prefetchd.log_commands import chosen_logs, json_option, read_merged
from prefetchd.plain_errors import plain_errors
from prefetchd.plain_text import printable
from prefetchd.profiles import GemmSite, KernelSite, Profile, ProfileError, m_ranges, write_profile
from prefetchd.profiles.flag_sets import list_fields
from prefetchd.profiles.model_sizes import MOST
from prefetchd.profiles.sites import WINDOW
from prefetchd.protocol import MalformedRequest, Request, UnknownRequest, op_of, request_from_fields
from prefetchd.requests.deep_gemm import DeepGemmRequest, GroupedContiguous, GroupedMasked, KGrouped
from prefetchd.requests.delta import Delta, ShortConvolution
from prefetchd.requests.mamba import Mamba2, Mamba2Prefill
from prefetchd.shapelog import LogUnusable, Record

# A model has some dozen sites, and a few sets of flags of each; far more is not one model's log.
MAX_SITES = 2000
MAX_NOTES = 20
# Of one, which may quote what a stranger wrote.
MAX_NOTE = 400
LEARNED = "learned"

# What a batch decides about a call beside its tokens; the providers derive it anew.
_OF_THE_BATCH = {Delta: ("tokens", "sequences"), Mamba2Prefill: ("tokens", "chunks")}


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What no call tells: the largest batch, experts a token (0: unknown), and how ranks share the work."""

    max_tokens: int
    top_k: int = 0
    ep: int = 1
    dp: int = 1


class Learner:
    """Collects requests and makes a profile of them. Pure; one that it cannot use is counted and noted."""

    def __init__(self, deployment: Deployment, packages: tuple[str, ...] = HOME_PACKAGES) -> None:
        self._deployment = deployment
        # Homes outside of these enter no profile: whoever uses one imports its homes.
        self._packages = packages
        self.requests = 0
        # Why a request is in no site, and how many are.
        self.left_out: Counter[str] = Counter()
        self._gemms: dict[tuple[Any, ...], set[int]] = {}
        self._kernels: dict[tuple[Any, ...], None] = {}

    def add(self, fields: Mapping[str, Any]) -> None:
        """One request, by its wire fields. Raises nothing on account of what they are."""
        try:
            request = request_from_fields(fields)
        except (MalformedRequest, TypeError, ValueError, OverflowError, RecursionError) as error:
            self.left_out[f"not a request: {str(error)[:200]}"] += 1
            return
        if problem := home_problem(fields.get("home"), self._packages):
            self.left_out[problem] += 1
        elif len(self._gemms) + len(self._kernels) >= MAX_SITES:
            self.left_out[f"more than {MAX_SITES} sites: these logs are not of one model"] += 1
        elif problem := self._note(request):
            self.left_out[f"{op_of(request)[:100]}: {problem}"] += 1
        else:
            self.requests += 1

    def profile(self) -> Profile:
        """All sites seen so far. Raises `ProfileError` where there are none."""
        if not self._gemms and not self._kernels:
            raise ProfileError(
                "the logs hold no request of a known kernel family, so there is nothing to learn; replay "
                "them instead: what they hold can be rebuilt without a profile"
            )
        names: Counter[str] = Counter()
        notes = [
            printable(f"{count} requests are in no site: {reason}", MAX_NOTE)
            for reason, count in self.left_out.most_common(MAX_NOTES)
        ]
        if not self._deployment.top_k and any("groups" in dict(key[1]) for key in self._gemms):
            notes.insert(0, "experts' rows are ranges, which planning by batch does not follow: give --top-k")
        empty = Profile(
            model=LEARNED,
            architecture=LEARNED,
            tp=1,
            ep=self._deployment.ep,
            dp=self._deployment.dp,
            quantization=LEARNED,
            top_k=self._deployment.top_k,
            context_tokens=self._largest_context(),
            notes=tuple(notes[:MAX_NOTES]),
        )
        return msgspec.structs.replace(
            empty,
            gemms=tuple(self._gemm(key, values, empty, names) for key, values in self._gemms.items()),
            kernels=tuple(_kernel(key, names) for key in self._kernels),
        )

    def _note(self, request: Request) -> str:
        """Why it is in no site; empty if it is."""
        if isinstance(request, UnknownRequest):
            return "this version of prefetchd does not know the op"
        told = _telling(request)
        if isinstance(request, DeepGemmRequest):
            swept = request.sweep_field
            if swept is None:
                return "has no number of rows, so it is launched once, when the engine loads its weights"
            value = told.pop(swept, None) or getattr(request, swept)
            self._gemms.setdefault((type(request), tuple(told.items())), set()).add(value)
            return ""
        if isinstance(request, (Delta, Mamba2)):
            self._kernels[(type(request), tuple(_without_batch(request, told).items()))] = None
            return ""
        return "no rule for this kernel family"

    def _largest_context(self) -> int:
        """The most rows of any dense product, in whole windows."""
        rows = [max(values) for (kind, _), values in self._gemms.items() if _is_dense(kind)]
        return min(_up(max([self._deployment.max_tokens, *rows]), WINDOW), MOST)

    def _gemm(
        self, key: tuple[Any, ...], values: set[int], profile: Profile, names: Counter[str]
    ) -> GemmSite:
        kind, told = key
        options = dict(told)
        # An op without such sizes keeps its own in `options`, and a site's are not looked at.
        n, k, groups = (int(options.pop(size, least)) for size, least in (("n", 1), ("k", 1), ("groups", 0)))
        name = op_of(kind) + (f".g{groups}" if groups else "") + (f".n{n}.k{k}" if n * k > 1 else "")
        site = GemmSite(
            name=_unique(name, names),
            op=op_of(kind),
            n=n,
            k=k,
            groups=groups,
            m=self._rule(kind, options, values),
            options=options,
        )
        if _covers(m_ranges(site, profile, self._deployment.max_tokens), site.m, values):
            return site
        return msgspec.structs.replace(site, m=_range(values))

    def _rule(self, kind: type[Request], options: Mapping[str, Any], values: set[int]) -> str:
        """The rule that engines follow for such an op, where that can be told."""
        routed = issubclass(kind, GroupedContiguous)
        if routed or issubclass(kind, GroupedMasked):
            if not self._deployment.top_k or options.get("alignment"):
                return _range(values)
            return "routed" if routed else "expected"
        if issubclass(kind, KGrouped):
            return _range(values)
        fits = max(values) <= self._deployment.max_tokens
        return "context" if _is_dense(kind) and not fits else "tokens"


def learn(records: Iterable[Record], deployment: Deployment, packages: tuple[str, ...]) -> Learner:
    """What the records' requests come to."""
    learner = Learner(deployment, packages)
    for record in records:
        if record.request is not None:
            learner.add(record.request)
    return learner


def _is_dense(kind: type[Request]) -> bool:
    return (
        issubclass(kind, DeepGemmRequest)
        and kind.sweep_field == "m"
        and "groups" not in kind.__struct_fields__
    )


def _telling(request: Request) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    values = msgspec.structs.asdict(request)
    return {
        field.name: values[field.name]
        for field in msgspec.structs.fields(request)
        if field.required or values[field.name] != field.default
    }


def _without_batch(request: Request, told: dict[str, Any]) -> dict[str, Any]:
    left_out = {str(request.sweep_field)}
    for kind, names in _OF_THE_BATCH.items():
        if isinstance(request, kind):
            left_out.update(names)
    return {name: value for name, value in told.items() if name not in left_out}


def _kernel(key: tuple[Any, ...], names: Counter[str]) -> KernelSite:
    kind, told = key
    fields = dict(told)
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    home = fields.pop("home", defaults["home"])
    sizes = {name: value for name, value in fields.items() if type(value) is int and value > 0}
    flags = {name: value for name, value in fields.items() if name not in sizes}
    if issubclass(kind, ShortConvolution):
        # The width that was seen, and no other: as if q, k and v were as wide and came one by one.
        channels = sizes.pop("channels")
        sizes = {"key_channels": channels, "value_channels": channels, **sizes}
        flags["split"] = True
    if "decode" in kind.__struct_fields__:
        # Said even where it is the default, for a site that leaves it open gets both.
        flags.setdefault("decode", defaults["decode"])
    lists = set(list_fields(kind))
    flags = {name: tuple(value) if name in lists else value for name, value in flags.items()}
    return KernelSite(name=_unique(op_of(kind), names), op=op_of(kind), home=home, sizes=sizes, flags=flags)


def _covers(ranges: Iterable[range], rule: str, values: Iterable[int]) -> bool:
    """Whether all that was seen is asked for; beyond the batch one of each window stands for all of it."""
    return all(
        any(value in each or (rule == "context" and _up(value, WINDOW) in each) for each in ranges)
        for value in values
    )


def _range(values: Iterable[int]) -> str:
    """From the least to the largest of them in the step that all share: engines pad by it."""
    step, last = math.gcd(*values), max(values)
    return f"{step}..{last}/{step}" if last > step else str(last)


def _unique(name: str, names: Counter[str]) -> str:
    names[name] += 1
    return name if names[name] == 1 else f"{name}-{names[name]}"


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@click.command("profile")
@click.option(
    "--from-log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A shape log or a directory of them; may be repeated. Default: where this user's engines write.",
)
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("learned.profile.toml"),
    show_default=True,
    help="File to write.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, MOST_TOKENS),
    help="Largest batch of the scheduler, in tokens: more rows than that come from cached context. "
    "Default: 8192.",
)
@click.option("--top-k", type=click.IntRange(0), default=0, help="Experts a token, which no log tells.")
@click.option("--ep", type=click.IntRange(1), default=1, show_default=True, help="Expert parallel size.")
@click.option("--dp", type=click.IntRange(1), default=1, show_default=True, help="Data parallel size.")
@json_option
@plain_errors(LogUnusable)
def profile_command(
    logs: tuple[Path, ...],
    out: Path,
    max_tokens: int | None,
    top_k: int,
    ep: int,
    dp: int,
    as_json: bool,
) -> int:
    """Learn a model's profile from what its engines compiled, for the planner and for `warm --profile`."""
    settings = load_settings()
    merged = read_merged(chosen_logs(logs), quiet=as_json)
    deployment = Deployment(max_tokens=max_tokens or settings.max_tokens, top_k=top_k, ep=ep, dp=dp)
    learner = learn(merged, deployment, (*HOME_PACKAGES, *settings.replay_packages))
    profile = learner.profile()
    write_profile(profile, out)
    figures = {
        "out": str(out),
        "requests": learner.requests,
        "gemms": len(profile.gemms),
        "kernels": len(profile.kernels),
        "left_out": learner.left_out.total(),
        "notes": profile.notes,
    }
    if as_json:
        click.echo(msgspec.json.encode(figures))
        return 0
    click.echo(
        f"wrote {out}: {len(profile.gemms)} GEMM sites and {len(profile.kernels)} other kernels from "
        f"{learner.requests} requests; name the model in it"
    )
    for note in profile.notes:
        click.echo(f"note: {note}")
    return 0
