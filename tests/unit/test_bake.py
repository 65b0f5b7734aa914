"""What of a bake needs no kernel library: its order, the engine's start and end, where nothing may land."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from baked_engine import TIMINGS
from click import UsageError
from click.testing import CliRunner

from prefetchd.baking.command import bake_command, lengths
from prefetchd.baking.engine import EngineFailed, run_engine, through
from prefetchd.baking.manifest import Manifest, size_of, unanswered_calls, write_manifest
from prefetchd.baking.order import Answer, Order, Phase, answer_fields, read_order, write_answer, write_order
from prefetchd.baking.places import PRIVATE, engine_environment, served_environment
from prefetchd.compilers.base import Job
from prefetchd.coverage import Problem
from prefetchd.targets import load_target

ENGINE = Path(__file__).with_name("baked_engine.py")
H200 = load_target("h200")
# Only a failed test waits this long.
LIMIT_S = 30.0
BASE = {"PATH": os.environ["PATH"], "HOME": "/home/user"}


def order(phase: Phase = Phase.CAPTURE) -> Order:
    return Order(
        phase=phase, target=H200, compilers=("triton",), batches=((64,), (1, 2)), steps=4, environment={}
    )


def started(directory: Path, how: str) -> list[Answer]:
    write_order(directory, order())
    environment = engine_environment(H200, BASE, directory)
    command = [sys.executable, str(ENGINE), how]
    return asyncio.run(run_engine(command, environment, directory, directory / "log", LIMIT_S))


def test_order_reaches_a_process_by_its_environment(tmp_path: Path) -> None:
    write_order(tmp_path, order())

    assert read_order({"PREFETCHD_BAKE": str(tmp_path)}) == (tmp_path, order())
    assert read_order({}) is None


def test_engine_is_ended_once_its_batches_are_through(tmp_path: Path) -> None:
    answers = started(tmp_path, "KEY")

    (core,) = [answer for answer in answers if answer.schedulers]
    assert core.batches == 2
    (job,) = answer_fields(answers, "captured")
    assert (job.compiler, job.key) == ("triton", "KEY")
    with pytest.raises(ProcessLookupError):
        os.kill(core.pid, 0)


def test_engine_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"(?s)status 1.*no such model"):
        started(tmp_path, "fails")


def test_program_that_is_no_engine_and_says_nothing_leaves_a_whole_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"environment\?$"):
        asyncio.run(run_engine(["true"], BASE, tmp_path, tmp_path / "log", LIMIT_S))


def test_engine_that_hangs_is_ended_whatever_it_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefetchd.baking.engine.ENDING_S", 0.1)
    # A shell, which does this as soon as it is started.
    engine = ["sh", "-c", f"trap '' TERM; echo $$ >{tmp_path}/pid; while :; do sleep 600; done"]

    with pytest.raises(EngineFailed, match="--timeout"):
        asyncio.run(run_engine(engine, BASE, tmp_path, tmp_path / "log", timeout_s=1.0))

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="/no/such/engine"):
        asyncio.run(run_engine(["/no/such/engine"], BASE, tmp_path, tmp_path / "log", LIMIT_S))


def test_every_cache_of_the_engine_is_private(tmp_path: Path) -> None:
    base = {**BASE, **{variable: f"/user/{variable}" for variable in PRIVATE}}

    environment = engine_environment(H200, base, tmp_path)

    assert all(Path(environment[variable]).is_relative_to(tmp_path) for variable in PRIVATE)
    assert environment["HF_HOME"] == "/user/HOME/.cache/huggingface"


def test_files_with_timings_of_every_kind_stay_in_the_private_directory(tmp_path: Path) -> None:
    private, user = tmp_path / "private", tmp_path / "user"
    user.mkdir()
    base = {**BASE, "HOME": str(user), **{variable: str(user) for variable in TIMINGS}}
    write_order(private, order())
    environment = engine_environment(H200, base, private)

    asyncio.run(
        run_engine([sys.executable, str(ENGINE), "KEY"], environment, private, tmp_path / "log", LIMIT_S)
    )

    planted = {path.name for path in private.rglob("*") if path.is_file()}
    assert set(TIMINGS.values()) <= planted
    assert list(user.rglob("*")) == []


def test_a_plug_in_list_of_the_user_gets_ours_too(tmp_path: Path) -> None:
    environment = engine_environment(H200, {**BASE, "VLLM_PLUGINS": "theirs"}, tmp_path)

    assert environment["VLLM_PLUGINS"] == "theirs,prefetchd"


def test_kernels_are_published_where_vllm_will_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetchd.baking.places.find_spec", lambda name: object())

    assert served_environment(BASE)["DG_JIT_CACHE_DIR"] == "/home/user/.cache/vllm/deep_gemm"
    moved = served_environment({**BASE, "VLLM_CACHE_ROOT": "/volume/vllm"})
    assert moved["DG_JIT_CACHE_DIR"] == "/volume/vllm/deep_gemm"
    assert served_environment({**BASE, "DG_JIT_CACHE_DIR": "/set"})["DG_JIT_CACHE_DIR"] == "/set"


def test_batches_are_through_when_every_scheduler_says_so() -> None:
    worker, core = Answer(pid=1, done=True), Answer(pid=2, schedulers=2, done=True)

    assert not through([worker])
    assert not through([worker, core])
    assert through([worker, core, Answer(pid=3, schedulers=2, done=True)])


def test_later_answer_of_a_process_takes_the_place_of_the_first(tmp_path: Path) -> None:
    write_order(tmp_path, order())
    job = Job(compiler="triton", key="K", payload=b"")
    write_answer(tmp_path, "worker", Answer(pid=7))
    write_answer(tmp_path, "worker", Answer(pid=7, captured=(job, job)))

    (path,) = (tmp_path / "answers").iterdir()
    assert path.name == "worker.7.json"


@pytest.mark.parametrize("text", ["", "0", "64,", "a", "-1", "1x0", "x3"])
def test_batch_that_is_no_list_of_lengths_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="prompt lengths"):
        lengths(text)


def test_manifest_that_could_not_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    started = tmp_path / "started"
    manifest = tmp_path / "absent/manifest.json"

    done = CliRunner().invoke(
        bake_command, ["--target", "h200", "--manifest", str(manifest), "--", "touch", str(started)]
    )

    assert (done.exit_code, started.exists()) == (2, False)
    assert str(manifest) in done.output


def test_batch_is_a_list_of_lengths() -> None:
    assert lengths("300, 17,1x3") == (300, 17, 1, 1, 1)


def test_calls_without_an_answer_are_summed_over_processes(tmp_path: Path) -> None:
    file = tmp_path / "calls"
    file.write_text(
        "null device, process 1: not supported: cuGetExportTable, 2 calls\n"
        "null device, process 2: not supported: cuGetExportTable, 1 calls\nsomething else\n"
    )

    assert unanswered_calls([file]) == {"cuGetExportTable": 3}


def test_manifest_is_complete_only_if_proved_and_without_problems(tmp_path: Path) -> None:
    manifest = Manifest(target="h200", gpu="H200", sm_count=132, command=["x"], batches=[[1]], steps=1)
    assert not manifest.complete
    manifest.proved = True
    assert manifest.complete
    manifest.problems.append(Problem(what="triton K", kind="compile", text="nvcc"))
    assert not manifest.complete

    write_manifest(manifest, tmp_path / "m.json")

    assert json.loads((tmp_path / "m.json").read_text())["problems"][0]["what"] == "triton K"
    assert size_of(tmp_path) == (tmp_path / "m.json").stat().st_size
