"""What goes wrong on the way from a job to the engine's cache: real processes and limits, a made-up nvcc."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from as_user import NAMELESS, as_nameless_user
from fake_deep_gemm import FakeLibrary, Site
from processes import LIMIT_S, LifeSign, start_child

from prefetchd.compilers.base import EntryState, Job
from prefetchd.executors import CommandExecutor
from prefetchd.jobs import JobPool
from prefetchd.pipeline import Ending, JobOutcome, Pipeline
from prefetchd.store import KeyLocks, Staging, StoreUnwritable

VARIABLE = "DG_JIT_CACHE_DIR"
# An nvcc with children that do not hear SIGTERM.
HANG = '(trap "" TERM; sleep 1000 & sleep 1000) & wait'


@pytest.fixture(params=[True, False], ids=["new", "old"])
def new(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def trace(site: Site, *sources: str) -> list[Job]:
    scratch = site.directory / "scratch"
    scratch.mkdir()
    with site.compiler().capture(scratch) as capture:
        library = site.traced_library()
        for source in sources:
            library.compile("gemm", source)
        return capture.jobs()


def warm(
    site: Site, jobs: list[Job], *, timeout_s: float = LIMIT_S, moved: list[Path] | None = None
) -> list[JobOutcome]:
    """Every job through the real pipeline into the engine's cache."""
    outcomes: list[JobOutcome] = []
    with (
        Staging(site.root, variable=VARIABLE) as staging,
        closing(KeyLocks(site.root, variable=VARIABLE)) as locks,
    ):
        pipeline = Pipeline(
            site.compiler(),
            executor=CommandExecutor(
                site.compiler(), JobPool(2, timeout_s=timeout_s, memory_bytes=0, nice=0)
            ),
            slots=2,
            staging=staging,
            locks=locks,
            quarantined=([] if moved is None else moved).append,
        )
        asyncio.run(pipeline.run(jobs, outcomes.append))
    return outcomes


def nothing_left(site: Site) -> bool:
    return not list(site.root.glob(".prefetchd/owner-*")) and not list((site.root / "tmp").glob("*"))


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("mounts a small file system, which only root can")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def test_one_failing_kernel_costs_only_itself(tmp_path: Path, new: bool) -> None:
    site = Site(tmp_path, new=new, body='grep -q bad "$source" && { echo "kernel.cu(1): error"; exit 2; }')
    jobs = trace(site, "good", "bad", "also good")

    outcomes = {outcome.job.key: outcome for outcome in warm(site, jobs)}

    assert [outcomes[job.key].ending for job in jobs] == [Ending.COMPILED, Ending.FAILED, Ending.COMPILED]
    assert "kernel.cu(1): error" in outcomes[jobs[1].key].text
    assert site.compiler().look_up(jobs[1].key) is EntryState.MISSING
    assert nothing_left(site)


def test_an_nvcc_that_succeeds_without_output_publishes_nothing(tmp_path: Path, new: bool) -> None:
    site = Site(tmp_path, new=new, body="exit 0")
    jobs = trace(site, "source")

    [outcome] = warm(site, jobs)

    assert outcome.ending is Ending.FAILED
    assert "kernel.cubin cannot be read" in outcome.text
    assert site.compiler().look_up(jobs[0].key) is EntryState.MISSING


def test_a_hanging_nvcc_is_ended_with_its_children(tmp_path: Path) -> None:
    alive = LifeSign(tmp_path / "alive")
    site = Site(tmp_path, body=f"{alive.shell}; {HANG}")
    jobs = trace(site, "source")

    [outcome] = warm(site, jobs, timeout_s=1.0)

    assert "time limit" in outcome.text
    alive.wait_begun()
    assert alive.all_gone()
    assert nothing_left(site)
    alive.close()


def test_a_killed_nvcc_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, body="kill -9 $$")

    [outcome] = warm(site, trace(site, "source"))

    assert "SIGKILL" in outcome.text
    assert nothing_left(site)


@pytest.mark.parametrize(
    ("output", "ending"),
    [("", "|| exit 1"), ("2>/dev/null", "|| exit 1"), ("2>/dev/null", '; : > "$output"; exit 0')],
    ids=["loud", "silent", "unnoticed"],
)
def test_a_full_disk_publishes_nothing_and_is_named(
    tmp_path: Path, new: bool, output: str, ending: str
) -> None:
    site = Site(tmp_path, new=new, body=f'cat /dev/zero {output} > "$TMPDIR/tmpxft" {ending}')
    jobs = trace(site, "source")
    with small_disk(site.root, "1m"):
        [outcome] = warm(site, jobs)

        assert outcome.ending is Ending.FAILED
        assert "no space left" in outcome.text.lower()
        assert site.compiler().look_up(jobs[0].key) is EntryState.MISSING
        assert nothing_left(site)


@pytest.mark.parametrize("damage", ["kernel.cubin", "kernel.cu"])
def test_a_corrupt_entry_is_moved_away_and_made_again(tmp_path: Path, new: bool, damage: str) -> None:
    site = Site(tmp_path, new=new)
    jobs = trace(site, "source")
    warm(site, jobs)
    (site.root / "cache" / jobs[0].key / damage).unlink()
    moved: list[Path] = []

    [outcome] = warm(site, jobs, moved=moved)

    assert outcome.ending is Ending.COMPILED
    assert site.compiler().look_up(jobs[0].key) is EntryState.PUBLISHED
    assert [path.parent for path in moved] == [site.root / ".prefetchd/quarantine"]
    assert FakeLibrary(site, site.environment).compile("gemm", "source").name == jobs[0].key


def test_two_processes_compile_each_variant_once(tmp_path: Path, new: bool) -> None:
    site = Site(tmp_path, new=new, body='echo x >> "${0%/*}/starts"')
    jobs = trace(site, *[f"kernel {number}" for number in range(12)])
    other = start_child(lambda: warm(site, jobs))

    outcomes = warm(site, jobs)

    _, status = os.waitpid(other, 0)
    assert status == 0
    assert (site.nvcc.parent / "starts").read_text().count("x") == len(jobs)
    assert Ending.FAILED not in [outcome.ending for outcome in outcomes]
    assert {site.compiler().look_up(job.key) for job in jobs} == {EntryState.PUBLISHED}


def test_a_killed_owner_leaves_no_process_and_its_staging_is_cleaned(tmp_path: Path) -> None:
    alive = LifeSign(tmp_path / "alive")
    site = Site(tmp_path, body=f"{alive.shell}; {HANG}")
    jobs = trace(site, "source")
    owner = start_child(lambda: warm(site, jobs))
    alive.wait_begun()
    assert list(site.root.glob(".prefetchd/owner-*"))

    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)

    assert alive.all_gone()
    alive.close()
    with Staging(site.root, variable=VARIABLE) as staging:
        assert list(site.root.glob(".prefetchd/owner-*")) == [staging.directory]


def open_to_all(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)


def test_a_user_without_a_name_and_home_fills_its_cache(tmp_path: Path, new: bool) -> None:
    site = Site(tmp_path, new=new)
    jobs = trace(site, "source")
    open_to_all(tmp_path)
    site.root.mkdir()
    os.chown(site.root, NAMELESS, NAMELESS)

    endings = as_nameless_user(lambda: [outcome.ending for outcome in warm(site, jobs)])

    assert endings == [Ending.COMPILED]
    assert (site.root / "cache" / jobs[0].key).stat().st_uid == NAMELESS


def test_a_read_only_cache_is_named_with_the_fix(tmp_path: Path, new: bool) -> None:
    site = Site(tmp_path, new=new)
    jobs = trace(site, "source")
    open_to_all(tmp_path)
    site.root.mkdir(mode=0o755)

    def attempt() -> str:
        with pytest.raises(StoreUnwritable) as caught:
            warm(site, jobs)
        return str(caught.value)

    text = as_nameless_user(attempt)
    assert str(site.root) in text
    assert VARIABLE in text


def test_a_read_only_cache_still_serves_a_proof(tmp_path: Path, new: bool) -> None:
    site = Site(tmp_path, new=new)
    jobs = trace(site, "source")
    warm(site, jobs)
    open_to_all(tmp_path)
    proof = tmp_path / "proof"
    proof.mkdir()
    os.chown(proof, NAMELESS, NAMELESS)

    def attempt() -> int:
        with site.compiler().forbid(proof) as misses:
            site.traced_library().compile("gemm", "source")
            return len(misses.jobs())

    assert as_nameless_user(attempt) == 0
