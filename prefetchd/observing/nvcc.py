"""What nvcc compiles for this engine: DeepGEMM's kernels with the calls that needed them, others by name.

A deep_gemm call that finds the stand-in's word changed (`deep_gemm_calls.py`) leaves what it knows; the rest
(reading the spool, finding the entry that appeared in the library's cache, digests) is done on the recorder's
thread. What no call announces (another library's nvcc, a call that two threads may have made, a compile that
hangs) is looked for every second.

The subtle rule: nothing is guessed from times. An entry belongs to a compile if its source is the compile's
source, to the byte; a call belongs to it if no other call was going on.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.compilers.deep_jit import DeepJit
from prefetchd.compilers.deep_jit_payload import Payload, observed_payload
from prefetchd.compilers.nvcc import Nvcc, find_nvcc
from prefetchd.config import STAND_IN_SPOOL_VARIABLE
from prefetchd.observing.deep_gemm_calls import Call, Cells, Wrappers, anyone_inside
from prefetchd.observing.deep_gemm_keys import find_entry, key_parts
from prefetchd.observing.deep_gemm_requests import Library, describe_call, request_of_call
from prefetchd.observing.nvcc_variables import COMPILER_VARIABLES, stand_in_variables
from prefetchd.observing.spool import Run, Spool, spool_base

if TYPE_CHECKING:
    from prefetchd.observer import Observer
    from prefetchd.observing.recorder import Recorder

log = logging.getLogger("prefetchd")

PROVIDER = "deep_gemm"
# The compiler of what is not DeepGEMM's.
OTHERS = "nvcc"
# A compile that still runs then is announced: most take longer, and none should hang unannounced.
ANNOUNCE_AFTER_S = 1.0
# What ended longer before the call's own end, or before its next compile, was not this call's: a library's
# work between two compiles and after the last takes milliseconds.
GAP_S = 2.0


class Told(NamedTuple):
    """What a call said of the compiles in it."""

    op: str
    request: dict[str, Any] | None
    description: str
    site: str


class NvccAdaptor:
    """Observes the nvcc runs of this process; deep_gemm packages are given to `wrap` as they are imported."""

    name = DeepJit.name

    def __init__(self, recorder: Recorder, environment: Mapping[str, str] | None = None) -> None:
        self._recorder = recorder
        self._environment = os.environ if environment is None else environment
        self._observer: Observer | None = None
        self._spool: Spool | None = None
        self._cells: Cells | None = None
        self._wrappers: list[Wrappers] = []
        # Announced compiles that had not ended, by their name in the spool.
        self._tokens: dict[str, int] = {}
        self._ticking = False

    def install(self, observer: Observer) -> None:
        """Makes the spool and names it to children. Raises `SpoolUnusable`, `NotObservable`."""
        variables = stand_in_variables(self._environment)
        self._spool = Spool(spool_base(self._environment))
        self._cells = Cells(self._spool.word)
        self._observer = observer
        os.environ.update({**variables, STAND_IN_SPOOL_VARIABLE: str(self._spool.directory)})
        if not self._ticking:
            self._ticking = True
            self._recorder.every_second(self._look)

    def wrap(self, module: Any) -> None:
        """Puts wrappers round a deep_gemm package's entry points."""
        if self._cells is not None:
            self._wrappers.append(Wrappers(module, self._cells, self._changed))

    def remove(self) -> None:
        """Takes the wrappers off; the stand-in finds no spool and just runs nvcc."""
        for wrappers in self._wrappers:
            wrappers.remove()
        self._wrappers, self._observer = [], None
        os.environ.pop(STAND_IN_SPOOL_VARIABLE, None)
        if self._spool is not None:
            self._spool.close()

    def forget_parent(self) -> None:
        """In a forked child: a spool of its own."""
        if self._observer is None or self._spool is None or self._cells is None:
            return
        self._spool.leave_to_parent()
        self._tokens = {}
        try:
            self._spool = Spool(self._spool.directory.parent)
        except Exception as error:
            self._disable(error)
            return
        self._cells.renew(self._spool.word)
        os.environ[STAND_IN_SPOOL_VARIABLE] = str(self._spool.directory)

    def _changed(self, call: Call, failing: bool) -> None:
        """On the engine's thread, after a call in which the word changed."""
        observer = self._observer
        if observer is None:
            return
        try:
            ended = self._ended_here()
            if not ended:
                return
            told = None if call.ambiguous else self._told(call)
            now = time.time()
            if observer.on_compile != "error":
                self._recorder.submit(lambda: self._join(ended, told, now))
                return
            # Who asked for an exception can wait for it.
            self._join(ended, told, now)
        except Exception as error:
            self._disable(error)
            return
        if not failing:
            observer.enforce()

    def _ended_here(self) -> list[str]:
        """The compiles of the call that has just returned, as far as anybody can say."""
        spool, cells = self._spool, self._cells
        if spool is None or cells is None:
            return []
        now = cells.word[0]
        ended = spool.finished()
        if not spool.unfinished():
            # Else somebody's compile still runs, and its own call must find the word changed.
            cells.seen = now
        return ended

    def _told(self, call: Call) -> Told:
        arguments = call.arguments()
        library = Library(sys.modules.get(call.module), _major, _sm_count)
        request = request_of_call(call.op, arguments, library)
        return Told(call.op, request, describe_call(call.op, arguments), call.site)

    def _look(self) -> None:
        """On the recorder's thread, every second: what no call has announced."""
        spool, observer = self._spool, self._observer
        if spool is None or observer is None:
            return
        try:
            # What has just ended is left to its call, and so is everything while a call goes on.
            moment = math.inf if self._recorder.closed else time.time() - GAP_S
            if self._recorder.closed or not anyone_inside():
                self._join(spool.abandoned() + spool.finished_before(moment), None, 0.0)
            for name in spool.unfinished():
                if name not in self._tokens and time.time() - spool.began(name) > ANNOUNCE_AFTER_S:
                    self._announce(observer, spool, name)
        except FileNotFoundError:
            # A compile that has just been taken by its call.
            return
        except Exception as error:
            self._disable(error)

    def _announce(self, observer: Observer, spool: Spool, name: str) -> None:
        run = spool.peek(name)
        compiler, digest = OTHERS, _digest_of_command(run)
        if run.of_deep_gemm:
            compiler, digest = self.name, self._digest(_payload(run, None))
        self._tokens[name] = observer.started(compiler, digest=digest, at=run.began)

    def _join(self, names: list[str], told: Told | None, until: float) -> None:
        """Reports these, oldest first; `told` is of a call that ended at `until`."""
        spool, observer = self._spool, self._observer
        if spool is None or observer is None:
            return
        taken = [(self._tokens.pop(name, 0), spool.take(name)) for name in names]
        runs = [(token, run) for token, run in taken if run is not None]
        first = first_of_call([run for _, run in runs], until)
        for index, (token, run) in enumerate(runs):
            if run.of_deep_gemm:
                self._report(observer, token, run, told if index >= first else None)
            else:
                _report_other(observer, token, run)

    def _report(self, observer: Observer, token: int, run: Run, told: Told | None) -> None:
        entry = find_entry(run)
        payload = _payload(run, entry)
        digest, key = self._digest(payload), entry.name if entry else ""
        request = told.request if told else None
        site = told.site if told else ""
        token = token or observer.started(self.name, key=key, digest=digest, at=run.began, over=True)
        observer.ended(
            token,
            seconds=run.seconds,
            ok=run.status == 0 or (run.status is None and entry is not None),
            key=key,
            digest=digest,
            site=site,
            provider=PROVIDER if request else "",
            request=request,
            rebuild=_rebuild(payload, told),
            parts=key_parts(payload.source, told.op if told else ""),
        )

    def _digest(self, payload: Payload) -> str:
        try:
            return payload.digest(self._real_nvcc)
        except CompilerUnavailable:
            return ""

    @cached_property
    def _real_nvcc(self) -> Nvcc:
        return find_nvcc(os.environ, minimum=(0, 0), compiler_variables=COMPILER_VARIABLES)

    def _disable(self, error: Exception) -> None:
        if self._observer is None:
            return
        log.warning(
            "prefetchd: nvcc is no longer observed in process %d (%s: %s); the engine is not affected",
            os.getpid(),
            type(error).__name__,
            error,
        )
        self.remove()


def first_of_call(runs: list[Run], until: float) -> int:
    """Where the call that ended at `until` begins among its runs, oldest first: behind the last long gap."""
    index = len(runs)
    while index and until - runs[index - 1].ended < GAP_S:
        index -= 1
        until = runs[index].began
    return index


def _payload(run: Run, entry: Path | None) -> Payload:
    meta = entry / "meta.json" if entry else None
    return observed_payload(run.arguments, run.source, meta.read_bytes() if meta and meta.exists() else None)


def _rebuild(payload: Payload, told: Told | None) -> dict[str, Any] | None:
    if not payload.source:
        return None
    return {
        "source": payload.source,
        "arguments": list(payload.arguments),
        "meta": payload.meta,
        "op": told.op if told else "",
        "call": told.description if told else "",
    }


def _report_other(observer: Observer, token: int, run: Run) -> None:
    digest = _digest_of_command(run)
    key = _output_of(run)
    token = token or observer.started(OTHERS, key=key, digest=digest, at=run.began, over=True)
    observer.ended(token, seconds=run.seconds, ok=run.status == 0, key=key, digest=digest)


def _output_of(run: Run) -> str:
    """The file it writes, by which people know what was built; the whole command where none is named."""
    arguments = [os.fsdecode(one) for one in run.arguments.split(b"\0") if one]
    for option, value in pairwise(arguments):
        if option in ("-o", "--output-file"):
            return value
    return " ".join(arguments)


def _digest_of_command(run: Run) -> str:
    return hashlib.sha256(run.arguments).hexdigest()


def _major() -> int:
    import torch

    return int(torch.cuda.get_device_capability()[0])


def _sm_count() -> int:
    import torch

    return int(torch.cuda.get_device_properties().multi_processor_count)
