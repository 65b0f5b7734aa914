"""Ranks that share a helper: equal target, interpreter and packages, and fingerprints that do not contradict.

A rank tells more of itself as its engine imports libraries. The subtle rule: it stays with its helper as long
as nothing it says contradicts what the group is known by; equality of what was said so far would start a new
helper at each import.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points

import msgspec

from prefetchd.broker.types import TraceOrder
from prefetchd.compilers import COMPILERS, compiler_class
from prefetchd.compilers.base import ROOT_FIELDS, CompilerUnavailable, Job
from prefetchd.config import ENABLED_VARIABLE, Settings, compile_settings
from prefetchd.node.allow import AllowList, compare, root_mismatch
from prefetchd.node.helpers import Helper, Limits
from prefetchd.node.winning import Tunings, live_given
from prefetchd.node.workshop import Workshop
from prefetchd.protocol import Hello, Mismatch, Sweep
from prefetchd.provider import PROVIDER_GROUP
from prefetchd.targets import Target
from prefetchd.trace import Ready, Report
from prefetchd.tracer import Tracer

Facts = dict[str, dict[str, str]]
# The compilers whose libraries measure before they choose.
TUNED = ("triton",)


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier runs compiled: jobs that need no trace, and by provider the requests that need one."""

    jobs: tuple[Job, ...] = ()
    requests: dict[str, tuple[Sweep, ...]] = {}


class Group:
    """One helper, one workshop, and what is known of the engines that use them."""

    def __init__(self, name: str, hello: Hello, target: Target, allow: AllowList, settings: Settings) -> None:
        self.name = name
        self.target = target
        self.interpreter = allow.interpreter_for(hello)
        self.directories = allow.extra_directories(hello)
        self.ranks: set[str] = set()
        # By rank the directories that are written to for it.
        self.roots: dict[str, frozenset[str]] = {}
        self.known: Facts = {}
        # What the helper found, by compiler; empty until it was up once.
        self.helper_facts: Facts = {}
        self.unavailable: dict[str, str] = {}
        self.empty_since: float | None = None
        # Compiles and copies that run in its workshop.
        self.busy = 0
        self.providers: tuple[str, ...] = ()
        # By rank and compiler the directories that its library looks in first.
        self.first_roots: dict[str, dict[str, str]] = {}
        self.tunings = Tunings(target)
        # What every rank of the group gets from earlier runs, those that join later too.
        self.replays: list[Replay] = []
        self._settings = settings
        self.environment = self._environment(admitted_roots(hello, allow))
        self.workshop = Workshop(target, self.environment, self.interpreter, settings, lambda: self.providers)
        self.helper: Helper

    def _environment(self, roots: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        """The daemon's own, with the settings' additions and the cache directories that were admitted."""
        base = {**os.environ, **self._settings.helper_environment}
        # A helper is no engine.
        base[ENABLED_VARIABLE] = "0"
        if self.directories:
            base["PYTHONPATH"] = ":".join(filter(None, (*self.directories, base.get("PYTHONPATH", ""))))
        for name, paths in roots.items():
            if paths:
                base[compiler_class(name).cache_variable] = ":".join(paths)
        return compile_settings(self._settings, base)

    def tracer(self, providers: tuple[str, ...]) -> Tracer:
        """The near side of a new helper, which is told what is known of tuners by then."""
        self.tunings.given = live_given(self._settings, self.environment, self.target)
        return Tracer(
            self.target,
            providers,
            self.environment,
            parallel=self.traces_at_once,
            timeout_s=self._settings.trace_timeout_s,
            given=self.tunings.given,
            interpreter=self.interpreter,
        )

    @property
    def traces_at_once(self) -> int:
        """How many traces the helper runs side by side."""
        return self._settings.helper_traces_at_once or max(1, len(os.sched_getaffinity(0)) // 2)

    def want(self, providers: tuple[str, ...]) -> None:
        """These families are needed; those that are not installed are left to fail by name in the helper."""
        self.providers = tuple(dict.fromkeys((*self.providers, *providers)))
        self.helper.want(providers)

    def suits(self, hello: Hello, target: Target, allow: AllowList) -> bool:
        """Whether this group's helper serves the engine."""
        return (
            target == self.target
            and allow.interpreter_for(hello) == self.interpreter
            and allow.extra_directories(hello) == self.directories
            and all(
                self.known.get(compiler, {}).get(field, value) == value
                for compiler, facts in hello.fingerprints.items()
                for field, value in facts.items()
                if field not in ROOT_FIELDS
            )
        )

    def join(self, rank: str, hello: Hello) -> None:
        """The rank is one of ours, and what it says of itself is known from here on."""
        self.ranks.add(rank)
        self.empty_since = None
        for compiler, facts in hello.fingerprints.items():
            if compiler in COMPILERS:
                known = self.known.setdefault(compiler, {})
                known.update({name: value for name, value in facts.items() if name not in ROOT_FIELDS})

    def leave(self, rank: str, now: float) -> None:
        """The rank is gone."""
        self.ranks.discard(rank)
        self.roots.pop(rank, None)
        self.first_roots.pop(rank, None)
        if not self.ranks:
            self.empty_since = now
            # Whoever comes next need not be like those who left.
            self.known.clear()

    def uses(self, root: str) -> bool:
        """Whether any of its ranks' engines looks there."""
        return any(root in found for found in self.roots.values())

    def tuned_roots(self) -> list[str]:
        """The directories in which its engines' tuners look for results."""
        found = (roots.get(compiler) for roots in self.first_roots.values() for compiler in TUNED)
        return list(dict.fromkeys(filter(None, found)))

    def mismatches(self, hello: Hello) -> list[Mismatch]:
        """Where the helper's fingerprints contradict the engine's; nothing before a helper was up."""
        return [
            difference
            for compiler, facts in hello.fingerprints.items()
            if compiler in self.helper_facts
            for difference in compare(compiler, facts, self.helper_facts[compiler])
        ]

    def default_roots(self, compiler: str) -> tuple[str, ...]:
        """Where our own library would look; nothing where it cannot work here."""
        try:
            return tuple(map(str, self.workshop.compiler(compiler).roots()))
        except CompilerUnavailable:
            return ()


class GroupDesk:
    """Between a group's helper and the daemon; the callbacks are the daemon's."""

    def __init__(
        self,
        group: Group,
        *,
        next_order: Callable[[str], TraceOrder | None],
        traced: Callable[[TraceOrder, Report], None],
        lost: Callable[[TraceOrder, str], None],
        ready: Callable[[Group], None],
    ) -> None:
        self._group = group
        self._next_order, self._traced, self._lost, self._ready = next_order, traced, lost, ready

    def next_order(self) -> TraceOrder | None:
        """See `Desk`."""
        return self._next_order(self._group.name)

    def traced(self, order: TraceOrder, report: Report) -> None:
        """See `Desk`."""
        self._traced(order, report)

    def lost(self, order: TraceOrder, reason: str) -> None:
        """See `Desk`."""
        self._lost(order, reason)

    def ready(self, ready: Ready) -> None:
        """See `Desk`."""
        self._group.helper_facts = ready.fingerprints
        self._group.unavailable = ready.unavailable
        self._ready(self._group)


class Groups:
    """The groups by name."""

    def __init__(self, allow: AllowList, settings: Settings) -> None:
        self._allow = allow
        self._settings = settings
        self.by_name: dict[str, Group] = {}

    def find(self, hello: Hello, target: Target) -> Group | None:
        """The group that serves this engine."""
        for group in self.by_name.values():
            if group.suits(hello, target, self._allow) and not (
                self._settings.helper_per_rank and group.ranks
            ):
                return group
        return None

    def make(self, hello: Hello, target: Target, desk: Callable[[Group], GroupDesk]) -> Group:
        """A new group; its helper waits until it is wanted."""
        name = self._name(hello, target)
        group = Group(name, hello, target, self._allow, self._settings)
        limits = Limits(
            at_once=group.traces_at_once,
            max_traces=self._settings.helper_max_traces,
            max_rss_bytes=self._settings.helper_max_rss_mb << 20,
        )
        group.helper = Helper(name, group.tracer, desk(group), limits)
        self.by_name[name] = group
        return group

    def _name(self, hello: Hello, target: Target) -> str:
        """The same for the same engine after a restart, so that the broker finds what it knows of it."""
        facts = {
            compiler: {name: value for name, value in fields.items() if name not in ROOT_FIELDS}
            for compiler, fields in hello.fingerprints.items()
        }
        identity = msgspec.json.encode(
            (target, facts, self._allow.interpreter_for(hello), self._allow.extra_directories(hello)),
            order="deterministic",
        )
        base = f"sm{target.capability}-{hashlib.sha256(identity).hexdigest()[:8]}"
        names = itertools.chain((base,), (f"{base}-{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in self.by_name)

    def empty_longer_than(self, seconds: float, now: float) -> list[Group]:
        """The groups that nobody has used for so long."""
        return [
            group
            for group in self.by_name.values()
            if group.empty_since is not None and not group.busy and now - group.empty_since >= seconds
        ]


def admitted_roots(hello: Hello, allow: AllowList) -> dict[str, tuple[str, ...]]:
    """By compiler the reported directories, where the first, the one that is written to, is allowed."""
    return {
        name: roots
        for name, roots in hello.cache_roots.items()
        if name in COMPILERS and roots and allow.root_problem(roots[0]) is None
    }


def refused_roots(hello: Hello, allow: AllowList) -> list[Mismatch]:
    """A report for each compiler whose directory is not written to."""
    return [
        root_mismatch(name, roots[0], "", problem)
        for name, roots in hello.cache_roots.items()
        if name in COMPILERS and roots and (problem := allow.root_problem(roots[0])) is not None
    ]


def installed_providers() -> frozenset[str]:
    """The names of the kernel families that are installed here; nothing is imported."""
    return frozenset(point.name for point in entry_points(group=PROVIDER_GROUP))
