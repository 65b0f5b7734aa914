"""Jobs to published artifacts, with the real pool, store and locks, and a compiler whose nvcc is `sh`."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefetchd.compilers.base import ArtifactInvalid, Capture, Command, Compiler, EntryState, Job
from prefetchd.executors import CommandExecutor
from prefetchd.jobs import JobPool
from prefetchd.pipeline import Ending, JobOutcome, Pipeline
from prefetchd.store import KeyLocks, Staging, publish_directory

VARIABLE = "TEST_CACHE_DIR"


class ShellCompiler(Compiler):
    """The payload is a shell command that must leave a file `out` which holds `good`."""

    name = "shell"
    cache_variable = VARIABLE

    def __init__(self, root: Path) -> None:
        self._root = root

    def fingerprint(self) -> Mapping[str, str]:
        return {}

    def cache_root(self) -> Path:
        return self._root

    @contextmanager
    def capture(self, scratch: Path) -> Iterator[Capture]:
        raise AssertionError("the pipeline traces nothing")

    forbid = capture

    def compile(self, job: Job, staging: Path) -> Command:
        (staging / "entry").mkdir()
        argv = ("sh", "-c", job.payload.decode())
        return Command(argv=argv, environment={"PATH": os.environ["PATH"]}, directory=staging / "entry")

    def verify(self, job: Job, staging: Path) -> None:
        if (staging / "entry/out").read_text() != "good":
            raise ArtifactInvalid(f"{job.key}: out is not good")

    def entry_path(self, key: str, root: Path) -> Path:
        return root / "cache" / key

    def state(self, key: str, root: Path) -> EntryState:
        try:
            content = (self.entry_path(key, root) / "out").read_text()
        except FileNotFoundError:
            return EntryState.MISSING
        return EntryState.PUBLISHED if content == "good" else EntryState.CORRUPT

    def publish(self, job: Job, staging: Path, root: Path) -> bool:
        return publish_directory(staging / "entry", self.entry_path(job.key, root))


def job(key: str, command: str = "printf good > out", cost: float = 1.0) -> Job:
    return Job(compiler="shell", key=key, payload=command.encode(), cost=cost)


@contextmanager
def pipeline(
    root: Path, *, slots: int = 2, quarantined: Callable[[Path], None] = print
) -> Iterator[Pipeline]:
    pool = JobPool(slots, timeout_s=60, memory_bytes=1 << 32, nice=0)
    with (
        Staging(root, variable=VARIABLE) as staging,
        contextlib.closing(KeyLocks(root, variable=VARIABLE)) as locks,
    ):
        compiler = ShellCompiler(root)
        yield Pipeline(
            compiler,
            executor=CommandExecutor(compiler, pool),
            slots=slots,
            staging=staging,
            locks=locks,
            quarantined=quarantined,
        )


def run(root: Path, jobs: list[Job], *, slots: int = 2) -> list[JobOutcome]:
    outcomes: list[JobOutcome] = []
    with pipeline(root, slots=slots) as made:
        asyncio.run(made.run(jobs, outcomes.append))
    return outcomes


def published(root: Path) -> set[str]:
    return {path.name for path in (root / "cache").iterdir()}


def test_what_stops_the_work_is_raised_itself_and_not_in_a_group(tmp_path: Path) -> None:
    def refuse(outcome: JobOutcome) -> None:
        raise OSError(outcome.job.key)

    with pipeline(tmp_path) as made, pytest.raises(OSError, match="k"):
        asyncio.run(made.run([job("k1"), job("k2")], refuse))


def test_every_job_ends_published_and_nothing_else_is_left(tmp_path: Path) -> None:
    outcomes = run(tmp_path, [job(f"k{i}") for i in range(5)])

    assert {outcome.ending for outcome in outcomes} == {Ending.COMPILED}
    assert published(tmp_path) == {f"k{i}" for i in range(5)}
    assert not list((tmp_path / ".prefetchd").glob("owner-*"))


def test_longest_job_starts_first(tmp_path: Path) -> None:
    outcomes = run(tmp_path, [job("short", cost=1), job("long", cost=9), job("middle", cost=4)], slots=1)

    assert [outcome.job.key for outcome in outcomes] == ["long", "middle", "short"]


def test_failure_of_one_kernel_says_what_it_printed_and_leaves_the_others(tmp_path: Path) -> None:
    outcomes = run(tmp_path, [job("bad", "echo 'error: no such tile' >&2; exit 2"), job("good")])

    endings = {outcome.job.key: outcome for outcome in outcomes}
    assert endings["bad"].ending is Ending.FAILED
    assert "exit code 2" in endings["bad"].text
    assert "no such tile" in endings["bad"].text
    assert endings["good"].ending is Ending.COMPILED
    assert published(tmp_path) == {"good"}


def test_output_that_does_not_verify_is_never_published(tmp_path: Path) -> None:
    (outcome,) = run(tmp_path, [job("k", "printf wrong > out")])

    assert (outcome.ending, outcome.text) == (Ending.FAILED, "k: out is not good")
    assert not (tmp_path / "cache").exists()


def test_entry_of_the_engine_is_found_not_made_again(tmp_path: Path) -> None:
    entry = tmp_path / "cache/k"
    entry.mkdir(parents=True)
    (entry / "out").write_text("good")

    (outcome,) = run(tmp_path, [job("k", "exit 1")])

    assert outcome.ending is Ending.FOUND


def test_corrupt_entry_is_quarantined_and_made_anew(tmp_path: Path) -> None:
    entry = tmp_path / "cache/k"
    entry.mkdir(parents=True)
    (entry / "out").write_text("goo")
    moved: list[Path] = []
    outcomes: list[JobOutcome] = []

    with pipeline(tmp_path, quarantined=moved.append) as made:
        asyncio.run(made.run([job("k")], outcomes.append))

    assert [outcome.ending for outcome in outcomes] == [Ending.COMPILED]
    assert (moved[0] / "out").read_text() == "goo"
    assert (entry / "out").read_text() == "good"


def _compete(root: Path, log: Path, ready: object) -> None:
    ready.wait()  # type: ignore[attr-defined]
    run(root, [job(f"k{i}", f"echo k{i} >> {log}; printf good > out") for i in range(20)])


def test_two_processes_compile_each_key_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, log = context.Barrier(2), tmp_path / "compiles"
    processes = [context.Process(target=_compete, args=(tmp_path / "root", log, barrier)) for _ in range(2)]

    for process in processes:
        process.start()
    for process in processes:
        process.join(60)

    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(log.read_text().split()) == sorted(f"k{i}" for i in range(20))


def test_key_that_another_process_holds_does_not_stop_the_others(tmp_path: Path) -> None:
    with (
        contextlib.closing(KeyLocks(tmp_path, variable=VARIABLE)) as other,
        pipeline(tmp_path, slots=1) as made,
    ):
        assert other.try_acquire("held")
        order: list[str] = []

        def done(outcome: JobOutcome) -> None:
            order.append(outcome.job.key)
            if outcome.job.key == "free":
                other.release("held")

        asyncio.run(made.run([job("held", cost=9), job("free", cost=1)], done))

    assert order == ["free", "held"]


def test_cancelling_ends_the_compiles_and_keeps_what_is_published(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    async def scenario() -> None:
        with pipeline(tmp_path) as made:
            first = asyncio.Event()
            jobs = [job("done", cost=9), job("hangs", f"echo $$ > {pid_file}; exec sleep 3600")]
            task = asyncio.create_task(made.run(jobs, lambda outcome: first.set()))
            await first.wait()
            while not pid_file.exists() or not pid_file.read_text().strip():
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())

    assert published(tmp_path) == {"done"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert not list((tmp_path / ".prefetchd").glob("owner-*"))
