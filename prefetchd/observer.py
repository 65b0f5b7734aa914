"""What the engine compiled itself, and why: pure bookkeeping, told by one thin adaptor a compile system.

The subtle rule is what counts as an *engine compile*: only what an adaptor reports by `started` and `ended`.
A variant found on disk (`hit`), a module load and a benchmark of a tuner are none, however long they take.
Why it was one is told in `observing/knowledge.py`, how it differs from what was known in `changes.py`.

Clock and sink are passed in, and nothing here reads a file or a socket. Every method may be called from any
thread and raises nothing into its caller, with one exception that is asked for: `enforce`, in fail-fast mode.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, cast

from prefetchd.guard import Guard, guarded
from prefetchd.observing.changes import UNBOUNDED_AFTER, Changes
from prefetchd.observing.knowledge import Alone, Knowledge, Reason, judge
from prefetchd.protocol import Event, MalformedRequest, encode_request, request_from_fields
from prefetchd.shapelog import Cause, Record
from prefetchd.winners import Winner

log = logging.getLogger("prefetchd")

# Compiles that run at once are as many as threads; more open ones than this were never ended.
MAX_OPEN = 1024
# Variants of which a record was made. Every model we know has far below ten thousand.
MAX_SEEN = 65536
# What a reader of records and messages accepts.
MAX_NAME, MAX_TEXT = 1024, 4096

# What happens at an engine compile: nothing but the record, a line in the log, or an exception in the engine.
OnCompile = Literal["ignore", "warn", "error"]
NO_PARTS: Mapping[str, str] = {}


class EngineCompiled(RuntimeError):
    """In fail-fast mode: the engine compiled a kernel itself; the text says which, where and why."""


class Started(NamedTuple):
    """One compile that runs; `at` by the wall clock. What a hang is attributed by."""

    token: int
    compiler: str
    key: str
    digest: str
    site: str
    at: float
    # Whether the variant was said to be published before it began.
    published: bool
    # Whether its begin was told to the sink, which then hears of its end too.
    told: bool = False


class Sink(Protocol):
    """Where reports go. Called on the engine's thread, so each returns at once; failures are caught."""

    def began(self, started: Started) -> None:
        """A compile of a variant that is new here; `over` follows, unless it hangs."""
        ...

    def over(self, token: int) -> None:
        """The compile of `began` has ended."""
        ...

    def found(self, started: Started) -> None:
        """The daemon's work was there in time: a variant that it published is used the first time."""
        ...

    def record(self, record: Record) -> None:
        """A variant first seen. Fingerprint, host, rank and device are for the sink to fill in."""
        ...

    def event(self, event: Event) -> None:
        """For the daemon."""
        ...

    def winner(self, winner: Winner) -> None:
        """An outcome measured by the engine's tuner."""
        ...


class Observer:
    """One process's account of what was compiled in it."""

    def __init__(
        self,
        sink: Sink,
        knowledge: Knowledge | None = None,
        *,
        on_compile: OnCompile = "ignore",
        site: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.guard = Guard()
        self.knowledge: Knowledge = knowledge or Alone()
        self.on_compile: OnCompile = on_compile
        # Compiles in fail-fast mode, whoever has swallowed the exceptions.
        self.forbidden = 0
        self._sink, self._site, self._clock = sink, site, clock
        self._tokens = itertools.count(1)
        # Only around steps of dictionaries; reentrant, since a signal handler may compile too.
        self._lock = threading.RLock()
        self._open: OrderedDict[int, Started] = OrderedDict()
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._changes = Changes()
        self._figures: dict[str, float] = {}
        self._verdicts = threading.local()

    @guarded(0)
    def started(
        self,
        compiler: str,
        *,
        key: str = "",
        digest: str = "",
        site: str = "",
        at: float | None = None,
        over: bool = False,
    ) -> int:
        """A compile begins. The token names it until `ended`; 0 names none.

        Who hears of it late says when it began, by the wall clock, and whether it is over by now.
        """
        published = bool(key) and self.knowledge.published(compiler, key)
        started = Started(
            token=next(self._tokens),
            compiler=compiler,
            key=key[:MAX_NAME],
            digest=digest[:MAX_NAME],
            # Who hears of it late is not in the thread that compiled.
            site=(site or (self._site() if at is None else ""))[:MAX_TEXT],
            at=self._clock() if at is None else at,
            published=published,
        )
        with self._lock:
            started = started._replace(told=not over and self._is_new(started))
            self._open[started.token] = started
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        if started.told:
            self._sink.began(started)
        if started.key or started.digest:
            self._sink.event(_event(started, "started", seconds=self._ago(started)))
        return started.token

    @guarded(None)
    def ended(
        self,
        token: int,
        *,
        seconds: float,
        ok: bool = True,
        key: str = "",
        digest: str = "",
        site: str = "",
        provider: str = "",
        request: dict[str, Any] | None = None,
        rebuild: dict[str, Any] | None = None,
        parts: Mapping[str, str] = NO_PARTS,
    ) -> None:
        """That compile is over. What was not known at its start is told now; `parts` is the key by field."""
        with self._lock:
            started = self._open.pop(token, None)
        if started is None:
            return
        if started.told:
            self._sink.over(token)
        # A clock that was set back must not make a record that no reader takes.
        seconds = max(seconds, 0.0)
        named = started._replace(
            key=key[:MAX_NAME] or started.key,
            digest=digest[:MAX_NAME] or started.digest,
            site=site[:MAX_TEXT] or started.site,
        )
        reason = judge(self.knowledge, named.compiler, named.key, named.published, request)
        with self._lock:
            self._count(named.compiler, reason, seconds)
            first = self._first(named)
            changed, unbounded = self._changes.add(named.compiler, parts) if first else ("", [])
        self._verdict(named, reason, seconds, changed)
        # By the name it was announced with: to the daemon another name is another compile.
        told = started if started.key or started.digest else named
        if told is named and (named.key or named.digest):
            self._sink.event(_event(named, "started", seconds=self._ago(named)))
        if told.key or told.digest:
            self._sink.event(_event(told, "ended", seconds=seconds, ok=ok, request=_encoded(request)))
        for field in unbounded:
            _warn_of_unbounded(named, field, parts)
        if first:
            self._sink.record(
                Record(
                    compiler=named.compiler,
                    key=named.key,
                    fingerprint="",
                    job_digest=named.digest,
                    cause=_cause(reason, request is not None and self.knowledge.asked(request)),
                    seconds=seconds,
                    ok=ok,
                    at=named.at,
                    site=named.site,
                    changed=changed[:MAX_TEXT],
                    provider=provider,
                    request=request,
                    rebuild=rebuild,
                )
            )

    @guarded(None)
    def hit(self, compiler: str, key: str) -> None:
        """Found on disk: never an engine compile. One that the daemon published is a planned hit."""
        planned = self.knowledge.published(compiler, key)
        started = Started(0, compiler, key[:MAX_NAME], "", "", self._clock(), planned)
        with self._lock:
            self._add(f"{compiler}.hits")
            if planned:
                self._add(f"{compiler}.{Reason.PLANNED}")
            first = self._first(started)
        if first:
            self._sink.event(_event(started, "hit"))
        if first and planned:
            self._sink.found(started)

    @guarded(None)
    def loaded(self, compiler: str, key: str, seconds: float) -> None:
        """A module was loaded onto the device."""
        with self._lock:
            self._add(f"{compiler}.loads")
            self._add(f"{compiler}.load_seconds", seconds)
        self._sink.event(Event(what="load", compiler=compiler, key=key[:MAX_NAME], seconds=max(seconds, 0.0)))

    @guarded(None)
    def benchmarked(self, compiler: str, name: str, seconds: float, winner: Winner | None = None) -> None:
        """A tuner measured its candidates for `name`; the winner is kept for the next start."""
        with self._lock:
            self._add(f"{compiler}.benchmarks")
            self._add(f"{compiler}.benchmark_seconds", seconds)
        if self.on_compile != "ignore":
            log.warning("prefetchd: the engine benchmarked %s (%s) for %.2f s", name, compiler, seconds)
        if winner is not None:
            self._sink.winner(winner)

    def enforce(self) -> None:
        """In fail-fast mode, raises `EngineCompiled` for a compile that ended in this thread since last time.

        An adaptor calls it as its very last step, outside of whatever guards it: this is the one exception
        that is meant to reach the engine.
        """
        text = getattr(self._verdicts, "text", "")
        if text:
            self._verdicts.text = ""
            raise EngineCompiled(text)

    def running(self) -> list[Started]:
        """The compiles that have begun and not ended, oldest first."""
        with self._lock:
            return list(self._open.values())

    def figures(self) -> dict[str, float]:
        """Counts and seconds by `compiler.what`, for people and metrics."""
        with self._lock:
            return dict(self._figures)

    def forget_parent(self) -> None:
        """In a forked child: what the parent compiles is not ours, and its lock may be held for ever."""
        self._lock = threading.RLock()
        self._open, self._figures, self.forbidden = OrderedDict(), {}, 0
        self._verdicts = threading.local()

    def _verdict(self, compile_: Started, reason: Reason, seconds: float, changed: str) -> None:
        if self.on_compile == "ignore":
            return
        name = compile_.key or compile_.digest or "(no name)"
        text = (
            f"the engine compiled {compile_.compiler} {name} itself in {seconds:.2f} s ({reason}), "
            f"called from {compile_.site or 'an unknown place'}{f'; {changed}' if changed else ''}"
        )
        log.warning("prefetchd: %s", text)
        if self.on_compile == "error":
            self.forbidden += 1
            self._verdicts.text = (
                f"{text}. PREFETCHD_ON_ENGINE_COMPILE=error forbids that: warm or replay this variant before "
                "the engine serves, or set the variable to warn"
            )

    def _ago(self, compile_: Started) -> float:
        return max(0.0, self._clock() - compile_.at)

    def _is_new(self, compile_: Started) -> bool:
        """Whether it has a name that was not met here."""
        name = compile_.key or compile_.digest
        return bool(name) and (compile_.compiler, name) not in self._seen

    def _first(self, compile_: Started) -> bool:
        """Whether this variant is met the first time, as one without a name always is; then it is known."""
        name = compile_.key or compile_.digest
        if not name:
            return True
        if not self._is_new(compile_):
            return False
        self._seen[compile_.compiler, name] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return True

    def _count(self, compiler: str, reason: Reason, seconds: float) -> None:
        self._add(f"{compiler}.compiles")
        self._add(f"{compiler}.{reason}")
        self._add(f"{compiler}.compile_seconds", seconds)

    def _add(self, name: str, amount: float = 1) -> None:
        self._figures[name] = self._figures.get(name, 0) + amount


def _event(
    started: Started, what: Literal["started", "ended", "hit"], *, seconds: float = 0.0, ok: bool = True,
    request: bytes = b"",
) -> Event:  # fmt: skip
    return Event(
        what=what,
        compiler=started.compiler,
        key=started.key,
        digest=started.digest,
        seconds=seconds,
        ok=ok,
        request=request,
        site=started.site,
    )


def _encoded(request: Mapping[str, Any] | None) -> bytes:
    if request is None:
        return b""
    try:
        return encode_request(request_from_fields(request))
    except (MalformedRequest, TypeError, ValueError):
        # For people: the record holds it as it is.
        return b""


def _cause(reason: Reason, asked: bool) -> Cause:
    """A log says what was planned; that no daemon was there to do it is a matter of the moment."""
    if reason is Reason.DAEMON_DOWN:
        return "late" if asked else "unplanned"
    return cast(Cause, reason.value)


def _warn_of_unbounded(compile_: Started, field: str, parts: Mapping[str, str]) -> None:
    log.warning(
        "prefetchd: %s %s: field %s of its key has taken more than %d values that are no power of two "
        "(now %s), each a compile of its own; round or pad it, or keep it out of the key, in %s",
        compile_.compiler,
        parts.get("kernel", compile_.key),
        field,
        UNBOUNDED_AFTER,
        parts.get(field, ""),
        compile_.site or "its caller",
    )
