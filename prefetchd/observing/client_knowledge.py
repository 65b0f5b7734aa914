"""What this process knows of its daemon: what its client has heard and its planner has asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prefetchd.client import Client
from prefetchd.planner import Planner
from prefetchd.protocol import MalformedRequest, request_from_fields


class ClientKnowledge:
    """See `knowledge.Knowledge`. An engine that was only announced has no planner and asked for nothing."""

    def __init__(self, client: Client, planner: Callable[[], Planner | None]) -> None:
        self._client, self._planner = client, planner

    def reachable(self) -> bool:
        """Whether the daemon has welcomed us and speaks."""
        session = self._client.session
        return session is not None and session.answers

    def published(self, compiler: str, key: str) -> bool:
        """As the daemon has said."""
        return self._client.is_published(compiler, key)

    def asked(self, request: Mapping[str, Any]) -> bool:
        """Whether a plan of this process, or the universe it named, holds the request."""
        planner = self._planner()
        if planner is None:
            return False
        try:
            return planner.asked(request_from_fields(request))
        except (MalformedRequest, TypeError):
            return False

    def mismatched(self) -> bool:
        """Whether it has said so of any field."""
        return self._client.stats().get("mismatches", 0) > 0
