"""An engine under `prefetchd run`, with the real deep_gemm on the null device and a quick nvcc, observed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from warming import Nvcc

from prefetchd.compilers.deep_jit import DeepJit
from prefetchd.shapelog import Record, decode_line
from prefetchd.targets import load_target

PROGRAM = shutil.which("prefetchd", path=str(Path(sys.executable).parent))
ENGINE = Path(__file__).with_name("observed_gemm.py")
# Only a failed test waits this long.
LIMIT_S = 120.0

pytestmark = pytest.mark.slow


class Engine:
    """A user's surroundings in which engines run one after another."""

    def __init__(self, folder: Path, templates: Path) -> None:
        self.folder = folder
        self.nvcc = Nvcc(folder / "nvcc", templates)
        self.log = folder / "state/prefetchd"
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            # The user's own choice, which runs behind ours.
            "DG_JIT_NVCC_COMPILER": str(self.nvcc.path),
            "PREFETCHD_METRICS": "off",
        }

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        assert PROGRAM is not None
        command = [PROGRAM, "null", "--target", "h200", "--", PROGRAM, "run", "--no-start", "--"]
        return subprocess.run(
            [*command, sys.executable, str(ENGINE), *words],
            env={**self.environment, **variables}, capture_output=True, text=True, check=False,
            timeout=LIMIT_S,
        )  # fmt: skip

    def records(self) -> list[Record]:
        found = [
            decode_line(line) for path in self.log.glob("*.jsonl") for line in path.read_bytes().splitlines()
        ]
        return [line for line in found if isinstance(line, Record)]


@pytest.fixture
def engine(templates: Path) -> Iterator[Engine]:
    with TemporaryDirectory(prefix="pd") as folder:
        yield Engine(Path(folder), templates)


@pytest.mark.ci
def test_unplanned_work_is_recorded_once_with_all_that_makes_it_again_and_a_warm_cache_with_nothing(
    engine: Engine,
) -> None:
    assert engine.run("7").stdout.endswith("served\n")

    (record,) = engine.records()
    assert record.request is not None
    fields = {name: record.request[name] for name in ("op", "m", "n", "k", "scales", "scale_layout")}
    assert fields == {
        "op": "fp8_gemm_nt",
        "m": 7,
        "n": 512,
        "k": 1024,
        "scales": "auto",
        "scale_layout": "tma",
    }
    assert (record.compiler, record.ok, record.gpu, record.capability) == (
        "deep_jit",
        True,
        "NVIDIA H200",
        90,
    )
    assert [record.key] == [entry.name for entry in (engine.folder / ".dj/cache").iterdir()]
    assert record.rebuild is not None
    source = (engine.folder / ".dj/cache" / record.key / "kernel.cu").read_text()
    assert record.rebuild["source"] == source
    assert record.site.startswith("__main__.gemm (")
    assert len(record.job_digest) == 64
    assert record.fingerprint

    again = engine.run("7")
    assert again.stdout.endswith("served\n")
    assert len(engine.records()) == 1
    assert list((engine.folder / "prefetchd/nvcc").iterdir()) == []


def test_a_record_becomes_the_job_of_the_very_same_key(engine: Engine) -> None:
    engine.run("7")
    (record,) = engine.records()

    job = DeepJit(load_target("h200"), engine.environment).rebuild(record)

    assert job.key == record.key


def test_warn_writes_a_line_and_error_raises_and_ends_with_a_status_of_its_own(engine: Engine) -> None:
    warned = engine.run("7", PREFETCHD_ON_ENGINE_COMPILE="warn")
    raised = engine.run("300", PREFETCHD_ON_ENGINE_COMPILE="error")
    caught = engine.run("catch600", PREFETCHD_ON_ENGINE_COMPILE="error")
    clean = engine.run("7", "300", "600", PREFETCHD_ON_ENGINE_COMPILE="error")

    (line,) = [line for line in warned.stderr.splitlines() if "the engine compiled" in line]
    assert "called from __main__.gemm (" in line
    assert warned.returncode == 0
    assert "EngineCompiled: the engine compiled deep_jit" in raised.stderr
    assert raised.returncode == 86
    # The serving loop swallowed it; the status does not.
    assert (caught.stdout, caught.returncode) == ("caught EngineCompiled\nserved\n", 86)
    assert (clean.stdout, clean.returncode) == ("served\n", 0)


def test_before_it_serves_an_engine_may_compile_where_that_is_asked_for(engine: Engine) -> None:
    done = engine.run("7", PREFETCHD_ON_ENGINE_COMPILE="error", PREFETCHD_ON_ENGINE_COMPILE_FROM="serving")

    assert (done.stdout, done.returncode) == ("served\n", 0)
    assert len(engine.records()) == 1


def test_switched_off_nothing_is_wrapped_set_or_written(engine: Engine) -> None:
    done = engine.run("7", PREFETCHD_OBSERVE="0")

    assert done.stdout.endswith("served\n")
    assert "NVCC" not in done.stderr
    assert not engine.log.exists()


@pytest.mark.parametrize("broken", ["log", "spool"])
def test_a_place_that_cannot_be_used_is_one_line_and_the_engine_serves(engine: Engine, broken: str) -> None:
    place = engine.log if broken == "log" else engine.folder / "prefetchd"
    place.parent.mkdir(exist_ok=True)
    place.write_text("a file where a directory should be")

    done = engine.run("7", "300")

    assert done.stdout.endswith("served\n")
    ours = [line for line in done.stderr.splitlines() if "not observed" in line or "is not kept" in line]
    assert len(ours) == 1
    assert str(place) in ours[0]


def test_with_nvrtc_it_says_that_it_only_compares_the_cache(engine: Engine) -> None:
    done = engine.run("7", DG_JIT_USE_NVRTC="1")

    (line,) = [line for line in done.stderr.splitlines() if "DG_JIT_USE_NVRTC" in line and "cache" in line]
    assert "told from what appears in" in line
