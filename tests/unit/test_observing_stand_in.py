"""nvcc's stand-in in an engine: what it passes through, what it leaves, and that it stands in no way."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from as_user import as_nameless_user

from prefetchd.compilers.nvcc import STAND_IN
from prefetchd.observing import spool as module
from prefetchd.observing.spool import NOBODY, Spool, SpoolUnusable, running

# Only a failed test waits this long.
LIMIT_S = 20.0
# What an nvcc of the tests does; `$1` says it.
NVCC = r"""#!/bin/sh
case $1 in
echo) cat; echo "$@" >&2; exit 3 ;;
environment) env | grep -v '^PREFETCHD_NVCC_NESTED=' ;;
signal) trap 'exit 9' TERM HUP; echo ready; while :; do sleep 0.01; done ;;
again) shift; exec "$DG_JIT_NVCC_COMPILER" "$@" ;;
*) echo "real $*" ;;
esac
"""


@pytest.fixture
def spool() -> Iterator[Spool]:
    with TemporaryDirectory(prefix="pd") as folder:
        made = Spool(Path(folder) / "nvcc")
        yield made
        made.close()


@pytest.fixture
def nvcc(tmp_path: Path) -> Path:
    path = tmp_path / "cuda/bin/nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(NVCC)
    path.chmod(0o755)
    return path


def environment(nvcc: Path, spool: Spool | None, **others: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PREFETCHD_NVCC_MODE": "observe",
        "PREFETCHD_REAL_NVCC": str(nvcc),
        "DG_JIT_NVCC_COMPILER": str(STAND_IN),
        **({"PREFETCHD_NVCC_SPOOL": str(spool.directory)} if spool else {}),
        **others,
    }


def run(found: dict[str, str], *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STAND_IN, *arguments],
        env=found,
        input=text,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_input_output_and_exit_status_are_nvccs_own(nvcc: Path, spool: Spool) -> None:
    done = run(environment(nvcc, spool), "echo", "a b", "c*", "", text="from stdin")

    assert (done.stdout, done.stderr, done.returncode) == ("from stdin", "echo a b c* \n", 3)


def test_nvccs_environment_is_the_engines(nvcc: Path, spool: Spool) -> None:
    found = environment(nvcc, spool, NVCC_APPEND_FLAGS="-lineinfo", LD_LIBRARY_PATH="/somewhere")

    names = {line.partition("=")[0] for line in run(found, "environment").stdout.splitlines()}

    assert set(found) <= names
    assert names - set(found) <= {"PWD", "OLDPWD", "SHLVL", "_"}


def test_a_run_is_left_with_its_arguments_source_status_and_times(
    nvcc: Path, spool: Spool, tmp_path: Path
) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text("// a source\n")
    before = time.time()

    run(environment(nvcc, spool), "echo", str(source), "-o", str(tmp_path / "kernel.cubin"))

    (name,) = spool.finished()
    found = spool.take(name)
    assert found is not None
    assert found.arguments.split(b"\0")[:2] == [b"echo", os.fsencode(source)]
    assert (found.source, found.status, found.of_deep_gemm) == ("// a source\n", 3, True)
    # The kernel stamps files by its tick.
    assert before - 0.02 <= found.began <= found.ended <= time.time()
    assert {path.name for path in spool.directory.iterdir()} == {"page"}
    assert spool.finished() == []


def test_the_engines_word_changes_with_each_compile(nvcc: Path, spool: Spool) -> None:
    seen = [spool.word[0]]
    for _ in range(2):
        run(environment(nvcc, spool), "x")
        seen.append(spool.word[0])

    assert len(set(seen)) == 3
    assert seen[0] == int.from_bytes(NOBODY, sys.byteorder)


def test_a_compile_that_runs_is_seen_from_outside_and_one_that_was_killed_is_not(
    nvcc: Path, spool: Spool
) -> None:
    engine = subprocess.Popen(
        [STAND_IN, "signal", "x.cu"], env=environment(nvcc, spool), stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "ready\n"

    (found,) = running(spool.directory.parent)
    assert (found.engine, found.process, found.command) == (os.getpid(), engine.pid, "signal x.cu")
    assert (spool.finished(), spool.unfinished(), spool.abandoned()) == ([], [str(engine.pid)], [])

    engine.send_signal(signal.SIGTERM)
    engine.wait(LIMIT_S)
    assert list(running(spool.directory.parent)) == []
    engine.stdout.close()


def test_a_stand_in_that_was_killed_leaves_a_run_without_an_end(nvcc: Path, spool: Spool) -> None:
    engine = subprocess.Popen(
        [STAND_IN, "signal"], env=environment(nvcc, spool), stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert engine.stdout is not None
    engine.stdout.readline()

    os.killpg(engine.pid, signal.SIGKILL)
    engine.wait(LIMIT_S)

    assert list(running(spool.directory.parent)) == []
    (name,) = spool.abandoned()
    found = spool.take(name)
    assert found is not None
    assert found.status is None
    engine.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_reaches_nvcc_and_is_what_the_engine_sees(
    nvcc: Path, spool: Spool, number: signal.Signals
) -> None:
    engine = subprocess.Popen(
        [STAND_IN, "signal"], env=environment(nvcc, spool), stdout=subprocess.PIPE, text=True,
        # Tests under `nohup` ignore a hang-up, and what is ignored at its start no shell can heed.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )  # fmt: skip
    assert engine.stdout is not None
    try:
        engine.stdout.readline()

        engine.send_signal(number)

        assert engine.wait(LIMIT_S) == -number
        # At its end nobody holds the pipe: nvcc has gone too.
        assert engine.stdout.read() == ""
    finally:
        engine.kill()
        engine.stdout.close()
    (name,) = spool.finished()
    found = spool.take(name)
    assert found is not None
    assert found.status == 9


def test_it_is_not_observed_twice_when_nvcc_leads_back_to_it(
    nvcc: Path, spool: Spool, tmp_path: Path
) -> None:
    real = tmp_path / "other/nvcc"
    real.parent.mkdir()
    real.write_text("#!/bin/sh\necho other $*\n")
    real.chmod(0o755)
    found = environment(nvcc, spool, PATH=f"{real.parent}:{os.environ['PATH']}")

    done = run(found, "again", "x")

    assert (done.stdout, done.returncode) == ("other x\n", 0)
    assert len(spool.finished()) == 1


def test_named_as_its_own_real_nvcc_it_finds_another(nvcc: Path, spool: Spool) -> None:
    found = environment(STAND_IN, spool, CUDA_HOME=str(nvcc.parents[1]))

    assert run(found, "x").stdout == "real x\n"


def test_the_version_is_asked_of_the_real_one_and_is_no_compile(nvcc: Path, spool: Spool) -> None:
    assert run(environment(nvcc, spool), "--version").stdout == "real --version\n"
    assert spool.finished() == []


@pytest.mark.parametrize("place", ["", "/nowhere/at/all"])
def test_without_a_spool_nvcc_just_runs(nvcc: Path, place: str) -> None:
    done = run(environment(nvcc, None, PREFETCHD_NVCC_SPOOL=place), "x")

    assert (done.stdout, done.stderr, done.returncode) == ("real x\n", "", 0)


def test_in_a_spool_that_cannot_be_written_nvcc_just_runs(nvcc: Path) -> None:
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        real = Path(folder) / "nvcc"
        real.write_text(NVCC)
        real.chmod(0o755)
        places = {"PREFETCHD_NVCC_SPOOL": folder, "PREFETCHD_REAL_NVCC": str(real)}

        output = as_nameless_user(lambda: subprocess.run(
            ["/bin/sh", "-s", "x"], input=STAND_IN.read_text(), capture_output=True, text=True, check=False,
            env={"PATH": "/usr/bin:/bin", "PREFETCHD_NVCC_MODE": "observe", **places},
        ).stdout)  # fmt: skip

        assert output == "real x\n"


def test_on_a_full_disk_nvcc_just_runs_and_an_end_that_cannot_be_told_is_found(
    nvcc: Path, tmp_path: Path
) -> None:
    point = tmp_path / "full"
    point.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", point], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        spool = Spool(point / "nvcc")
        while True:
            try:
                with (point / "filler").open("ab") as file:
                    file.write(b"x" * 4096)
            except OSError:
                break

        done = run(environment(nvcc, spool), "x")

        assert (done.stdout, done.stderr, done.returncode) == ("real x\n", "", 0)
        assert spool.finished() == []
        with pytest.raises(SpoolUnusable, match="No space left"):
            Spool(point / "second")
        spool.close()
    finally:
        subprocess.run(["umount", "-l", point], check=True)


def test_nobody_reads_so_the_spool_stops_growing(nvcc: Path, spool: Spool) -> None:
    for number in range(module_limit() + 1):
        (spool.directory / f"old{number}.argv").touch()

    done = run(environment(nvcc, spool), "x")

    assert done.stdout == "real x\n"
    assert spool.finished() == []


def module_limit() -> int:
    (line,) = [line for line in STAND_IN.read_text().splitlines() if line.startswith("MOST_IN_SPOOL=")]
    return int(line.partition("=")[2])


def test_the_directory_of_a_dead_process_is_removed_and_that_of_a_live_one_is_not(spool: Spool) -> None:
    base = spool.directory.parent
    dead = base / "4000000"
    dead.mkdir()
    (dead / "page").write_bytes(NOBODY)

    module.remove_dead(base)

    assert [path.name for path in base.iterdir()] == [str(os.getpid())]


def test_spool_that_was_left_or_closed_touches_nothing_of_others(tmp_path: Path) -> None:
    # A number that was closed is given to the next file of the engine's.
    for leave in (Spool.leave_to_parent, Spool.close):
        spool = Spool(tmp_path / "nvcc")
        leave(spool)
        engines = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]

        spool.close()

        assert spool.directory.exists() is (leave is Spool.leave_to_parent)
        for file in engines:
            os.close(file)


def test_process_that_is_just_beginning_is_not_taken_for_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "nvcc"
    lock = fcntl.flock

    def another_begins_just_then(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        module.remove_dead(base)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", another_begins_just_then)
    spool = Spool(base)

    assert [path.name for path in spool.directory.iterdir()] == ["page"]
    spool.close()


def test_process_of_the_same_number_in_another_namespace_keeps_its_directory(
    nvcc: Path, spool: Spool
) -> None:
    base = spool.directory.parent
    (spool.directory / "1.argv").touch()

    second = Spool(base)
    engine = subprocess.Popen([STAND_IN, "x"], env=environment(nvcc, second), stdout=subprocess.DEVNULL)
    assert engine.wait(LIMIT_S) == 0

    assert (spool.unfinished(), second.finished()) == (["1"], [str(engine.pid)])
    assert {path.name for path in base.iterdir()} == {str(os.getpid()), f"{os.getpid()}-1"}
    second.close()


def test_compiles_at_the_same_time_are_all_left(nvcc: Path, spool: Spool) -> None:
    found = environment(nvcc, spool)
    engines = [subprocess.Popen([STAND_IN, "x"], env=found, stdout=subprocess.DEVNULL) for _ in range(20)]
    for engine in engines:
        assert engine.wait(LIMIT_S) == 0

    assert sorted(map(int, spool.finished())) == sorted(engine.pid for engine in engines)
