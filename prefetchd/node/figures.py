"""The daemon's figures, gathered when somebody asks: for the metrics page, probes and `stats`."""

from __future__ import annotations

import os
from collections import Counter
from http import HTTPStatus
from typing import Any

import msgspec

from prefetchd.metrics import HelperFigures, NodeFigures, exposition, totals
from prefetchd.node.helpers import Helper, rss_bytes
from prefetchd.node.http import Page
from prefetchd.node.state import Node
from prefetchd.node.works import Works
from prefetchd.protocol import Stats

METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
# Rows of a table in a Stats message: enough for a node, and far below the largest message.
MAX_ROWS = 256
MAX_PROBLEMS = 8
# What a Stats message may hold (`messages.Figures`).
MAX_FIGURES, MAX_NAME = 1024, 1024
# The counters that our client sends with its heartbeats; others would be names of a stranger's choosing.
CLIENT_FIGURES = frozenset({
    "queued", "dropped", "wanted", "forgotten", "published", "errors", "connects", "disconnects", "restarts",
    "received", "sent", "stuck", "malformed", "unknown", "unexpected", "refused", "mismatches",
})  # fmt: skip


class Figures:
    """What is known of a node at any moment."""

    def __init__(self, node: Node, works: Works) -> None:
        self._node = node
        self._works = works

    def now(self) -> NodeFigures:
        """All of it."""
        node = self._node
        clients: Counter[str] = Counter()
        for peer in node.peers:
            clients.update({name: value for name, value in peer.figures.items() if name in CLIENT_FIGURES})
        return NodeFigures(
            broker=node.broker.stats(),
            helpers=[
                self._helper(group.helper, tuple(sorted(group.ranks)), group.providers)
                for group in node.groups.by_name.values()
            ],
            uptime_s=node.clock() - node.begun,
            ready=node.ready,
            peers=len(node.peers),
            slots=self._works.slots,
            rss_bytes=rss_bytes(os.getpid()),
            compile_cpu_s=node.compiles.cpu_seconds,
            quarantined=node.compiles.quarantined,
            received=dict(node.received),
            problems=dict(node.problems),
            sent=dict(node.sent),
            log_suppressed=node.log.suppressed,
            refused_roots=dict(node.refused_roots),
            clients=dict(clients),
        )

    def message(self, id: int) -> Stats:
        """The answer to a tool."""
        figures = self.now()
        helpers = [msgspec.to_builtins(helper) for helper in figures.helpers[:MAX_ROWS]]
        tables: dict[str, Any] = {
            "ranks": [self._rank(name) for name in list(self._node.peers.ranks())[:MAX_ROWS]],
            "accounts": dict(list(msgspec.to_builtins(figures.broker.ranks).items())[:MAX_ROWS]),
            "helpers": helpers,
            "problems": figures.broker.problems[-MAX_PROBLEMS:],
            "replay": dict(self._node.replayed),
            "mismatches": dict(list(figures.broker.mismatches.items())[:MAX_ROWS]),
        }
        named = {name[:MAX_NAME]: value for name, value in totals(figures).items()}
        bounded = dict(list(named.items())[:MAX_FIGURES])
        return Stats(id=id, instance=self._node.instance, figures=bounded, tables=tables)

    def metrics_page(self) -> Page:
        """`/metrics`."""
        return Page(HTTPStatus.OK, exposition(self.now()), METRICS_KIND)

    def ready_page(self) -> Page:
        """`/ready`: whether everything that could be known ahead is published, else what is left."""
        return Page(HTTPStatus.OK if self._node.ready else HTTPStatus.SERVICE_UNAVAILABLE, self.left())

    def health_page(self) -> Page:
        """`/healthz`: the loop turns."""
        return Page(HTTPStatus.OK, "ok\n")

    def left(self) -> str:
        """What is still to be done, one figure a line, and why something cannot be."""
        figures = self.now()
        stats = figures.broker
        lines = [
            f"ready: {'yes' if figures.ready else 'no'}",
            f"ranks attached: {stats.attached}",
            f"to trace: {sum(stats.trace_depth.values())} (and {stats.tracing} under way)",
            f"to compile: {sum(stats.job_depth.values())} (and {stats.compiling} under way)",
            f"to publish: {sum(stats.publish_depth.values())} (and {stats.publishing} under way)",
            f"failed: {stats.failed_keys}",
        ]
        lines += [f"{helper.name}: {helper.problem}" for helper in figures.helpers if helper.problem]
        return "\n".join(lines) + "\n"

    def _helper(self, helper: Helper, ranks: tuple[str, ...], providers: tuple[str, ...]) -> HelperFigures:
        return HelperFigures(
            name=helper.name,
            state=helper.state,
            pid=helper.pid,
            ranks=ranks,
            providers=providers,
            traces=helper.traces,
            restarts=helper.restarts,
            recycled=helper.recycled,
            rss_bytes=helper.rss_bytes,
            problem=helper.problem,
        )

    def _rank(self, name: str) -> dict[str, Any]:
        peer = self._node.peers.of_rank(name)
        group = self._node.group_of(peer) if peer else None
        if peer is None or group is None:
            return {"rank": name}
        return {
            "rank": name,
            "pid": peer.hello.pid,
            "target": group.target.name,
            "helper": group.name,
            "roots": sorted(group.roots.get(name, ())),
            "silent_s": round(self._node.clock() - peer.heard, 1),
            "open_plans": len(peer.plans),
        }
