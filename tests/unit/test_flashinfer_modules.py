"""FlashInfer's directory of modules as files, with real builds of ninja's: found, published, and when not."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_cubin import fake_cubin
from fake_flashinfer import NAME, NINJA, WORKSPACE, manifest, needs_ninja, run_ninja, write_module
from processes import start_child

from prefetchd.compilers import flashinfer_modules
from prefetchd.compilers.base import ArtifactInvalid, CompilerUnavailable, EntryState, Job, NotRebuildable
from prefetchd.compilers.flashinfer_build import (
    build,
    build_environment,
    describe_again,
    generated_sources,
    parallel,
    root_of,
)
from prefetchd.compilers.flashinfer_calls import Generator, Module, digest_of
from prefetchd.compilers.flashinfer_modules import FlashInferModules
from prefetchd.null_device import guard
from prefetchd.shapelog import Record
from prefetchd.targets import load_target

pytestmark = needs_ninja

CALL = Generator(module="flashinfer.jit.activation", function="gen_act_and_mul_module")
KEY = f"{WORKSPACE}/cached_ops/{NAME}@{digest_of(manifest(Path('/any')), (Path('/any'),))}"
SECOND = 10**9


@pytest.fixture
def compiler(tmp_path: Path) -> FlashInferModules:
    path = f"{Path(str(NINJA)).parent}:{os.environ['PATH']}"
    environment = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path / "ws"), "PATH": path}
    return FlashInferModules(load_target("h200"), environment)


def staged(compiler: FlashInferModules, place: Path, flags: str = "-O3") -> Job:
    """As a worker leaves it: built below the staging directory, then at its place there."""
    place.mkdir(parents=True)
    made = write_module(place.resolve(), flags=flags)
    run_ninja(made)
    made.rename(compiler.staged_entry(KEY, place))
    return compiler.job(Module(key=KEY, call=CALL))


def published(compiler: FlashInferModules, place: Path) -> Path:
    """One that was published; its directory."""
    job = staged(compiler, place)
    assert compiler.publish(job, place, compiler.cache_root())
    return compiler.entry_path(KEY, compiler.cache_root())


def test_a_published_module_is_one_in_which_the_engines_ninja_has_nothing_to_do(
    compiler: FlashInferModules, tmp_path: Path
) -> None:
    root = compiler.cache_root()
    job = staged(compiler, tmp_path / "staging")
    assert compiler.state(KEY, root) is EntryState.MISSING
    compiler.verify(job, tmp_path / "staging")

    assert compiler.publish(job, tmp_path / "staging", root)

    assert compiler.state(KEY, root) is EntryState.PUBLISHED
    directory = compiler.entry_path(KEY, root)
    assert root_of(directory) == root
    # What the engine's generator does: nothing, since the sources are there.
    assert (root / WORKSPACE / "generated" / f"{NAME}.cu").read_bytes() == fake_cubin()
    assert (directory / "build.ninja").read_text() == manifest(root)
    before = (directory / f"{NAME}.so").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "staging")
    run_ninja(directory)
    assert (directory / f"{NAME}.so").stat().st_mtime_ns == before


def test_a_root_behind_a_link_is_named_as_the_library_names_it(
    compiler: FlashInferModules, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "ws").symlink_to(tmp_path / "real")

    directory = published(compiler, tmp_path / "staging")

    assert compiler.state(KEY, compiler.cache_root()) is EntryState.PUBLISHED
    assert str(tmp_path / "ws") not in (directory / "build.ninja").read_text()


def test_an_entry_of_one_root_is_published_into_another(compiler: FlashInferModules, tmp_path: Path) -> None:
    first, other = published(compiler, tmp_path / "staging"), tmp_path / "other/.cache/flashinfer"
    place = tmp_path / "copy"
    place.mkdir()
    shutil.copytree(first, compiler.staged_entry(KEY, place))
    job = compiler.job(Module(key=KEY, call=CALL))

    compiler.verify(job, place)

    assert compiler.publish(job, place, other)
    assert compiler.state(KEY, other) is EntryState.PUBLISHED
    assert compiler.state(KEY, compiler.cache_root()) is EntryState.PUBLISHED


def test_what_the_engine_has_is_not_touched(compiler: FlashInferModules, tmp_path: Path) -> None:
    directory = published(compiler, tmp_path / "staging")
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}

    assert not compiler.publish(
        staged(compiler, tmp_path / "again"), tmp_path / "again", compiler.cache_root()
    )

    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    assert compiler.state(KEY, compiler.cache_root()) is EntryState.PUBLISHED


def test_an_engine_that_is_building_keeps_its_directory(compiler: FlashInferModules, tmp_path: Path) -> None:
    root = compiler.cache_root()
    job = staged(compiler, tmp_path / "staging")
    directory = write_module(root)
    lock = directory.parent / "tmp" / f"{NAME}.lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        assert not compiler.publish(job, tmp_path / "staging", root)

        assert [path.name for path in directory.iterdir()] == ["build.ninja"]
        assert compiler.state(KEY, root) is EntryState.MISSING
    run_ninja(directory)
    assert compiler.state(KEY, root) is EntryState.PUBLISHED


def test_an_engine_that_has_only_made_its_directory_gets_the_module(
    compiler: FlashInferModules, tmp_path: Path
) -> None:
    root = compiler.cache_root()
    directory = compiler.entry_path(KEY, root)
    directory.mkdir(parents=True)
    (directory.parent / "tmp").mkdir()
    with (directory.parent / "tmp" / f"{NAME}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        assert compiler.publish(staged(compiler, tmp_path / "staging"), tmp_path / "staging", root)

    assert compiler.state(KEY, root) is EntryState.PUBLISHED


@pytest.mark.parametrize("leftover", ["half", "other flags"])
def test_what_nobody_is_building_is_put_aside(
    compiler: FlashInferModules, tmp_path: Path, leftover: str
) -> None:
    root = compiler.cache_root()
    directory = write_module(root, flags="-O3" if leftover == "half" else "-O0")
    if leftover != "half":
        run_ninja(directory)
    assert compiler.state(KEY, root) is EntryState.MISSING

    assert compiler.publish(staged(compiler, tmp_path / "staging"), tmp_path / "staging", root)

    assert compiler.state(KEY, root) is EntryState.PUBLISHED
    assert len(list((root / ".prefetchd/quarantine").iterdir())) == 1


def test_another_generated_source_is_not_overwritten(compiler: FlashInferModules, tmp_path: Path) -> None:
    root = compiler.cache_root()
    source = root / WORKSPACE / "generated" / f"{NAME}.cu"
    source.parent.mkdir(parents=True)
    source.write_text("the engine's")

    assert not compiler.publish(staged(compiler, tmp_path / "staging"), tmp_path / "staging", root)

    assert source.read_text() == "the engine's"
    assert not compiler.entry_path(KEY, root).exists()
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_a_source_that_the_engine_wrote_after_our_compile_makes_nothing_stale(
    compiler: FlashInferModules, tmp_path: Path
) -> None:
    root = compiler.cache_root()
    job = staged(compiler, tmp_path / "staging")
    time.sleep(0.01)
    source = root / WORKSPACE / "generated" / f"{NAME}.cu"
    source.parent.mkdir(parents=True)
    source.write_bytes(fake_cubin())

    assert compiler.publish(job, tmp_path / "staging", root)

    assert compiler.state(KEY, root) is EntryState.PUBLISHED


def test_a_younger_source_makes_a_module_missing_as_the_engine_would_build_it(
    compiler: FlashInferModules, tmp_path: Path
) -> None:
    published(compiler, tmp_path / "staging")
    root = compiler.cache_root()
    later = time.time_ns() + 60 * SECOND
    os.utime(root / WORKSPACE / "generated" / f"{NAME}.cu", ns=(later, later))

    assert compiler.state(KEY, root) is EntryState.MISSING


def test_a_library_that_is_cut_off_is_corrupt(compiler: FlashInferModules, tmp_path: Path) -> None:
    directory = published(compiler, tmp_path / "staging")
    library = directory / f"{NAME}.so"
    status = library.stat()
    library.write_bytes(library.read_bytes()[:-8])
    os.utime(library, ns=(status.st_mtime_ns, status.st_mtime_ns))

    assert compiler.state(KEY, compiler.cache_root()) is EntryState.CORRUPT


def test_a_build_that_is_not_the_engines_is_not_published(
    compiler: FlashInferModules, tmp_path: Path
) -> None:
    job = staged(compiler, tmp_path / "other", flags="-O0")
    with pytest.raises(ArtifactInvalid, match="not the one the engine would write"):
        compiler.verify(job, tmp_path / "other")
    job = staged(compiler, tmp_path / "cut")
    (compiler.staged_entry(KEY, tmp_path / "cut") / f"{NAME}.so").write_bytes(b"\x7fELF")
    with pytest.raises(ArtifactInvalid, match="less than an ELF header"):
        compiler.verify(job, tmp_path / "cut")
    blackwell = FlashInferModules(load_target("b200"), compiler._environment)
    with pytest.raises(ArtifactInvalid, match="not for sm_100"):
        blackwell.verify(staged(compiler, tmp_path / "arch"), tmp_path / "arch")


def test_logs_of_a_ninja_that_is_not_known_publish_nothing(
    compiler: FlashInferModules, tmp_path: Path
) -> None:
    job = staged(compiler, tmp_path / "staging")
    (compiler.staged_entry(KEY, tmp_path / "staging") / ".ninja_log").write_text("# ninja log v99\n")

    with pytest.raises(ArtifactInvalid, match="FlashInfer would build it again"):
        compiler.publish(job, tmp_path / "staging", compiler.cache_root())

    assert not compiler.entry_path(KEY, compiler.cache_root()).exists()


def test_without_ninja_nothing_is_found_and_nothing_fails(tmp_path: Path) -> None:
    environment = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "PATH": str(tmp_path)}
    compiler = FlashInferModules(load_target("h200"), environment)
    write_module(compiler.cache_root())

    assert compiler.state(KEY, compiler.cache_root()) is EntryState.MISSING


@pytest.mark.parametrize(
    "key",
    ["", "x", "/etc/90a/cached_ops/m@0123456789abcdef", "0.7.4/90a/cached_ops/../m@0123456789abcdef",
     "../90a/cached_ops/m@0123456789abcdef", "0.7.4/90a/cached_ops/m@0123456789abcdef\n",
     "0.7.4/90a/cached_ops/m/n@0123456789abcdef", "0.7.4/90a/cached_ops/.m@0123456789abcdef",
     "./90a/cached_ops/m@0123456789abcdef", "0.7.4/90a/cached_ops/tmp@0123456789abcdef"],
)  # fmt: skip
def test_what_is_no_key_leads_nowhere(compiler: FlashInferModules, key: str) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError)):
        compiler.entry_path(key, Path("/root"))


def nested(levels: int) -> list[Any]:
    found: list[Any] = ["i", "1"]
    for _ in range(levels):
        found = ["T", found]
    return found


def called(**arguments: Any) -> dict[str, Any]:
    return {"call": {"module": "flashinfer.jit.x", "function": "gen_x", "arguments": arguments}}


def record(rebuild: Any, key: str = KEY) -> Record:
    return Record(compiler="flashinfer_modules", key=key, fingerprint="f", rebuild=rebuild)


def test_a_record_comes_back_as_the_same_job(compiler: FlashInferModules) -> None:
    module = Module(key=KEY, call=CALL)

    job = compiler.rebuild(record(msgspec.to_builtins(module)))

    assert job == compiler.job(module)
    assert compiler.modules([job]) == {"flashinfer.jit.activation"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": KEY.replace("silu", "gelu")}, "not the record's"),
        ({"key": "../x"}, "rebuild"),
        ({"key": "./90a/cached_ops/m@0123456789abcdef"}, "rebuild"),
        (called(a=nested(9)), "nested too deep"),
        (called(a=nested(900)), "nested too deep"),
        (called(a=["T", *[["n"]] * 2000]), "too many parts"),
        (called(a=[["T"]]), "a list' is neither"),
        (called(a=["i", "9" * 2000]), "neither"),
        (called(a=["n", *"xyz"]), "neither"),
        (called(a=["s", "\u0661\u202e"]), "neither"),
        ({"call": None, "refused": "it embeds cubins"}, "absent: it embeds cubins"),
        ({"call": {"module": "subprocess", "function": "gen_x"}}, "rebuild"),
        ({"call": {"module": "flashinfer.jit.core", "function": "gen_jit_spec"}}, "sources and flags"),
        (
            {
                "call": {
                    "module": "flashinfer.jit.attention",
                    "function": "gen_x",
                    "arguments": {"a": ["s", "int x;"]},
                }
            },
            "neither",
        ),
    ],
)
def test_a_record_that_names_something_else_is_refused(
    compiler: FlashInferModules, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotRebuildable, match=reason):
        compiler.rebuild(record({**msgspec.to_builtins(Module(key=KEY, call=CALL)), **change}))


def test_a_record_without_its_generator_is_refused(compiler: FlashInferModules) -> None:
    with pytest.raises(NotRebuildable, match="generator was not kept"):
        compiler.rebuild(record(None))


def test_a_module_that_was_not_described_is_not_built(tmp_path: Path) -> None:
    with pytest.raises(CompilerUnavailable, match="it embeds"):
        describe_again(Module(key=KEY, refused="it embeds cubins"), tmp_path)


def test_a_build_runs_with_the_users_number_of_commands_and_finds_a_driver() -> None:
    assert parallel({"MAX_JOBS": "7"}) == 7
    assert parallel({"MAX_JOBS": "0"}) >= 1
    assert parallel({"MAX_JOBS": "many"}) == parallel({}) >= 1
    found = build_environment({"LIBRARY_PATH": "/mine", "LD_PRELOAD": "x"})
    assert found["LIBRARY_PATH"] == f"/mine:{guard.LIBRARIES}"
    assert "LD_PRELOAD" not in found


def test_the_state_is_judged_without_starting_a_command(compiler: FlashInferModules, tmp_path: Path) -> None:
    directory = write_module(compiler.cache_root())
    before = sorted(path.name for path in directory.iterdir())

    assert compiler.state(KEY, compiler.cache_root()) is EntryState.MISSING

    assert sorted(path.name for path in directory.iterdir()) == before


def test_what_cannot_be_judged_is_not_put_aside(
    compiler: FlashInferModules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = published(compiler, tmp_path / "staging")
    job = staged(compiler, tmp_path / "again")
    before = sorted(path.name for path in directory.iterdir())

    def full(*args: Any) -> bool:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(flashinfer_modules, "up_to_date", full)
        assert compiler.state(KEY, compiler.cache_root()) is EntryState.MISSING
        with pytest.raises(OSError, match="no space"):
            compiler.publish(job, tmp_path / "again", compiler.cache_root())

    assert sorted(path.name for path in directory.iterdir()) == before
    assert compiler.state(KEY, compiler.cache_root()) is EntryState.PUBLISHED


def test_no_lock_of_the_librarys_is_taken_where_nothing_is_in_the_way(
    compiler: FlashInferModules, tmp_path: Path
) -> None:
    directory = published(compiler, tmp_path / "staging")
    compiler.publish(staged(compiler, tmp_path / "again"), tmp_path / "again", compiler.cache_root())

    assert not (directory.parent / "tmp").exists()


def test_a_pipe_in_place_of_a_build_file_is_not_waited_for(compiler: FlashInferModules) -> None:
    directory = compiler.entry_path(KEY, compiler.cache_root())
    directory.mkdir(parents=True)
    os.mkfifo(directory / "build.ninja")

    assert compiler.state(KEY, compiler.cache_root()) is EntryState.MISSING


@pytest.mark.parametrize("line", ["default /x", "default /", "default relative/a/b/c/d/e", ""])
def test_a_build_file_that_names_no_library_has_no_root(tmp_path: Path, line: str) -> None:
    (tmp_path / "build.ninja").write_text(f"{line}\n")

    with pytest.raises(ValueError, match="names no library"):
        root_of(tmp_path)


def test_a_log_of_headers_leads_no_source_out_of_the_cache(tmp_path: Path) -> None:
    root, entry = tmp_path / "root", tmp_path / "entry"
    entry.mkdir()
    outside = f"{root}/{WORKSPACE}/generated/../../../../victim"
    text = outside.encode() + b"\0" * (-len(outside) % 4)
    record = struct.pack("<I", len(text) + 4) + text + struct.pack("<I", 0xFFFFFFFF)
    (entry / ".ninja_deps").write_bytes(b"# ninjadeps\n" + struct.pack("<i", 4) + record)

    assert generated_sources(entry, root) == []


@pytest.mark.parametrize("log", ["", "# ninja log v7\n1\t2\t3\tout\tzz\n", "# ninja log v7\nx\n"])
def test_logs_that_are_no_logs_publish_nothing(compiler: FlashInferModules, tmp_path: Path, log: str) -> None:
    job = staged(compiler, tmp_path / "staging")
    (compiler.staged_entry(KEY, tmp_path / "staging") / ".ninja_log").write_text(log)

    with pytest.raises(ArtifactInvalid):
        compiler.publish(job, tmp_path / "staging", compiler.cache_root())


@pytest.mark.parametrize("ending", ["kill -9 $$", "exit 137"])
def test_a_build_whose_ninja_is_killed_ends_as_a_killed_process(tmp_path: Path, ending: str) -> None:
    ninja = tmp_path / "ninja"
    ninja.write_text(f"#!/bin/sh\n{ending}\n")
    ninja.chmod(0o755)

    child = start_child(lambda: build(str(ninja), tmp_path))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
