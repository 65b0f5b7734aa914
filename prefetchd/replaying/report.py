"""What a replay reports: of every record what became of it, of every refusal its reason."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from prefetchd.coverage import Problem, WinnerFigures


class Replayed(msgspec.Struct, kw_only=True):
    """What `replay --json` prints. `records` are variants, each counted once however many logs name it.

    Of these, `foreign` (made under another fingerprint or on another device, with no request that can be
    traced here), `engine_failed`, `planned` and `others` (`selection.Left`) are left alone and are no fault;
    `refused` ones cannot be replayed, for the reasons in `problems`. `variants` are the keys wanted here, by
    traces and from records: `present` in the cache before, `compiled`, or `failed`. `uncovered` counts
    requests that could not be traced, or still compile.
    """

    target: str
    logs: list[str] = []
    records: int = 0
    # Lines of the logs that are none, among them what a killed writer left.
    unreadable: int = 0
    foreign: int = 0
    engine_failed: int = 0
    planned: int = 0
    others: int = 0
    # Rebuilt from their record, and left out: candidates that lost to a winner which engines will find.
    rivals: int = 0
    refused: int = 0
    # Beyond what is replayed at a time, the cheapest; not even looked at.
    left_out: int = 0
    # Requests traced, and jobs made of a record alone.
    requests: int = 0
    rebuilt: int = 0
    variants: int = 0
    present: int = 0
    compiled: int = 0
    failed: int = 0
    uncovered: int = 0
    # Seconds that the engines spent on what is replayed.
    engine_s: float = 0.0
    winners: WinnerFigures | msgspec.UnsetType = msgspec.UNSET
    trace_s: float = 0.0
    compile_wall_s: float = 0.0
    compile_cpu_s: float = 0.0
    prove_s: float = 0.0
    problems: list[Problem] = []
    quarantined: list[str] = []
    notes: list[str] = []

    @property
    def complete(self) -> bool:
        """Whether everything that could be meant for this target is published now."""
        return not (self.refused or self.failed or self.uncovered or self.left_out)


def lines(replayed: Replayed) -> Iterator[str]:
    """The report for a person, problems left out."""
    yield (
        f"{replayed.records} records in {len(replayed.logs)} logs: {replayed.requests} requests traced, "
        f"{replayed.rebuilt} rebuilt from their record, {replayed.refused} refused"
    )
    left = {
        "of another fingerprint or device": replayed.foreign,
        "failed in the engine": replayed.engine_failed,
        "were ready": replayed.planned,
        "of other libraries": replayed.others,
        "lost to a known winner": replayed.rivals,
    }
    if any(left.values()):
        yield "left alone: " + ", ".join(f"{count} {what}" for what, count in left.items() if count)
    yield (
        f"{replayed.variants} variants: {replayed.present} in the cache, compiled {replayed.compiled}, "
        f"failed {replayed.failed}; {replayed.uncovered} records not covered"
    )
    if replayed.left_out:
        yield f"{replayed.left_out} records are left out: more than are replayed at a time"
    if replayed.unreadable:
        yield f"{replayed.unreadable} lines are no records"
    if figures := replayed.winners:
        yield f"winners: {figures.seeded} seeded now, {figures.present} there before"
    for note in replayed.notes:
        yield f"note: {note}"
    for path in replayed.quarantined:
        yield f"quarantined a corrupt entry: {path}"
