"""CuTe kernels compiled in a helper and served to an engine that may not compile, on the null device."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass.cute")

from cute_site import HERE, VARIABLE, Site, read_only_store

from prefetchd.compilers.base import ArtifactInvalid, EntryState
from prefetchd.cute.artifacts import OBJECT, names
from prefetchd.null_device import launcher
from prefetchd.pipeline import Ending
from prefetchd.targets import load_target

PREFETCHD = Path(sys.executable).with_name("prefetchd")
CALLS = ("scale", "scale.bfloat16", "decode", "prefill.aligned", "prefill.ragged")


def warmed(site: Site, *calls: str) -> list[str]:
    """Captures the calls and compiles what they need; the names, in order."""
    jobs = site.capture(*calls)
    outcomes = site.warm(jobs)
    assert [(outcome.ending, outcome.text) for outcome in outcomes] == [(Ending.COMPILED, "")] * len(jobs)
    return [job.key for job in jobs]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A store with the kernels of every call. Tests that change it take a copy."""
    site = Site(tmp_path_factory.mktemp("served"))
    warmed(site, *CALLS)
    return site


def copy_of(served: Site, place: Path) -> Site:
    site = Site(place)
    shutil.copytree(served.root, site.root, copy_function=shutil.copy2)
    return site


def warm_command(site: Site) -> subprocess.CompletedProcess[str]:
    """`prefetchd warm` of an engine written as TensorRT-LLM and cuLA are."""
    profile = HERE / "cute_pools.profile.toml"
    where = ("--target", "h200", "--profile", str(profile), "--provider", "kda_cute", "--max-tokens", "256")
    return subprocess.run(
        [str(PREFETCHD), "warm", *where, "--json"], env=site.environment, cwd=site.place, capture_output=True,
        text=True, check=False, timeout=600,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.ci
def test_an_engine_that_may_not_compile_runs_from_the_store(served: Site) -> None:
    proof = served.process("forbid", *CALLS)
    answer = served.process("engine-forbidden", *CALLS)

    assert proof["raised"] == []
    assert answer["counts"] == {"hit": len(CALLS)}
    # How long they take is measured by `bench/cute_load.py`.
    assert len(answer["loads_ms"]) == len(CALLS)


@pytest.mark.slow
def test_a_thread_beside_the_engine_loads_everything_ahead(served: Site) -> None:
    answer = served.process("engine-ahead", *CALLS)

    assert answer["loaded_ahead"] == len(CALLS)
    assert answer["counts"] == {"hit": len(CALLS)}
    assert len(answer["loads_ms"]) == len(CALLS)
    # Nothing was read from the store when a call came.
    assert answer["wait_while_loading_ms"] == 0


@pytest.mark.slow
def test_the_other_line_of_the_dsl_is_served_in_the_same_way(tmp_path: Path) -> None:
    site = Site(tmp_path, other=True)

    warmed(site, *CALLS)

    assert site.process("engine-forbidden", *CALLS)["counts"] == {"hit": len(CALLS)}


@pytest.mark.slow
def test_aligned_and_ragged_lengths_are_two_kernels_and_one_sequence_is_aligned(served: Site) -> None:
    by_call = {call: served.capture(call)[0].key for call in ("prefill.aligned", "prefill.ragged")}

    assert len(set(by_call.values())) == 2
    assert set(by_call.values()) <= set(names(served.root))


@pytest.mark.slow
def test_warm_covers_an_engine_written_as_tensorrt_llm_and_cula_are(tmp_path: Path) -> None:
    site = Site(tmp_path)
    done = warm_command(site)

    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    figures = json.loads(done.stdout)["providers"]["kda_cute"]
    # Aligned and ragged, and one decode for each power of two of sequences up to the largest batch.
    assert (figures["compiled"], figures["uncovered"], figures["failed"]) == (2 + 9, 0, 0)
    answer = site.process("engine-forbidden", "prefill.aligned", "prefill.ragged", "decode")
    assert answer["counts"] == {"hit": 3}


@pytest.mark.slow
def test_two_helper_processes_make_the_same_bytes(served: Site, tmp_path: Path) -> None:
    site = Site(tmp_path)
    keys = warmed(site, "scale", "decode", "prefill.ragged")

    for key in keys:
        assert (site.root / key / OBJECT).read_bytes() == (served.root / key / OBJECT).read_bytes()


@pytest.mark.slow
def test_an_object_for_another_architecture_is_refused_and_not_looked_for(
    served: Site, tmp_path: Path
) -> None:
    blackwell = Site(tmp_path / "b200", target="b200")
    (name,) = (key for key in names(served.root) if key.startswith("decode_cache"))
    # Under a name that a helper for the B200 would publish: only the cubin says what it is.
    (job,) = blackwell.capture("decode")
    staging = tmp_path / "staging"
    shutil.copytree(served.root / name, staging / "entry")

    with pytest.raises(ArtifactInvalid, match="sm_90, not for sm_100"):
        blackwell.compiler().verify(job, staging)
    shutil.copytree(served.root, blackwell.root)
    assert job.key not in names(served.root)
    assert blackwell.compiler().state(name, blackwell.root) is EntryState.CORRUPT


@pytest.mark.slow
def test_another_version_of_the_dsl_misses_and_compiles(served: Site, tmp_path: Path) -> None:
    other = Site(tmp_path, other=True)
    shutil.copytree(served.root, other.root, copy_function=shutil.copy2)

    answer = other.process("engine", "scale", "prefill.ragged")

    assert answer["counts"] == {"miss": 2, "compiled": 2}


@pytest.mark.slow
def test_a_changed_source_of_the_kernel_misses(served: Site, tmp_path: Path) -> None:
    site = copy_of(served, tmp_path)
    sources = tmp_path / "sources"
    sources.mkdir()
    text = (HERE / "cute_kernels.py").read_text()
    (sources / "cute_kernels.py").write_text(text.replace("THREADS = 128", "THREADS = 256"))
    site.environment["PYTHONPATH"] = f"{sources}:{HERE}"

    # So that the script's own directory does not come first.
    answer = site.process("engine", "scale", PYTHONSAFEPATH="1")

    assert answer["counts"] == {"miss": 1, "compiled": 1}


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["corrupt", "foreign", "open", "a file"])
def test_an_engine_compiles_as_ever_when_the_store_is_not_to_be_trusted(
    served: Site, tmp_path: Path, trouble: str
) -> None:
    site = copy_of(served, tmp_path)
    if trouble == "corrupt":
        for name in names(site.root):
            path = site.root / name / OBJECT
            path.write_bytes(path.read_bytes()[:-100])
    elif trouble == "foreign":
        subprocess.run(["chown", "-R", "12345:12345", str(site.root)], check=True)
    elif trouble == "open":
        site.root.chmod(0o777)
    else:
        shutil.rmtree(site.root)
        site.root.write_text("not a directory")

    answer = site.process("engine", "scale", "decode")

    assert answer["counts"]["compiled"] == 2
    assert "hit" not in answer["counts"]


@pytest.mark.slow
def test_a_corrupt_entry_is_quarantined_and_made_anew(served: Site, tmp_path: Path) -> None:
    site = copy_of(served, tmp_path)
    (job,) = site.capture("scale")
    path = site.root / job.key / OBJECT
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])

    (outcome,) = site.warm([job])

    assert outcome.ending is Ending.COMPILED
    assert path.read_bytes() == good
    assert list((site.root / ".prefetchd" / "quarantine").iterdir())


@pytest.mark.slow
def test_a_read_only_store_serves_what_it_has_and_the_engine_compiles_the_rest(
    served: Site, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    (decode,) = (job.key for job in site.capture("decode"))
    with read_only_store(site, served.root, without=decode):
        allowed = site.process("engine", "scale", "decode")
        forbidden = site.process("engine-forbidden", "scale")

        assert allowed["counts"] == {"hit": 1, "miss": 1, "compiled": 1}
        assert forbidden["counts"] == {"hit": 1}
        assert decode not in names(site.root)


@pytest.mark.slow
def test_warm_names_a_read_only_store_and_the_setting(served: Site, tmp_path: Path) -> None:
    site = Site(tmp_path)
    with read_only_store(site, served.root):
        done = warm_command(site)

    assert done.returncode == 2
    assert f"{site.root}: nothing can be published in this cache directory (Read-only" in done.stderr
    assert f"set {VARIABLE} to a directory that is" in done.stderr


@pytest.mark.slow
def test_a_full_disk_fails_the_job_for_the_machines_reason_and_leaves_nothing(
    served: Site, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(small)], check=False)
    if done.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        site = Site(tmp_path / "site")
        site.root = small / "store"
        site.environment[VARIABLE] = str(site.root)
        (outcome,) = site.warm(site.capture("decode"))

        assert (outcome.ending, outcome.retryable) == (Ending.FAILED, True)
        assert "no space left" in outcome.text
        assert names(site.root) == []
        assert site.process("engine", "decode")["counts"] == {"miss": 1, "compiled": 1}
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("other", [False, True])
def test_launching_a_kernel_on_the_null_device_does_not_fail(tmp_path: Path, other: bool) -> None:
    site = Site(tmp_path, other=other)
    child = launcher.environment(load_target("h200"), site.environment)
    program = "from cute_kernels import CALLS, run; [run(call) for call in CALLS]; print('ran')"

    done = subprocess.run(
        [sys.executable, "-c", program], env=child, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.stdout.endswith("ran\n"), done.stderr
