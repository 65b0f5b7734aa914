"""The accounting of a warm-up: what was asked for, found, compiled, failed and left uncovered.

Pure bookkeeping. A variant is counted for the provider that first asked for it, once, however many requests
share it. *Covered* is only what a second run with compiling forbidden has shown; a compile that succeeded is
no proof.
"""

from __future__ import annotations

import msgspec

from prefetchd.compilers.base import Job
from prefetchd.pipeline import Ending, JobOutcome
from prefetchd.trace import Failure, Report


class RequestDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One sweep of requests: its variants (shared ones counted in each sweep) and its trace seconds."""

    request: str
    variants: int
    seconds: float
    requests: int


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that keeps a request or a variant from being covered, with its reason."""

    what: str
    kind: str
    text: str
    requests: int = 0


class WinnerFigures(msgspec.Struct, kw_only=True):
    """Tunings, each counted once: `known` and `missing` are all of them, the rest says what they are.

    The engine measures those that are missing. A known one is `present` if the engine's files answered it
    before, and `seeded` if this run has written the answer.
    """

    known: int = 0
    seeded: int = 0
    missing: int = 0
    present: int = 0
    # A winner was at hand for it, but its configuration is no candidate any more,
    dropped: int = 0
    # or it was measured on another GPU model,
    refused: int = 0
    # or for another Triton or kernel source,
    outdated: int = 0
    # or (with or without a winner) the engine looks for no result.
    unread: int = 0


class ProviderCoverage(msgspec.Struct, kw_only=True):
    """One provider's figures. `uncovered` counts requests not shown to be served from the cache."""

    requests: int = 0
    variants: int = 0
    hits: int = 0
    compiled: int = 0
    failed: int = 0
    uncovered: int = 0
    # Only of a provider whose kernels are tuned.
    winners: WinnerFigures | msgspec.UnsetType = msgspec.UNSET
    requests_detail: list[RequestDetail] = []
    problems: list[Problem] = []


class Coverage(msgspec.Struct, kw_only=True):
    """What `warm --json` prints. Seconds are wall time, but `compile_cpu_s`, from wait4 of the jobs."""

    target: str
    max_tokens: int
    dry_run: bool
    providers: dict[str, ProviderCoverage] = {}
    trace_s: float = 0.0
    compile_wall_s: float = 0.0
    compile_cpu_s: float = 0.0
    prove_s: float = 0.0
    # What no kernel family knows: such a site is never covered, and belongs to no provider.
    problems: list[Problem] = []
    # Entries found half-written or corrupt and moved aside, by the path they have now.
    quarantined: list[str] = []
    # What a person should know that keeps nothing from being covered.
    notes: list[str] = []

    @property
    def complete(self) -> bool:
        """Whether every request is covered (in a dry run: was traced)."""
        return not self.problems and all(
            not provider.uncovered and not provider.failed for provider in self.providers.values()
        )


class Ledger:
    """Collects reports and outcomes into a `Coverage`."""

    def __init__(self, target: str, max_tokens: int, *, dry_run: bool) -> None:
        self.coverage = Coverage(target=target, max_tokens=max_tokens, dry_run=dry_run)
        # The provider that first asked for a variant, by (compiler, key).
        self._owner: dict[tuple[str, str], str] = {}
        self._jobs: dict[tuple[str, str], Job] = {}

    def add_provider(self, name: str) -> None:
        """Makes a provider's entry, so that one without requests is reported too."""
        self.coverage.providers.setdefault(name, ProviderCoverage())

    def winners(self, provider: str) -> WinnerFigures:
        """The provider's tunings, to count in; from the first call on they are part of its figures."""
        figures = self.coverage.providers[provider]
        if figures.winners is msgspec.UNSET:
            figures.winners = WinnerFigures()
        return figures.winners

    def unknown(self, site: str, op: str, requests: int) -> None:
        """A site of the profile whose op nobody here knows."""
        text = f"no kernel family here knows the op {op!r}; correct it in the profile, or remove the site"
        self.coverage.problems.append(
            Problem(what=f"site {site}", kind="unknown", text=text, requests=requests)
        )

    def traced(self, provider: str, label: str, requests: int, report: Report) -> None:
        """Takes a capture report of one sweep."""
        figures = self.coverage.providers[provider]
        figures.requests += requests
        figures.requests_detail.append(
            RequestDetail(
                request=label, variants=len(report.jobs), seconds=round(report.seconds, 4), requests=requests
            )
        )
        for job in report.jobs:
            identity = (job.compiler, job.key)
            if identity not in self._owner:
                self._owner[identity] = provider
                self._jobs[identity] = job
                figures.variants += 1
        self._count_failures(figures, report.failures)

    def jobs(self) -> list[Job]:
        """Every variant traced so far, each once, in order of first use."""
        return list(self._jobs.values())

    def hit(self, job: Job) -> None:
        """The engine's cache has this variant already."""
        self._figures(job).hits += 1

    def ended(self, outcome: JobOutcome) -> None:
        """Takes a compile's outcome; one that another process published counts as a hit."""
        figures = self._figures(outcome.job)
        self.coverage.compile_cpu_s += outcome.cpu_s
        if outcome.ending is Ending.COMPILED:
            figures.compiled += 1
        elif outcome.ending is Ending.FOUND:
            figures.hits += 1
        else:
            figures.failed += 1
            figures.problems.append(Problem(what=outcome.job.key, kind="compile", text=outcome.text))

    def proved(self, provider: str, requests: int, report: Report, traced: Report) -> None:
        """Takes a forbid report of a sweep; requests whose trace failed already are not counted twice."""
        known = {failure.request for failure in traced.failures}
        left = requests - sum(failure.requests for failure in traced.failures)
        new = []
        for failure in report.failures:
            # The last one listed may stand for others, and some of these may be known: no more than all fail.
            if failure.request not in known and left > 0:
                new.append(msgspec.structs.replace(failure, requests=min(failure.requests, left)))
                left -= failure.requests
        self._count_failures(self.coverage.providers[provider], tuple(new))

    def _figures(self, job: Job) -> ProviderCoverage:
        return self.coverage.providers[self._owner[job.compiler, job.key]]

    @staticmethod
    def _count_failures(figures: ProviderCoverage, failures: tuple[Failure, ...]) -> None:
        for failure in failures:
            figures.uncovered += failure.requests
            figures.problems.append(
                Problem(what=failure.request, kind=failure.kind, text=failure.text, requests=failure.requests)
            )
