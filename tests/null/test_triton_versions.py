"""The Triton compiler on the null device: it captures what an engine looks up, and the engine finds it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton_kernels import DOUBLE_VARIANTS, SCALE_VARIANTS
from triton_site import Site

from prefetchd.compilers.base import EntryState, Job
from prefetchd.compilers.triton import payload_of
from prefetchd.compilers.triton_cache import IN_PROGRESS_S, digest_of
from prefetchd.null_device.guard import LIBRARIES
from prefetchd.pipeline import Ending

VARIANTS = SCALE_VARIANTS + DOUBLE_VARIANTS
LINES = ["installed", pytest.param("other", marks=[pytest.mark.slow, pytest.mark.ci])]


class Made:
    """A site whose jobs are captured once and whose cache is filled once; a test copies what it changes."""

    def __init__(self, place: Path, line: str) -> None:
        self.site = Site(place, other=line == "other")
        self.answer = self.site.process("capture")
        self.jobs: list[Job] = self.answer["jobs"]
        self.before = files_below(place)
        self.outcomes = self.site.warm(self.jobs)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    kept: dict[str, Made] = {}

    def get(line: str) -> Made:
        if line not in kept:
            kept[line] = Made(tmp_path_factory.mktemp(line), line)
        return kept[line]

    return get


@pytest.fixture(params=LINES)
def warmed(request: pytest.FixtureRequest, made: Callable[[str], Made]) -> Made:
    return made(request.param)


def files_below(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def test_capture_names_every_variant_once_and_compiles_nothing(warmed: Made) -> None:
    counts = Counter(payload_of(job).name for job in warmed.jobs)

    assert warmed.answer["raised"] == ""
    assert counts == {"_scale": SCALE_VARIANTS, "double": DOUBLE_VARIANTS}
    assert len({job.key for job in warmed.jobs}) == VARIANTS
    assert not [path for path in warmed.before if path.suffix == ".cubin"]


def test_capture_leaves_the_library_as_it_was_and_calls_hooks_of_others(warmed: Made) -> None:
    assert warmed.answer["restored"]
    assert {"_scale", "double"} == {name.split(".")[-1] for name in warmed.answer["heard"]}
    assert warmed.answer["chosen"] == 0


def test_all_is_published_under_the_recorded_key_with_paths_that_hold(warmed: Made) -> None:
    assert [outcome.ending for outcome in warmed.outcomes] == [Ending.COMPILED] * VARIANTS
    assert all(outcome.cpu_s > 0 for outcome in warmed.outcomes)
    for job in warmed.jobs:
        entry = warmed.site.root / job.key
        (group,) = entry.glob("__grp__*.json")
        paths = [Path(path) for path in json.loads(group.read_bytes())["child_paths"].values()]
        assert {path.parent for path in paths} == {entry}
        assert {path.name for path in paths} == {path.name for path in entry.iterdir()} - {group.name}
    others = {path.name for path in warmed.site.root.iterdir()} - {job.key for job in warmed.jobs}
    for name in others - {".prefetchd"}:
        # What Triton builds for itself: a launcher a signature, in versions that have these.
        assert [path.name.split(".")[0] for path in (warmed.site.root / name).iterdir()] == [
            "__triton_launcher"
        ]


def test_prove_finds_everything_and_writes_nothing(warmed: Made) -> None:
    before = sorted(warmed.site.root.rglob("*"))

    answer = warmed.site.process("forbid")

    assert (answer["raised"], answer["jobs"]) == ("", [])
    assert sorted(warmed.site.root.rglob("*")) == before


def test_prove_names_all_that_is_missing_of_a_call_and_leaves_no_directory(
    warmed: Made, tmp_path: Path
) -> None:
    answer = warmed.site.process("forbid", TRITON_CACHE_DIR=str(tmp_path / "empty"))

    assert answer["raised"].startswith("Miss: triton_kernels._scale is not in")
    assert [job.key for job in answer["jobs"]] == [warmed.jobs[0].key]
    assert not (tmp_path / "empty").exists()


def test_engine_finds_every_kernel_and_compiles_none(warmed: Made) -> None:
    answer = warmed.site.process("engine")

    assert answer["made"] == []
    assert sorted(answer["found"]) == sorted(digest_of(job.key) for job in warmed.jobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "target"),
    [
        ("installed", "h200"),
        pytest.param("installed", "b200", marks=pytest.mark.ci),
        ("other", "h200"),
        ("other", "b200"),
    ],
)
def test_engine_that_compiles_itself_makes_the_captured_keys(line: str, target: str, tmp_path: Path) -> None:
    site = Site(tmp_path, other=line == "other", target=target)

    captured = {job.key for job in site.capture()}
    answer = site.process("engine")

    assert sorted(answer["made"]) == sorted(map(digest_of, captured))
    for key in captured:
        assert site.compiler().look_up(key) is EntryState.PUBLISHED


def test_nothing_measured_is_ever_written(warmed: Made) -> None:
    """The kernel asks for kept results, as fla's do by default, and nothing but us forbids it."""
    assert not [path for path in files_below(warmed.site.place) if path.name.endswith(".autotune.json")]


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        # Set to its default; the library puts down its own spelling of the value.
        ("TRITON_DEFAULT_FP_FUSION", "1", "triton.env.TRITON_DEFAULT_FP_FUSION: recorded unset, here 'true'"),
        ("DISABLE_PTXAS_OPT", "0", "triton.env.DISABLE_PTXAS_OPT: recorded unset, here 'false'"),
        ("TRITON_PTXAS_PATH", "{old_ptxas}", "triton.backend: recorded"),
    ],
)
def test_worker_that_would_make_another_key_names_what_differs(
    made: Callable[[str], Made], variable: str, value: str, field: str, tmp_path: Path
) -> None:
    ptxas = tmp_path / "ptxas"
    ptxas.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.0'\n")
    ptxas.chmod(0o755)
    warmed = made("installed")
    site = Site(tmp_path)

    (outcome,) = site.warm(warmed.jobs[:1], {variable: value.format(old_ptxas=ptxas)})

    assert outcome.ending is Ending.FAILED
    assert field in outcome.text
    assert warmed.jobs[0].key in outcome.text
    assert site.compiler().look_up(warmed.jobs[0].key) is EntryState.MISSING


def test_record_of_another_architecture_is_refused(warmed: Made, tmp_path: Path) -> None:
    site = Site(tmp_path, target="b200")
    site.environment["PYTHONPATH"] = warmed.site.environment["PYTHONPATH"]

    (outcome,) = site.warm(warmed.jobs[:1])

    assert outcome.ending is Ending.FAILED
    assert "was recorded for sm_90" in outcome.text
    assert "is sm_100" in outcome.text


def test_kernel_whose_module_is_gone_says_so(made: Callable[[str], Made], tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.environment["PYTHONPATH"] = ""

    (outcome,) = site.warm(made("installed").jobs[:1])

    assert outcome.ending is Ending.FAILED
    assert "triton_kernels._scale cannot be found" in outcome.text


@pytest.fixture
def damaged(made: Callable[[str], Made], tmp_path: Path) -> tuple[Site, Job, Path]:
    """One published entry in a cache of its own, old enough not to be an engine's at work."""
    warmed = made("installed")
    site, job = Site(tmp_path), warmed.jobs[0]
    (outcome,) = site.warm([job])
    assert outcome.ending is Ending.COMPILED
    entry = site.root / job.key
    return site, job, entry


def grow_old(entry: Path) -> None:
    for path in (*entry.iterdir(), entry):
        os.utime(path, times=(0, path.stat().st_mtime - IN_PROGRESS_S))


def test_moved_cache_is_made_anew(damaged: tuple[Site, Job, Path], tmp_path: Path) -> None:
    site, job, entry = damaged
    grow_old(entry)
    site.root.rename(tmp_path / "elsewhere")
    site.root = tmp_path / "elsewhere"
    site.environment["TRITON_CACHE_DIR"] = str(site.root)
    moved: list[Path] = []

    (outcome,) = site.warm([job], quarantined=moved.append)

    assert outcome.ending is Ending.COMPILED
    assert len(moved) == 1
    assert site.compiler().look_up(job.key) is EntryState.PUBLISHED


@pytest.mark.parametrize("old", [True, False])
def test_truncated_group_is_made_anew_unless_an_engine_may_be_at_work(
    damaged: tuple[Site, Job, Path], old: bool
) -> None:
    site, job, entry = damaged
    (group,) = entry.glob("__grp__*.json")
    os.truncate(group, 20)
    if old:
        grow_old(entry)
    moved: list[Path] = []

    (outcome,) = site.warm([job], quarantined=moved.append)

    assert outcome.ending is (Ending.COMPILED if old else Ending.FOUND)
    assert len(moved) == int(old)
    expected = EntryState.PUBLISHED if old else EntryState.MISSING
    assert site.compiler().look_up(job.key) is expected


def test_cubin_of_another_architecture_is_corrupt_at_once(damaged: tuple[Site, Job, Path]) -> None:
    site, job, entry = damaged
    (cubin,) = entry.glob("*.cubin")
    data = bytearray(cubin.read_bytes())
    data[48:52] = data[48:52].replace(b"\x5a", b"\x64")
    cubin.write_bytes(data)

    assert site.compiler().look_up(job.key) is EntryState.CORRUPT


def test_binaries_only_as_the_engine_has_it(made: Callable[[str], Made], tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.environment["TRITON_STORE_BINARY_ONLY"] = "1"
    job = made("installed").jobs[0]

    (outcome,) = site.warm([job])

    assert outcome.ending is Ending.COMPILED
    suffixes = {path.suffix for path in (site.root / job.key).iterdir()}
    assert ".cubin" in suffixes
    assert not suffixes & {".ptx", ".llir", ".ttgir"}


@pytest.mark.slow
@pytest.mark.parametrize("line", ["installed", pytest.param("other", marks=pytest.mark.ci)])
def test_modules_the_library_builds_for_itself_are_there_too_once_libcuda_is_known(
    line: str, tmp_path: Path
) -> None:
    site = Site(tmp_path, other=line == "other")
    # Where an engine on the null device finds it.
    site.environment["PREFETCHD_LIBCUDA_DIR"] = str(LIBRARIES)
    jobs = site.capture()
    site.warm(jobs)

    # An engine that has no compiler, and so fails if it needs one.
    answer = site.process("engine", CC="/bin/false")

    assert answer["made"] == []
    assert len(answer["found"]) == VARIANTS
    assert site.compiler().notes() == ()


def test_without_libcuda_the_librarys_own_module_is_named_as_left_to_the_engine(tmp_path: Path) -> None:
    (note,) = Site(tmp_path).compiler().notes()

    assert "cuda_utils is left to the engine" in note
    assert "PREFETCHD_LIBCUDA_DIR" in note
