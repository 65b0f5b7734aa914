"""Autotune winners: what a tuner's measurement came to, for whom that is true, and how it is kept.

A tuner compiles and benchmarks every candidate configuration the first time it meets a tuning key. Who knows
the outcome needs to compile one kernel instead of many and to measure nothing. This module is the knowledge:
the record, its file of one JSON line each, merging, and the judgement whether a record answers a tuner. It
imports no library and touches no cache; `compilers/triton_results.py` does.

The subtle rule: a winner is a *measurement*, so it is valid where it was measured and nowhere else: on this
GPU model with this number of SMs, for this Triton, kernel source and tuning key, and only while the tuner
still has the configuration among its candidates. Everything else is reported with its reason and not used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from prefetchd.nesting import is_deeper
from prefetchd.targets import Target

WINNER_VERSION = 1
# A record is about 600 bytes; a line beyond this is not one of ours.
MAX_LINE_BYTES = 1 << 16
# A model has some hundred tunings; a file far beyond that would be read by each daemon and each engine.
MAX_FILE_BYTES = 16 << 20
# Lines that are no winners, told one by one.
MAX_PROBLEMS = 100
# Of a key or a configuration, which are lists of numbers and names.
MAX_DEPTH = 16
# fla's own kernels; copies of them in engines need not treat results as fla does.
FLA_MODULES = "fla."

Name = Annotated[str, msgspec.Meta(min_length=1)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class WinnersUnreadable(Exception):
    """A file of winners cannot be read or written at all; the text names it, the reason and the fix."""


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """What a tuner varies, by Triton's names and with its defaults. A field not known here is ignored."""

    kwargs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    ir_override: str | None = None


class Winner(msgspec.Struct, frozen=True, kw_only=True):
    """One measured outcome. All fields up to `key` are what it is valid for."""

    version: int = WINNER_VERSION
    # As the driver names it, such as "NVIDIA H200".
    gpu: Name
    sm_count: Positive
    triton: Name
    module: Name
    kernel: Name
    # The library's own digest of the kernel's source and of all it calls.
    source: Name
    # The library's tuning key: the values of the arguments it names, and every tensor's dtype.
    key: list[Any]
    config: Configuration
    # As the library keeps it: the median, then the quantiles it asks for.
    timing_ms: Annotated[list[Milliseconds], msgspec.Meta(min_length=1)]
    # Where it was read or heard, for people.
    origin: str = ""

    @property
    def identity(self) -> tuple[str | int, ...]:
        """What it is valid for, to compare and to look up."""
        return (self.gpu, self.sm_count, self.triton, *_question(self))


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """A question that a tuner asks: which of these candidates, for this kernel and key?"""

    triton: str
    module: str
    kernel: str
    source: str
    key: list[Any]
    # Each as the library writes it into a result file; in the tuner's order.
    candidates: list[dict[str, Any]]
    # The result file below the library's cache root, "directory/file"; empty where it can keep none.
    entry: str = ""
    # Whether the kernel itself asks the library to keep results, whatever the environment says.
    kept: bool = False
    # fla's own name for the key, where the tuner would look into fla's configuration directory too.
    fla_entry: str = ""
    # The arguments whose values the key begins with, where each of them is in it.
    names: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[str, ...]:
        """Two sightings with the same identity are the same question."""
        return (self.entry, *_question(self), *map(canonical, self.candidates))


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace is told: the winners at hand, and which results the engine will read.

    Triton reads a result where the kernel or `TRITON_CACHE_AUTOTUNING` asks for it, fla unless
    `FLA_CACHE_RESULTS` is not 1. Where none is read the engine measures every candidate in every process, so
    all of them must be compiled, whatever is known.
    """

    winners: tuple[Winner, ...] = ()
    # Whether a known winner's rivals are left out.
    winners_only: bool = False
    triton_keeps: bool = False
    fla_keeps: bool = True
    # The FLA_CONFIG_DIR of an engine with FLA_CACHE_MODE=strict; empty when it has none.
    fla_config_dir: str = ""

    def reads(self, tuning: Tuning) -> bool:
        """Whether the engine will look for a result of this tuning, anywhere."""
        if self.fla_config_dir and tuning.fla_entry:
            return True
        if not tuning.entry:
            return False
        # On the null device fla is told to keep nothing, so its kernels' own wish says nothing.
        asked = self.fla_keeps if tuning.module.startswith(FLA_MODULES) else tuning.kept
        return self.triton_keeps or asked


class Verdict(StrEnum):
    """Whether a winner answers a tuning, and if not, why."""

    KNOWN = "known"
    # Nobody has measured this.
    MISSING = "missing"
    # Measured, but the tuner no longer has that configuration (or cannot tell it from another).
    DROPPED = "dropped"
    # Measured on another GPU model.
    REFUSED = "refused"
    # Measured for another Triton or another source of this kernel.
    OUTDATED = "outdated"


class Known:
    """The winners at hand, as seen from one device."""

    def __init__(self, winners: Iterable[Winner], target: Target) -> None:
        self._device = (target.name, target.sm_count)
        self._valid: dict[tuple[str | int, ...], Winner] = {}
        # Of what is valid elsewhere only the names are needed, to say why it is not used.
        self._elsewhere: dict[tuple[str, ...], str] = {}
        self._outdated: set[tuple[str, str, str]] = set()
        for winner in merge(winners):
            if (winner.gpu, winner.sm_count) == self._device:
                self._valid[winner.identity] = winner
                self._outdated.add(_loosely(winner))
            else:
                self._elsewhere.setdefault(
                    (winner.triton, *_question(winner)), f"{winner.gpu} ({winner.sm_count} SMs)"
                )

    def judge(self, tuning: Tuning) -> tuple[Verdict, Winner | None]:
        """The verdict, with the winner if it is known."""
        question = (tuning.triton, *_question(tuning))
        winner = self._valid.get((*self._device, *question))
        if winner is not None:
            if index_of(winner.config, tuning.candidates) is None:
                return Verdict.DROPPED, None
            return Verdict.KNOWN, winner
        if question in self._elsewhere:
            return Verdict.REFUSED, None
        return (Verdict.OUTDATED if _loosely(tuning) in self._outdated else Verdict.MISSING), None

    def measured_on(self, tuning: Tuning) -> str:
        """The device on which a refused winner was measured."""
        return self._elsewhere[(tuning.triton, *_question(tuning))]


def configuration(fields: Mapping[str, Any]) -> Configuration:
    """From a result file's or a tuner's own fields. Raises `msgspec.ValidationError`."""
    return msgspec.convert(dict(fields), Configuration)


def index_of(config: Configuration, candidates: Sequence[Mapping[str, Any]]) -> int | None:
    """Where the configuration stands among the candidates; None unless it is there exactly once."""
    wanted = canonical(config)
    found = [index for index, fields in enumerate(candidates) if canonical(configuration(fields)) == wanted]
    return found[0] if len(found) == 1 else None


def canonical(value: Any) -> str:
    """A text that is equal for equal values only: Python holds True and 1 for equal, a tuner does not."""
    return msgspec.json.encode(value, order="sorted").decode()


def merge(*groups: Iterable[Winner]) -> list[Winner]:
    """Each question answered once, by the fastest measurement, in whatever order the groups come."""
    best: dict[tuple[str | int, ...], Winner] = {}
    for winner in (winner for group in groups for winner in group):
        other = best.get(winner.identity)
        if other is None or _rank(winner) < _rank(other):
            best[winner.identity] = winner
    return sorted(best.values(), key=lambda winner: canonical(list(winner.identity)))


def encode_winner(winner: Winner) -> bytes:
    """One line, with its newline. Raises `ValueError` for a timing that no measurement gives."""
    if not all(map(math.isfinite, winner.timing_ms)):
        raise ValueError(f"winner of {winner.module}.{winner.kernel}: timing_ms = {winner.timing_ms}")
    return msgspec.json.encode(winner) + b"\n"


def decode_winner(line: bytes) -> Winner:
    """The winner of one line; a newer version is read as far as it is known. Raises `ValueError`."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"line of {len(line)} bytes, more than {MAX_LINE_BYTES}")
    try:
        winner = msgspec.json.decode(line, type=Winner)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    for field, value in (("key", winner.key), ("config.kwargs", winner.config.kwargs)):
        if is_deeper(value, MAX_DEPTH):
            raise ValueError(f"{field}: nested deeper than {MAX_DEPTH} levels; not a winner of ours")
    return winner


def read_winners(path: Path) -> tuple[list[Winner], list[str]]:
    """The file's winners, and texts on the lines that are none. Raises `WinnersUnreadable`.

    Whatever the file is, no more of it is read than `MAX_FILE_BYTES`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise WinnersUnreadable(
            f"{path}: {error.strerror}; name a file that `prefetchd winners collect --out` wrote"
        ) from error
    winners, problems, unread = [], [], 0
    for number, line in enumerate(data[:MAX_FILE_BYTES].splitlines(), 1):
        if line.strip():
            try:
                winners.append(decode_winner(line))
            except ValueError as error:
                unread += 1
                if unread <= MAX_PROBLEMS:
                    problems.append(f"{path}:{number}: not a winner, skipped: {error}")
    if unread > MAX_PROBLEMS:
        problems.append(f"{path}: {unread} lines in all are no winners")
    if len(data) > MAX_FILE_BYTES:
        problems.append(
            f"{path}: only its first {MAX_FILE_BYTES >> 20} MiB are read; remove it, or what is old"
        )
    return winners, problems


def append_winners(path: Path, winners: Iterable[Winner], known: set[str] | None = None) -> int:
    """Adds those the file does not have yet and says how many; what is in it stays. Raises
    `WinnersUnreadable`. Who adds often hands in what it knows to be in the file, which is not read then.
    """
    have = known_in(path) if known is None else known
    new = [winner for winner in merge(winners) if canonical(winner) not in have]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(file, "r+b", buffering=0) as out:
            data = _line_end(out.fileno()) + b"".join(map(encode_winner, new))
            if os.fstat(file).st_size + len(data) > MAX_FILE_BYTES:
                raise WinnersUnreadable(
                    f"{path}: has reached {MAX_FILE_BYTES >> 20} MiB; remove it, or what is old in it"
                )
            out.write(data)
            os.fsync(file)
    except OSError as error:
        raise WinnersUnreadable(f"{path}: cannot be written: {error.strerror}; name another file") from error
    have.update(map(canonical, new))
    return len(new)


def known_in(path: Path) -> set[str]:
    """What `append_winners` need not add. Raises `WinnersUnreadable`."""
    return {canonical(winner) for winner in (read_winners(path)[0] if path.exists() else ())}


def _line_end(file: int) -> bytes:
    """What ends a last line that a killed writer left open."""
    size = os.fstat(file).st_size
    return b"" if size == 0 or os.pread(file, 1, size - 1) == b"\n" else b"\n"


def _question(of: Winner | Tuning) -> tuple[str, str, str, str]:
    return (of.module, of.kernel, of.source, canonical(of.key))


def _loosely(of: Winner | Tuning) -> tuple[str, str, str]:
    return (of.module, of.kernel, canonical(of.key))


def _rank(winner: Winner) -> tuple[list[float], str]:
    return winner.timing_ms, canonical(winner)
