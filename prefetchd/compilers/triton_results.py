"""The files from which an engine's tuners take a result instead of measuring, read and written.

Triton keeps one file a tuning, `<root>/<digest>/<kernel>.autotune.json`, and takes the entry with the
smallest timing. It says neither which kernel source nor which GPU it is about, and it is believed without a
check. So a file counts only where a traced tuner, asked by its own code (`triton_winners.py`), would look it
up, and one is written only from a measured winner for the target at hand, and never over an existing one: it
appears by `link`, whole. fla has a directory of its own beside it, one file a kernel, which names Triton's
version and no GPU.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.compilers.triton_cache import digest_of
from prefetchd.store import StoreUnwritable, private_directory
from prefetchd.targets import Target
from prefetchd.winners import (
    Configuration,
    Given,
    Known,
    Tuning,
    Verdict,
    Winner,
    canonical,
    configuration,
    index_of,
)

RESULT_SUFFIX = ".autotune.json"
CACHE_VARIABLE = "TRITON_CACHE_DIR"
# The library accepts these texts in capitals too.
TRUE = ("1", "true", "on", "yes", "y")
# Candidates number hundreds at most, at 200 bytes each; a file beyond this is no result.
MAX_RESULT_BYTES = 4 << 20


def given_for(
    environment: Mapping[str, str],
    winners: tuple[Winner, ...] | None,
    fla_config_dir: Path | None = None,
) -> Given:
    """For an engine with this environment; None for winners means that all candidates are wanted."""
    return Given(
        winners=winners or (),
        winners_only=winners is not None,
        triton_keeps=environment.get("TRITON_CACHE_AUTOTUNING", "").lower() in TRUE,
        fla_keeps=environment.get("FLA_CACHE_RESULTS", "1") == "1",
        fla_config_dir=str(fla_config_dir or ""),
    )


class ResultDamaged(Exception):
    """A result file that an engine would take, or fail on, and that is no measurement; the text says why."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a tuning: the verdict, the candidate's index if there is one, and from where."""

    verdict: Verdict
    index: int | None = None
    # The measured winner at hand; None where the engine's own files answered.
    winner: Winner | None = None
    # Whether the engine's own files answer already, so that nothing needs to be written.
    present: bool = False
    # What a person should know: a damaged file, the device a refused winner was measured on.
    text: str = ""


class Answers:
    """Answers tunings as the engine's tuner will: from its own files first, then from winners at hand."""

    def __init__(self, given: Given, target: Target, root: Path) -> None:
        self.given = given
        self._known = Known(given.winners, target)
        self._root = root

    def answer(self, tuning: Tuning) -> Answer:
        """See the class. Raises nothing for files that are absent or damaged."""
        try:
            index = self._own(tuning)
        except ResultDamaged as error:
            # What is in the way is not ours to remove, and nothing can be seeded beside it.
            return Answer(verdict=Verdict.MISSING, text=str(error))
        if index is not None:
            return Answer(verdict=Verdict.KNOWN, index=index, present=True)
        verdict, winner = self._known.judge(tuning)
        text = ""
        if verdict is Verdict.REFUSED:
            text = f"measured on {self._known.measured_on(tuning)}, not on this target: not used"
        index = None if winner is None else index_of(winner.config, tuning.candidates)
        return Answer(verdict=verdict, index=index, winner=winner, text=text)

    def choose(self, tuning: Tuning) -> int | None:
        """The only candidate that an engine will use, as far as is known; None for all of them."""
        if not self.given.winners_only or not self.given.reads(tuning):
            return None
        return self.answer(tuning).index

    def _own(self, tuning: Tuning) -> int | None:
        """The candidate that the engine's files name, in the order in which it asks them."""
        config = None
        if self.given.fla_config_dir and tuning.fla_entry:
            config = read_fla(Path(self.given.fla_config_dir), tuning)
        if config is None:
            result = read_result(self._root, tuning)
            return None if result is None else result[0]
        return candidate_of(config, tuning, self.given.fla_config_dir)


def result_path(root: Path, tuning: Tuning) -> Path:
    """Where the engine's library looks. Raises `ValueError` for an entry that is no path of its cache."""
    directory, _, file = tuning.entry.partition("/")
    digest_of(directory)
    if "/" in file or not file.endswith(RESULT_SUFFIX):
        raise ValueError(f"{tuning.entry!r} is no result file of Triton's")
    return root / directory / file


def candidate_of(config: Configuration, tuning: Tuning, file: Path | str) -> int:
    """Its index among the candidates. Raises `ResultDamaged` for one of another tuner."""
    index = index_of(config, tuning.candidates)
    if index is None:
        raise ResultDamaged(
            f"{file}: names a configuration that {tuning.module}.{tuning.kernel} does not have, so it is "
            "not used; remove it, as an engine would believe it"
        )
    return index


def read_result(root: Path, tuning: Tuning) -> tuple[int, list[float]] | None:
    """The candidate that the engine's library finds best, and its timing; None if it finds no result.

    Raises `ResultDamaged` for a file that is there and is no result of this tuning.
    """
    if not tuning.entry:
        return None
    path = result_path(root, tuning)
    try:
        found = _read_json(path)
        if found is None:
            return None
        if canonical(found["key"]) != canonical(tuning.key):
            raise ValueError(f"it is for the key {found['key']}, the tuner asks for {tuning.key}")
        # The library compares the lists as they are; the first of equals wins.
        fields, timing = min(found["configs_timings"], key=lambda entry: entry[1])
        timing = [float(each) for each in timing]
        if not timing or not all(map(math.isfinite, timing)):
            raise ValueError("no configuration in it could be measured")
        config = configuration(fields)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ResultDamaged(
            f"{path}: not a tuner's result, skipped ({type(error).__name__}: {error}); an engine that reads "
            "it may fail: remove it"
        ) from error
    return candidate_of(config, tuning, path), timing


def seed_result(root: Path, tuning: Tuning, winner: Winner) -> bool:
    """Writes the library's result file with the winner as its one entry; False if a file is there already.

    Raises `StoreUnwritable`. The caller has judged the winner; one that is no candidate is a `ValueError`.
    """
    index = index_of(winner.config, tuning.candidates)
    if index is None:
        raise ValueError(f"{winner.config} is none of the candidates of {tuning.module}.{tuning.kernel}")
    entry = [tuning.candidates[index], winner.timing_ms]
    text = json.dumps({"key": tuning.key, "configs_timings": [entry]})
    path = result_path(root, tuning)
    try:
        with _written(private_directory(root), text) as draft:
            path.parent.mkdir(exist_ok=True)
            return _link(draft, path)
    except OSError as error:
        raise StoreUnwritable(root, CACHE_VARIABLE, error) from error


def read_fla(directory: Path, tuning: Tuning) -> Configuration | None:
    """What fla finds for this tuning in strict mode. Raises `ResultDamaged`."""
    path = _fla_path(directory, tuning)
    try:
        found = _read_json(path)
        entry = (found or {}).get("autotune_entries", {}).get(tuning.fla_entry)
        return None if entry is None else configuration(entry["config"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResultDamaged(
            f"{path}: not a configuration file of fla's, skipped ({type(error).__name__}: {error})"
        ) from error


def seed_fla(directory: Path, tuning: Tuning, winner: Winner) -> bool:
    """Adds the winner to fla's file of its kernel; False if the file has this tuning already.

    Raises `StoreUnwritable`, and `ResultDamaged` for a file that is not fla's. Two that add at the same time
    may lose one addition, never the file.
    """
    if read_fla(directory, tuning) is not None:
        return False
    path = _fla_path(directory, tuning)
    known = _read_json(path) or {
        "kernel_name": tuning.kernel,
        "triton_version": tuning.triton,
        "autotune_entries": {},
        "default_config": None,
    }
    known.setdefault("autotune_entries", {})[tuning.fla_entry] = {
        "autotune_key": tuning.key,
        "config": msgspec.to_builtins(winner.config),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _written(directory, json.dumps(known, indent=1)) as draft:
            draft.replace(path)
    except OSError as error:
        raise StoreUnwritable(directory, "--fla-config-dir", error) from error
    return True


def _fla_path(directory: Path, tuning: Tuning) -> Path:
    return directory / f"{tuning.kernel}.json"


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, None if there is no file; with the library's own parser, as it holds Infinity."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RESULT_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(error.strerror) from error
    if len(data) > MAX_RESULT_BYTES:
        raise ValueError(f"larger than {MAX_RESULT_BYTES} bytes")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise TypeError(f"holds a {type(found).__name__}, not an object")
    return found


class _written:
    """A finished file under a name that nobody looks for, gone when the block ends unless it was moved."""

    def __init__(self, directory: Path, text: str) -> None:
        self._directory, self._text = directory, text

    def __enter__(self) -> Path:
        file, name = tempfile.mkstemp(prefix=".winner-", dir=self._directory)
        self._draft = Path(name)
        with os.fdopen(file, "w", encoding="utf-8") as out:
            out.write(self._text)
            out.flush()
            os.fsync(file)
        # Whoever may read the cache must be able to read this; mkstemp lets its owner alone.
        self._draft.chmod(0o644)
        return self._draft

    def __exit__(self, *_: object) -> None:
        self._draft.unlink(missing_ok=True)


def _link(draft: Path, final: Path) -> bool:
    try:
        os.link(draft, final)
    except FileExistsError:
        return False
    return True
