"""The cache directory itself: full, read-only, corrupt, shared, of several roots, or not to be found."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warming import NEW, SMALL_VARIANTS, TOKENS, Bench, Line, Warmed, old_line

# No account has this number.
STRANGER = 12345

Warm = Callable[[Line, str], Warmed]
New = Callable[..., Bench]


@pytest.fixture
def small_disk(bench: Bench) -> Iterator[Path]:
    """The cache directory on a disk of its own, full after two of the padded kernels below."""
    bench.cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", bench.cache], check=True)
    yield bench.cache
    subprocess.run(["umount", bench.cache], check=True)


def test_full_disk_keeps_what_is_published_and_the_next_run_completes(bench: Bench, small_disk: Path) -> None:
    bench.nvcc.behave('cp "$cubin" "$output" && head -c 400000 /dev/zero >>"$output"; exit $?')

    full = bench.warm("--jobs", "1")

    assert full.status == 1
    published = len(bench.entries())
    assert 0 < published < SMALL_VARIANTS
    assert full.counts("compiled", "failed") == (published, SMALL_VARIANTS - published)
    texts = [problem["text"] for problem in full.figures["problems"] if problem["kind"] == "compile"]
    assert all(f"no space left for {bench.cache}" in text for text in texts)
    assert bench.leftovers() == []

    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    again = bench.warm()

    assert again.status == 0
    assert again.counts("hits", "compiled", "failed") == (published, SMALL_VARIANTS - published, 0)


def test_read_only_cache_ends_the_command_with_directory_and_variable(bench: Bench) -> None:
    bench.cache.mkdir(mode=0o755)
    bench.user = STRANGER

    done = bench.warm()

    assert done.status == 2
    assert f"{bench.cache}: nothing can be published in this cache directory" in done.err
    assert "Permission denied" in done.err
    assert "set DG_JIT_CACHE_DIR to a directory that is" in done.err
    assert bench.nvcc.compiles() == []


def test_read_only_cache_that_holds_everything_is_enough(warmed: Warm, new_bench: New) -> None:
    bench = warmed(NEW, "h200").copy(new_bench("sealed"))
    bench.user = STRANGER

    done = bench.warm("--max-tokens", str(TOKENS))

    assert (done.status, done.err) == (0, "")
    assert done.figures["hits"] == done.figures["variants"]


def test_user_without_a_name_and_without_a_home_fills_its_own_cache(bench: Bench) -> None:
    bench.cache.mkdir()
    shutil.chown(bench.cache, STRANGER, STRANGER)
    bench.user = STRANGER

    done = bench.warm(changes={"HOME": None})

    assert done.status == 0, done.err
    assert done.figures["compiled"] == SMALL_VARIANTS
    assert {entry.stat().st_uid for entry in bench.entries()} == {STRANGER}


def test_temporary_directory_of_another_user_is_not_worked_in(bench: Bench) -> None:
    place = bench.temporary / "prefetchd-0"
    place.mkdir()
    shutil.chown(place, STRANGER, STRANGER)

    done = bench.warm("--dry-run")

    assert done.status == 2
    assert f"{place}: not a directory that only uid 0 may write to" in done.err


def test_without_home_and_cache_variable_the_variable_to_set_is_named(bench: Bench) -> None:
    done = bench.warm(changes={"HOME": None, "DG_JIT_CACHE_DIR": None})

    assert done.status == 2
    assert "Set DG_JIT_CACHE_DIR to an absolute directory, here and in the engine" in done.err


def test_without_the_cache_variable_the_library_s_own_directory_is_filled(bench: Bench) -> None:
    done = bench.warm(changes={"DG_JIT_CACHE_DIR": None})

    assert done.status == 0
    assert len(bench.entries(bench.place / ".dj")) == SMALL_VARIANTS


def test_relative_cache_directory_ends_the_command(bench: Bench) -> None:
    done = bench.warm(changes={"DG_JIT_CACHE_DIR": "cache"})

    assert done.status == 2
    assert "DG_JIT_CACHE_DIR='cache' holds 'cache', which is not an absolute path" in done.err
    assert not bench.cache.exists()


def test_entries_of_a_second_root_are_hits_and_new_ones_go_to_the_first(warmed: Warm, new_bench: New) -> None:
    bench = warmed(NEW, "h200").copy(new_bench("roots"))
    shared = bench.place / "shared"
    bench.cache.rename(shared)
    (taken,) = [entry for entry in bench.entries(shared) if "transpose" in entry.name]
    shutil.rmtree(taken)
    before = bench.entries(shared)

    done = bench.warm(
        "--max-tokens", str(TOKENS), changes={"DG_JIT_CACHE_DIR": f"{bench.cache}:{shared}"}
    )  # fmt: skip

    assert done.status == 0
    assert done.counts("hits", "compiled", "uncovered") == (done.figures["variants"] - 1, 1, 0)
    assert [entry.name for entry in bench.entries()] == [taken.name]
    assert bench.entries(shared) == before


def test_several_roots_are_refused_for_the_line_that_takes_one(new_bench: New) -> None:
    bench = new_bench("roots", old_line())

    done = bench.warm(changes={"DG_JIT_CACHE_DIR": f"{bench.cache}:/elsewhere"})

    assert done.status == 2
    assert "takes exactly one. Set it to one absolute directory" in done.err


def test_corrupt_entries_are_quarantined_and_made_anew(warmed: Warm, new_bench: New, line: Line) -> None:
    bench = warmed(line, "h200").copy(new_bench("corrupt", line))
    truncated, incomplete, foreign, empty, *_ = bench.entries()
    cubin = truncated / "kernel.cubin"
    cubin.write_bytes(cubin.read_bytes()[:100])
    (incomplete / line.files[-1]).unlink()
    shutil.copy(bench.nvcc.directory / "100.cubin", foreign / "kernel.cubin")
    # What an engine's own look-up may leave: no harm, and no reason to move it.
    shutil.rmtree(empty)
    empty.mkdir()

    done = bench.warm("--max-tokens", str(TOKENS))

    assert done.status == 0, done.out
    assert done.counts("compiled", "failed", "uncovered") == (4, 0, 0)
    moved = [Path(path) for path in done.result["quarantined"]]
    corrupt = {truncated.name, incomplete.name, foreign.name}
    assert {path.name.rsplit(".", 1)[0] for path in moved} == corrupt
    assert all(path.is_dir() and path.parent == bench.cache / ".prefetchd/quarantine" for path in moved)
    assert all({path.name for path in entry.iterdir()} == set(line.files) for entry in bench.entries())
    assert cubin.stat().st_size > 100
