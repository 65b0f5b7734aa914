"""quack's own directory: its place, what is a key, whose functions are called, and how a file appears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_cubin import fake_cubin

from prefetchd.compilers.base import ArtifactInvalid, CompilerUnavailable, EntryState, Job, NotRebuildable
from prefetchd.compilers.cute_dsl_quack import Kernel, QuackCute, kernel_of
from prefetchd.shapelog import Record
from prefetchd.targets import load_target

TARGET = load_target("h200")
KEY = f"{'a' * 64}/{'b' * 64}"


@pytest.fixture
def compiler(tmp_path: Path) -> QuackCute:
    return QuackCute(TARGET, {"QUACK_CACHE_DIR": str(tmp_path / "quack")})


def staged(compiler: QuackCute, place: Path, architecture: int = 90) -> Job:
    entry = compiler.staged_entry(KEY, place)
    entry.mkdir(parents=True)
    (entry / f"{'b' * 64}.o").write_bytes(b"\x7fELF host code " + fake_cubin(architecture))
    return Job(compiler=compiler.name, key=KEY, payload=b"", cost=1.0)


def test_the_directory_is_the_one_that_the_engine_looks_into() -> None:
    chosen = QuackCute(TARGET, {"QUACK_CACHE_DIR": "/q", "USER": "u"}).cache_root()
    usual = QuackCute(TARGET, {"TMPDIR": "/t", "USER": "u"}).cache_root()

    assert (chosen, usual) == (Path("/q"), Path("/t/u/quack_cache"))
    with pytest.raises(CompilerUnavailable, match="QUACK_CACHE_DIR = 'here' is not an absolute path"):
        QuackCute(TARGET, {"QUACK_CACHE_DIR": "here"})


def test_a_published_object_is_found_and_what_the_engine_has_is_not_replaced(
    compiler: QuackCute, tmp_path: Path
) -> None:
    root = compiler.cache_root()
    job = staged(compiler, tmp_path / "first")

    compiler.verify(job, tmp_path / "first")
    assert compiler.publish(job, tmp_path / "first", root)

    own = compiler.entry_path(KEY, root).stat().st_ino
    assert compiler.state(KEY, root) is EntryState.PUBLISHED
    assert not compiler.publish(staged(compiler, tmp_path / "second"), tmp_path / "second", root)
    assert compiler.entry_path(KEY, root).stat().st_ino == own
    assert {file.suffix for file in (root / ("a" * 64)).iterdir()} == {".lock", ".o"}


def test_an_object_of_another_architecture_is_corrupt_under_the_engines_name(
    compiler: QuackCute, tmp_path: Path
) -> None:
    job = staged(compiler, tmp_path / "first", architecture=100)

    with pytest.raises(ArtifactInvalid, match="sm_100, not for sm_90"):
        compiler.verify(job, tmp_path / "first")
    compiler.publish(job, tmp_path / "first", compiler.cache_root())
    assert compiler.state(KEY, compiler.cache_root()) is EntryState.CORRUPT


@pytest.mark.parametrize("key", ["../../etc/passwd", "a/b", f"{KEY}x", f"/{KEY}", f"{KEY}\n", ""])
def test_what_is_no_key_leads_nowhere(compiler: QuackCute, key: str) -> None:
    with pytest.raises(ValueError, match=r"regex|length"):
        compiler.entry_path(key, compiler.cache_root())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"module": "os"}, "module"),
        ({"module": "quack"}, "module"),
        ({"function": "a.b"}, "function"),
        ({"key": f"{'c' * 64}/{'b' * 64}"}, "key"),
    ],
)
def test_a_record_that_names_anything_but_a_function_of_quacks_is_refused(
    compiler: QuackCute, change: dict[str, Any], named: str
) -> None:
    kernel = Kernel(key=KEY, module="quack.rmsnorm", function="f", positional=["T"], named=["T"])
    fields = msgspec.to_builtins(kernel)
    good = Record(compiler=compiler.name, key=KEY, fingerprint="f", rebuild=fields)

    assert compiler.rebuild(good).key == KEY
    with pytest.raises(NotRebuildable, match=named):
        compiler.rebuild(
            Record(compiler=compiler.name, key=KEY, fingerprint="f", rebuild={**fields, **change})
        )
    with pytest.raises(NotRebuildable, match="rebuild: absent"):
        compiler.rebuild(Record(compiler=compiler.name, key=KEY, fingerprint="f"))


class Jit:
    """The two functions of the library that make a key."""

    _key_to_hash = staticmethod(lambda key: "b" * 64)
    _compute_source_fingerprint = staticmethod(lambda: "a" * 64)


def test_a_call_with_an_argument_of_a_class_of_its_own_has_no_form() -> None:
    def compile_it() -> None: ...

    compile_it.__module__, compile_it.__qualname__ = "quack.rmsnorm", "compile_it"

    assert kernel_of(Jit, compile_it, (1, None), {"offset": 0.5}) is not None
    assert kernel_of(Jit, compile_it, (object(),), {}) is None
