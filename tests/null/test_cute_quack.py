"""quack's rmsnorm compiled without a GPU for quack's own directory, and found there by an engine."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("quack", reason="quack-kernels is not installed: make env")

from cute_site import run_jobs

from prefetchd.compilers.base import EntryState, Job
from prefetchd.compilers.cute_dsl_quack import QUACK_CACHE_VARIABLE, QuackCute
from prefetchd.null_device import launcher
from prefetchd.pipeline import Ending
from prefetchd.shapelog import decode_record
from prefetchd.targets import load_target

SCRIPT = Path(__file__).with_name("cute_quack_process.py")
LIMIT_S = 300


class Place:
    """An engine's environment with quack's directory in it."""

    def __init__(self, place: Path, target: str) -> None:
        self.place, self.name, self.target = place, target, load_target(target)
        self.root = place / "quack"
        self._count = 0
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "PYTHONPATH": str(SCRIPT.parent),
            QUACK_CACHE_VARIABLE: str(self.root),
        }

    def compiler(self) -> QuackCute:
        return QuackCute(self.target, self.environment)

    def process(self, mode: str, architecture: str) -> dict[str, Any]:
        """Runs `cute_quack_process.py`; its answer, jobs decoded."""
        own = {**self.environment, "CUTE_DSL_ARCH": architecture}
        child = launcher.environment(self.target, own, integer_ops=True)
        self._count += 1
        scratch = self.place / f"{mode}-{self._count}"
        scratch.mkdir()
        done = subprocess.run(
            [sys.executable, str(SCRIPT), mode, self.name, str(scratch)],
            env=child, cwd=self.place, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "jobs" in answer:
            answer["jobs"] = msgspec.msgpack.decode(base64.b64decode(answer["jobs"]), type=list[Job])
        return answer

    def objects(self) -> list[Path]:
        return sorted(self.root.glob("*/*.o"))


@pytest.mark.slow
@pytest.mark.parametrize(("target", "architecture"), [("h200", "sm_90a"), ("b200", "sm_100a")])
def test_a_kernel_of_quacks_is_made_without_a_gpu_and_an_engine_that_may_not_compile_finds_it(
    tmp_path: Path, target: str, architecture: str
) -> None:
    place = Place(tmp_path, target)
    captured = place.process("capture", architecture)
    assert (len(captured["jobs"]), captured["raised"], place.objects()) == (1, [], [])
    missed = place.process("forbid", architecture)
    (raised,) = missed["raised"]
    assert (missed["jobs"], raised.partition(" ")[0]) == (captured["jobs"], "Miss:")

    (outcome,) = run_jobs(place.compiler(), captured["jobs"], place.environment, tmp_path / "work")

    assert (outcome.ending, outcome.text) == (Ending.COMPILED, "")
    (job,) = captured["jobs"]
    assert place.objects() == [place.root / f"{job.key}.o"]
    proof = place.process("forbid", architecture)
    assert (proof["jobs"], proof["raised"]) == ([], [])
    answer = place.process("forbidden", architecture)
    assert answer["records"] == []
    assert answer["figures"]["quack_cute.hits"] == 1


@pytest.mark.slow
def test_what_an_engine_compiled_itself_is_recorded_by_name_and_made_again_from_the_record(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, "h200")

    answer = place.process("engine", "sm_90a")

    (record,) = (decode_record(line.encode()) for line in answer["records"])
    (own,) = place.objects()
    assert (record.compiler, f"{record.key}.o") == ("quack_cute", str(own.relative_to(place.root)))
    assert answer["open"] == 0
    content = own.read_bytes()
    own.unlink()
    job = place.compiler().rebuild(record)
    (outcome,) = run_jobs(place.compiler(), [job], place.environment, tmp_path / "work")
    assert (outcome.ending, outcome.text) == (Ending.COMPILED, "")
    assert own.read_bytes() == content


@pytest.mark.slow
def test_an_object_of_another_architecture_under_the_same_name_is_not_left_to_the_engine(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, "h200")
    place.process("engine", "sm_90a")
    (own,) = place.objects()
    key = str(own.relative_to(place.root)).removesuffix(".o")

    assert place.compiler().state(key, place.root) is EntryState.PUBLISHED
    blackwell = QuackCute(load_target("b200"), place.environment)
    assert blackwell.state(key, place.root) is EntryState.CORRUPT


@pytest.mark.slow
def test_a_replay_of_an_engines_log_fills_an_empty_directory(tmp_path: Path) -> None:
    place = Place(tmp_path, "h200")
    own = {
        **place.environment,
        "PREFETCHD": "1",
        "PREFETCHD_LOG_DIR": str(tmp_path / "logs"),
        "CUTE_DSL_ARCH": "sm_90a",
    }
    child = launcher.environment(place.target, own, integer_ops=True)
    script = [sys.executable, str(SCRIPT.with_name("cute_quack_engine.py")), place.name]
    subprocess.run(script, env=child, cwd=tmp_path, check=True, timeout=LIMIT_S)
    (compiled,) = place.objects()
    content = compiled.read_bytes()
    shutil.rmtree(place.root)

    replay = [str(Path(sys.executable).with_name("prefetchd")), "replay", "--target", place.name, "--json"]
    done = subprocess.run(
        replay, env=own, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )

    assert done.returncode == 0, (done.stdout, done.stderr)
    assert compiled.read_bytes() == content
