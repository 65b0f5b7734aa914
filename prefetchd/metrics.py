"""The daemon's figures as Prometheus has them, and the same figures for `prefetchd stats`.

One list of families serves both, so that they cannot disagree. Names follow what engines' users know from
elsewhere: `planned`, `hits`, `late`, `unplanned`, `engine_compiles`. The one that may fall is a gauge:
`wasted` counts what was compiled here and not used so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from prefetchd.broker.types import Counts, Stats

Values = Mapping[tuple[str, ...], float]

# A Stats message has at most 1,024 figures; those of single ranks lie in its tables.
PER_RANK = frozenset({"rank"})
# Up to here a float is the very count that was meant. Beyond it is what peers claim of themselves, and as an
# int it may not fit into a message.
EXACT = 2**53


class HelperFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One helper, for people and for metrics."""

    name: str
    state: str
    pid: int | None
    ranks: tuple[str, ...]
    providers: tuple[str, ...]
    traces: int
    restarts: int
    recycled: int
    rss_bytes: int
    problem: str = ""


class NodeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of the daemon at one moment."""

    broker: Stats
    helpers: list[HelperFigures]
    uptime_s: float
    ready: bool
    peers: int
    slots: int
    rss_bytes: int
    compile_cpu_s: float
    quarantined: int
    # By message type, by what was wrong, by message type and what became of it.
    received: dict[str, int]
    problems: dict[str, int]
    sent: dict[str, int]
    # Lines that peers would have written to the log too often.
    log_suppressed: int
    # Cache directories that engines use and the daemon does not write to, by compiler.
    refused_roots: dict[str, int]
    # Sums of the clients' own counters.
    clients: dict[str, float]


def families(figures: NodeFigures) -> Iterator[Metric]:
    """Every metric."""
    yield from _of_ranks(figures.broker)
    yield from _of_queues(figures.broker)
    yield from _of_helpers(figures.helpers)
    yield from _of_daemon(figures)


def _of_ranks(stats: Stats) -> Iterator[Metric]:
    totals = {
        "planned": ("variants that some provider asked for before the engine used them", "planned"),
        "prefetch_hits": ("planned variants that were on disk when they were planned or first used", "hits"),
        "late": ("planned variants that the engine reached before they were published", "late"),
        "unplanned": ("variants that an engine used and nobody had planned", "unplanned"),
        "cache_misses_after_publish": (
            "engine compiles of what lay published where the engine says it looks", "mismatch",
        ),
    }  # fmt: skip
    for name, (text, field) in totals.items():
        yield _counter(name, text, ("rank", "compiler"), _each(stats, field))
    text = "variants that were compiled here and not used by this rank so far"
    yield _gauge("wasted", text, ("rank", "compiler"), _each(stats, "wasted"))
    compiles = CounterMetricFamily(
        "prefetchd_engine_compiles",
        "compiles in the engine itself, by reason",
        labels=("rank", "compiler", "reason"),
    )
    seconds = CounterMetricFamily(
        "prefetchd_engine_compile_seconds", "their time", labels=("rank", "compiler", "reason")
    )
    waits = SummaryMetricFamily(
        "prefetchd_wait_seconds", "how long engines waited for a variant", labels=("rank", "compiler")
    )
    for rank, compiler, counts in _counts(stats):
        for reason, count in counts.engine_compiles.items():
            compiles.add_metric((rank, compiler, reason), count)
        for reason, spent in counts.engine_seconds.items():
            seconds.add_metric((rank, compiler, reason), spent)
        waits.add_metric((rank, compiler), count_value=counts.waits, sum_value=counts.wait_seconds)
    yield from (compiles, seconds, waits)


def _of_queues(stats: Stats) -> Iterator[Metric]:
    depths = {"trace": stats.trace_depth, "compile": stats.job_depth, "publish": stats.publish_depth}
    yield _gauge(
        "queue_depth",
        "what waits, by priority",
        ("queue", "priority"),
        {(queue, name): depth for queue, by_name in depths.items() for name, depth in by_name.items()},
    )
    yield _gauge(
        "running",
        "what is under way",
        ("what",),
        {
            ("trace",): stats.tracing,
            ("compile",): stats.compiling,
            ("publish",): stats.publishing,
            ("engine_compile",): stats.engines_compiling,
            ("wait",): stats.waiting,
        },
    )
    yield _counter(
        "compiles",
        "compiles that ended here, by how",
        ("result",),
        {("compiled",): stats.compiled, ("found",): stats.found, ("failed",): stats.failures},
    )
    yield _counter("copies", "variants published from another directory", (), {(): stats.published})
    yield _counter("traces", "traced sweeps", (), {(): stats.traced})
    yield _counter("uncovered", "requests that could not be traced", (), {(): stats.uncovered})
    yield _counter("asked", "requests and sweeps that were asked for", (), {(): stats.asked})
    yield _counter("refused", "of these, those refused because a table was full", (), {(): stats.refused})
    yield _gauge(
        "keys", "known variants", ("state",), {("known",): stats.known_keys, ("failed",): stats.failed_keys}
    )
    mismatches: dict[tuple[str, ...], float] = {
        (compiler, field): count
        for name, count in stats.mismatches.items()
        for compiler, _, field in (name.partition(" "),)
    }
    yield _counter(
        "fingerprint_mismatches",
        "ranks whose engine and helper differ in this field: what is built for them is useless",
        ("compiler", "field"),
        mismatches,
    )


def _of_helpers(helpers: Iterable[HelperFigures]) -> Iterator[Metric]:
    helpers = list(helpers)

    def by_name(field: str) -> dict[tuple[str, ...], float]:
        return {(helper.name,): float(getattr(helper, field)) for helper in helpers}

    yield _gauge("helper_up", "1: it traces", ("helper",), {(h.name,): h.state == "up" for h in helpers})
    yield _gauge("helper_rss_bytes", "its resident memory", ("helper",), by_name("rss_bytes"))
    yield _counter("helper_restarts", "it ended by itself or did not start", ("helper",), by_name("restarts"))
    yield _counter("helper_recycled", "it was replaced on purpose", ("helper",), by_name("recycled"))
    yield _counter("helper_traces", "sweeps it traced", ("helper",), by_name("traces"))


def _of_daemon(figures: NodeFigures) -> Iterator[Metric]:
    yield _gauge("ready", "1: universe and replay of every engine are done", (), {(): figures.ready})
    yield _gauge("uptime_seconds", "since the daemon's start", (), {(): figures.uptime_s})
    yield _gauge("rss_bytes", "the daemon's resident memory", (), {(): figures.rss_bytes})
    yield _gauge("peers", "connections", (), {(): figures.peers})
    yield _gauge("ranks", "attached engine ranks", (), {(): figures.broker.attached})
    yield _gauge("slots", "compiles that may run at a time", (), {(): figures.slots})
    yield _counter("compile_cpu_seconds", "CPU time of compiles here", (), {(): figures.compile_cpu_s})
    yield _counter(
        "quarantined", "corrupt entries moved out of an engine's way", (), {(): figures.quarantined}
    )
    yield _counter("log_suppressed", "lines that were left out of the log", (), {(): figures.log_suppressed})
    yield _gauge(
        "cache_dir_mismatch",
        "engines whose cache directory is not written to",
        ("compiler",),
        {(name,): count for name, count in figures.refused_roots.items()},
    )
    for name, text, label, found in (
        ("messages_received", "messages by type", "type", figures.received),
        ("messages_bad", "messages by what was wrong", "problem", figures.problems),
        ("messages_sent", "messages by type and ending", "type", figures.sent),
    ):
        yield _counter(name, text, (label,), {(key,): value for key, value in found.items()})
    clients: Values = {(key,): value for key, value in figures.clients.items()}
    yield _gauge("clients", "the clients' own counters, summed", ("figure",), clients)


def totals(figures: NodeFigures) -> dict[str, int | float]:
    """Every figure by its name, summed over ranks, other labels in braces."""
    found: dict[str, int | float] = {}
    for family in families(figures):
        for sample in family.samples:
            labels = {name: text for name, text in sample.labels.items() if name not in PER_RANK}
            inner = ",".join(f"{name}={text}" for name, text in sorted(labels.items()))
            name = sample.name + (f"{{{inner}}}" if inner else "")
            value = found.get(name, 0) + sample.value
            found[name] = int(value) if float(value).is_integer() and abs(value) < EXACT else value
    return found


class _Now(Collector):
    def __init__(self, figures: NodeFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        yield from families(self._figures)


def exposition(figures: NodeFigures) -> str:
    """The page that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Now(figures))
    return generate_latest(registry).decode()


def _counts(stats: Stats) -> Iterator[tuple[str, str, Counts]]:
    for rank, by_compiler in stats.ranks.items():
        for compiler, counts in by_compiler.items():
            yield rank, compiler, counts


def _each(stats: Stats, field: str) -> dict[tuple[str, ...], float]:
    return {(rank, compiler): getattr(counts, field) for rank, compiler, counts in _counts(stats)}


def _counter(name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
    family = CounterMetricFamily(f"prefetchd_{name}", text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
    family = GaugeMetricFamily(f"prefetchd_{name}", text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, float(value))
    return family
