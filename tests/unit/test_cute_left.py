"""What nothing names is a miss for one request, and the library's own affair in an engine that is baked."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefetchd.compilers.base import NamingCompiler
from prefetchd.compilers.cute_dsl import CuteDsl
from prefetchd.compilers.cute_dsl_modes import Left, Miss, Recorder, Refuser, StandIn
from prefetchd.targets import load_target


def kernel() -> str:
    return "compiled"


def recorder(place: Path, left: Left | None = None) -> Recorder:
    return Recorder(place / "variants", "sm_90a", lambda place: place.key, left)


def test_one_request_meets_a_stand_in_and_then_a_miss(tmp_path: Path) -> None:
    assert isinstance(recorder(tmp_path).compile(None, kernel, kernel), StandIn)
    with pytest.raises(Miss, match=r"test_cute_left\.kernel"):
        Refuser(tmp_path, recorder(tmp_path)).compile(None, kernel, kernel)


def test_engine_compiles_what_is_left_to_it_and_is_told_of_it_once(tmp_path: Path) -> None:
    left = Left()

    for mode in (recorder(tmp_path, left), Refuser(tmp_path, recorder(tmp_path), left)):
        assert mode.compile(None, kernel, kernel) == "compiled"

    assert left.subjects == {"test_cute_left.kernel"}
    assert recorder(tmp_path).variants == {}


def test_compiler_tells_nothing_unless_it_was_told_to_leave_something(tmp_path: Path) -> None:
    compiler = CuteDsl(load_target("h200"), {"HOME": str(tmp_path)})
    assert isinstance(compiler, NamingCompiler)
    assert compiler.notes() == ()

    compiler.leave_unnamed()

    assert compiler.notes() == ()
