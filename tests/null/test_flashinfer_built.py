"""FlashInfer's modules for real: built by an engine, replayed or baked, and then found by the next engine.

nvcc is counted by a wrapper in a CUDA directory of the test's own, which is where the library looks for it.
"""

from __future__ import annotations

import asyncio
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
from cuda_toolkit import CudaToolkit

pytest.importorskip("flashinfer")

from prefetchd.compilers.base import EntryState, Job, fingerprint_id
from prefetchd.compilers.flashinfer_modules import FlashInferModules
from prefetchd.config import Settings
from prefetchd.executors import open_executors
from prefetchd.null_device import launcher
from prefetchd.pipeline import Ending, JobOutcome, compile_all
from prefetchd.shapelog import decode_record, encode_record
from prefetchd.targets import load_target

HERE = Path(__file__).parent
PREFETCHD = Path(sys.executable).with_name("prefetchd")
LIMIT_S = 300
TARGET = "h200"


class Machine:
    """A place with a CUDA directory that counts, and the engine's environment in it."""

    def __init__(self, place: Path) -> None:
        self.place, self.cuda = place, CudaToolkit(place / "cuda")

    @property
    def compiles(self) -> int:
        return self.cuda.compiles

    def environment(self, base: str = "served") -> dict[str, str]:
        (self.place / base).mkdir(exist_ok=True)
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.place),
            "CUDA_HOME": str(self.cuda.place),
            "FLASHINFER_WORKSPACE_BASE": str(self.place / base),
        }

    def engine(self, mode: str, base: str = "served") -> dict[str, Any]:
        served = str(self.place / "served")
        return self.run(base, "flashinfer_module_process.py", mode, "--target", TARGET, "--served", served)

    def run(self, base: str, script: str, *arguments: str) -> dict[str, Any]:
        child = launcher.environment(load_target(TARGET), self.environment(base))
        done = subprocess.run(
            [sys.executable, str(HERE / script), *arguments],
            env=child, cwd=self.place, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def compiler(self) -> FlashInferModules:
        return FlashInferModules(load_target(TARGET), self.environment())

    def compile(self, jobs: list[Job]) -> list[JobOutcome]:
        """As `bake` does it."""
        compilers, found = {"flashinfer_modules": self.compiler()}, list[JobOutcome]()

        async def run() -> None:
            settings = Settings(job_nice=0)
            async with open_executors(
                compilers, load_target(TARGET), {}, self.environment(), settings, 1
            ) as executors:
                await compile_all(
                    jobs, compilers, executors, slots=1, done=found.append, quarantined=lambda _: None
                )

        asyncio.run(run())
        return found


def jobs_in(answer: dict[str, Any]) -> list[Job]:
    return msgspec.msgpack.decode(base64.b64decode(answer["jobs"]), type=list[Job])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
@pytest.mark.ci
def test_what_an_engine_built_is_replayed_and_the_next_one_starts_no_compiler(machine: Machine) -> None:
    seen = machine.engine("observed")
    assert seen["figures"]["flashinfer_modules.compiles"] == 1
    assert machine.compiles == 1
    again = machine.engine("observed")
    assert (machine.compiles, again["records"]) == (1, [])
    assert again["figures"]["flashinfer_modules.hits"] == 1
    compiler, (line,) = machine.compiler(), seen["records"]
    target, record = load_target(TARGET), decode_record(line.encode())
    assert compiler.state(record.key, compiler.cache_root()) is EntryState.PUBLISHED
    shutil.rmtree(compiler.cache_root())
    known = {"gpu": target.name, "capability": target.capability, "sm_count": target.sm_count}
    known["fingerprint"] = fingerprint_id(compiler.fingerprint())
    log = machine.place / "host.rank0.jsonl"
    log.write_bytes(encode_record(msgspec.structs.replace(record, **known)))

    done = subprocess.run(
        [str(PREFETCHD), "replay", str(log), "--target", TARGET, "--json"], env=machine.environment(),
        cwd=machine.place, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip

    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert machine.compiles == 2
    assert compiler.state(record.key, compiler.cache_root()) is EntryState.PUBLISHED
    found = machine.engine("observed")
    assert (machine.compiles, found["records"], found["shape"]) == (2, [], [4, 128])


@pytest.mark.slow
def test_what_is_named_on_the_null_device_is_built_elsewhere_and_found_by_the_engine(
    machine: Machine,
) -> None:
    compiler = machine.compiler()
    named = machine.engine("capture", base="private")
    assert (machine.compiles, named["failure"], named["shape"]) == (0, "", [4, 128])
    (job,) = jobs_in(named)
    missed = machine.engine("forbid", base="private")
    assert [each.key for each in jobs_in(missed)] == [job.key]
    assert missed["failure"].startswith("Miss")

    (outcome,) = machine.compile([job])

    assert (outcome.ending, outcome.text) == (Ending.COMPILED, "")
    assert compiler.state(job.key, compiler.cache_root()) is EntryState.PUBLISHED
    proved = machine.engine("forbid", base="private")
    assert (jobs_in(proved), proved["failure"]) == ([], "")
    served = machine.engine("observed")
    assert (machine.compiles, served["records"], served["failure"]) == (1, [], "")


@pytest.mark.slow
def test_modules_are_described_again_from_their_records_with_the_same_key(machine: Machine) -> None:
    answer = machine.run("served", "flashinfer_described_process.py", str(machine.place / "staging"))

    assert answer["differ"] == []
    assert answer["count"] > 30
    assert machine.compiles == 0
