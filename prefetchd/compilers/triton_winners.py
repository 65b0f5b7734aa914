"""Asking Triton's own tuner objects what they look for, and hearing in an engine what they found.

In a traced process (`triton_capture.py`) every tuner that would look for a persisted result passes through
`Tunings.choose`: the question is noted, with the file in which the engine's library will look for the answer,
and the candidates to visit are those the engine will use. In an engine `record_winners` passes on what was
measured, where the library tells.

The subtle rule: the file's name is a digest over the library's code, the compiler's version, the kernel's
source, the key and every candidate. It is never computed here: the library's own look-up runs up to the point
where it would open the file, in a second copy of its module, since the one in use is guarded on the null
device against reading and writing results.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec

from prefetchd.compilers.triton_cache import key_of
from prefetchd.compilers.triton_results import Answers
from prefetchd.config import NULL_VARIABLE
from prefetchd.winners import Configuration, Tuning, Winner, configuration

FLA_TUNERS = "fla.ops.utils.cache"
# What a candidate consists of beside the function that no file can hold.
NOT_IN_FILES = "pre_hook"


class Tunings:
    """Every tuning met, each once, kept in a file as well: a successor of a crashed trace goes on."""

    def __init__(self, path: Path, answers: Answers) -> None:
        self._path = path
        self._answers = answers
        self._met: dict[tuple[str, ...], Tuning] = {}
        # The last line may be half a record: a crash came while it was written.
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
            self._add(msgspec.json.decode(line, type=Tuning))

    def choose(self, tuner: Any, key: tuple[Any, ...], candidates: Sequence[Any]) -> Sequence[Any]:
        """See `triton_capture.Winners`."""
        tuning = sighting(tuner, key, candidates)
        if tuning is None:
            return candidates
        if self._add(tuning):
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(tuning) + b"\n")
        index = self._answers.choose(tuning)
        return candidates if index is None else [candidates[index]]

    def all(self) -> list[Tuning]:
        """In the order of first sight."""
        return list(self._met.values())

    def _add(self, tuning: Tuning) -> bool:
        new = tuning.identity not in self._met
        self._met.setdefault(tuning.identity, tuning)
        return new


def sighting(tuner: Any, key: tuple[Any, ...], candidates: Sequence[Any]) -> Tuning | None:
    """The question that `triton_capture.Tuner` asks; None if its key cannot be written into any file."""
    import triton

    described = [_fields(candidate) for candidate in candidates]
    try:
        # As the library would write it, and as it comes back.
        key_on_disk = json.loads(json.dumps(key))
        fields_on_disk = json.loads(json.dumps(described))
        for fields in fields_on_disk:
            configuration(fields)
    except (TypeError, ValueError):
        return None
    return Tuning(
        triton=triton.__version__,
        module=tuner.module,
        kernel=tuner.name,
        source=tuner.source,
        key=key_on_disk,
        candidates=fields_on_disk,
        entry=result_entry(tuner.library_object, key, candidates),
        kept=tuner.kept,
        fla_entry=_fla_entry(tuner.library_object, key),
        names=tuple(map(str, getattr(tuner.library_object, "keys", ()))),
    )


def result_entry(tuner: Any, key: tuple[Any, ...], candidates: Sequence[Any]) -> str:
    """The file in which the library looks for this tuning's result, below its root; empty if in none."""
    library = _second_copy()
    found: list[str] = []

    def open_cache(digest: str) -> _Probe:
        return _Probe(digest, found)

    vars(library)["get_cache_manager"] = open_cache
    with contextlib.suppress(_Stopped):
        library.Autotuner.check_disk_cache(tuner, key, candidates, _stop)
    return found[0] if found else ""


class _Stopped(Exception):
    """Ends the library's look-up before it opens, measures or writes anything."""


def _stop() -> NoReturn:
    """In place of measuring: the library has decided that this tuning has no file."""
    raise _Stopped


class _Probe:
    """In place of the cache directory in which the library wants to look."""

    def __init__(self, digest: str, found: list[str]) -> None:
        self._digest, self._found = digest, found

    def get_file(self, name: str) -> NoReturn:
        self._found.append(f"{key_of(self._digest)}/{name}")
        raise _Stopped


@cache
def _second_copy() -> ModuleType:
    """The library's tuner module once more, by its own file, under a name that nobody imports."""
    from triton.runtime import autotuner

    name = f"{autotuner.__package__}._prefetchd_autotuner"
    spec = importlib.util.spec_from_file_location(name, autotuner.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fields(candidate: Any) -> dict[str, Any]:
    fields = dict(vars(candidate))
    if NOT_IN_FILES in fields:
        fields[NOT_IN_FILES] = None
    return fields


def _fla_entry(tuner: Any, key: tuple[Any, ...]) -> str:
    """fla's name for the key, if this is a tuner of fla's that looks into a configuration directory."""
    fla = sys.modules.get(FLA_TUNERS)
    if fla is None or not isinstance(tuner, getattr(fla, "CachedAutotuner", ())):
        return ""
    return str(fla.AutotuneKey.key_hash(key))


def record_winners(sink: Callable[[Winner], None]) -> bool:
    """In an engine: `sink` gets every winner that a tuner measures or reads, from now on.

    False where the library does not tell (Triton before 3.8), and on the null device, whose timings are made
    up. Nothing raises into the engine, whatever `sink` does; a listener that is set already is called first.
    """
    try:
        return os.environ.get(NULL_VARIABLE) != "1" and _listen(sink)
    except Exception:
        return False


def _listen(sink: Callable[[Winner], None]) -> bool:
    from triton import knobs

    autotuning = getattr(knobs, "autotuning", None)
    if autotuning is None or not hasattr(autotuning, "listener"):
        return False
    previous = autotuning.listener

    def listener(**known: Any) -> None:
        if previous is not None:
            previous(**known)
        try:
            winner = heard(known)
            if winner is not None:
                sink(winner)
        except Exception:
            # The engine's call goes on; what is not recorded is measured again elsewhere.
            return

    autotuning.listener = listener
    return True


def heard(known: Mapping[str, Any]) -> Winner | None:
    """The winner in what the library tells its listener; None for one that no file could hold."""
    import torch
    import triton

    best, function = known["best_config"], known["fn"]
    timing = known["configs_timings"][best]
    if getattr(best, NOT_IN_FILES, None) is not None or not all(each < float("inf") for each in timing):
        return None
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Winner(
        gpu=device.name,
        sm_count=device.multi_processor_count,
        triton=triton.__version__,
        module=function.fn.__module__,
        kernel=function.fn.__qualname__,
        source=function.cache_key,
        key=json.loads(json.dumps(known["key"])),
        config=_configuration(best),
        timing_ms=[float(each) for each in timing],
        origin="heard in the engine",
    )


def _configuration(candidate: Any) -> Configuration:
    return configuration(json.loads(json.dumps(_fields(candidate))))
