"""An observer's sink that keeps what it is told, in order."""

from __future__ import annotations

from prefetchd.observer import Started
from prefetchd.protocol import Event
from prefetchd.shapelog import Record
from prefetchd.winners import Winner


class Told:
    def __init__(self) -> None:
        self.begun: list[Started] = []
        self.ended: list[int] = []
        self.hits: list[Started] = []
        self.records: list[Record] = []
        self.events: list[Event] = []
        self.winners: list[Winner] = []

    def began(self, started: Started) -> None:
        self.begun.append(started)

    def over(self, token: int) -> None:
        self.ended.append(token)

    def found(self, started: Started) -> None:
        self.hits.append(started)

    def record(self, record: Record) -> None:
        self.records.append(record)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def winner(self, winner: Winner) -> None:
        self.winners.append(winner)
