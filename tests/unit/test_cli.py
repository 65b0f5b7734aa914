"""The command line: what each ending looks like from outside. The work behind it is tested elsewhere."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prefetchd import cli, model_options
from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.coverage import Coverage, Problem, ProviderCoverage, RequestDetail
from prefetchd.profiles import read_profile
from prefetchd.targets import Target, TargetError
from prefetchd.warm import WarmPlan, uncovered_lines

MODEL = Path(__file__).parents[2] / "examples/models/tiny-dense-fp8.json"
WARM = ("warm", "--target", "h200", "--model", str(MODEL), "--provider", "deep_gemm")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PREFETCHD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def covered(**figures: Any) -> Coverage:
    provider = ProviderCoverage(requests=8, variants=3, hits=1, compiled=2, **figures)
    return Coverage(target="h200", max_tokens=8, dry_run=False, providers={"deep_gemm": provider})


@pytest.fixture
def warm_ends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[WarmPlan]]:
    """Puts a given ending in the place of the warm-up; the plans it was given are returned."""

    def put(ending: Callable[[], Coroutine[Any, Any, Coverage]]) -> list[WarmPlan]:
        plans: list[WarmPlan] = []

        async def warm(plan: WarmPlan, *others: object) -> Coverage:
            plans.append(plan)
            return await ending()

        monkeypatch.setattr(cli, "warm", warm)
        return plans

    return put


def answer(coverage: Coverage) -> Callable[[], Coroutine[Any, Any, Coverage]]:
    async def ending() -> Coverage:
        return coverage

    return ending


def test_all_covered_is_status_zero_and_one_json_object(warm_ends: Callable[..., list[WarmPlan]]) -> None:
    detail = RequestDetail(request="fp8_gemm_nt m=1..8", variants=3, seconds=0.25, requests=8)
    plans = warm_ends(answer(covered(requests_detail=[detail])))

    done = run(*WARM, "--max-tokens", "8", "--json")

    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert (printed["target"], printed["max_tokens"]) == ("h200", 8)
    assert printed["providers"]["deep_gemm"]["requests_detail"] == [
        {"request": "fp8_gemm_nt m=1..8", "variants": 3, "seconds": 0.25, "requests": 8}
    ]
    assert [(plan.target.capability, plan.max_tokens, plan.dry_run) for plan in plans] == [(90, 8, False)]


@pytest.mark.parametrize("figures", [{"uncovered": 1}, {"failed": 1}])
def test_anything_not_covered_is_status_one(
    warm_ends: Callable[..., list[WarmPlan]], figures: dict[str, int]
) -> None:
    warm_ends(answer(covered(**figures)))

    assert run(*WARM).exit_code == 1


def test_expected_error_is_one_line_and_status_two(warm_ends: Callable[..., list[WarmPlan]]) -> None:
    async def ending() -> Coverage:
        raise CompilerUnavailable("no nvcc was found; install one")

    warm_ends(ending)

    done = run(*WARM, "--json")

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "prefetchd: no nvcc was found; install one\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_cancels_the_work_and_is_status_130(
    warm_ends: Callable[..., list[WarmPlan]], number: signal.Signals
) -> None:
    cleaned = []

    async def ending() -> Coverage:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
            raise AssertionError("never set")
        finally:
            cleaned.append(True)

    warm_ends(ending)

    done = run(*WARM)

    assert done.exit_code == 130
    assert done.stderr == "prefetchd: interrupted; what is published stays\n"
    assert cleaned == [True]


def test_people_see_the_worst_reasons_and_how_many_more_there_are(
    warm_ends: Callable[..., list[WarmPlan]],
) -> None:
    problems = [Problem(what=f"op m={m}", kind="miss", text=f"reason {m}", requests=m) for m in range(1, 15)]
    warm_ends(answer(covered(uncovered=105, problems=problems)))

    lines = run(*WARM).stdout.splitlines()

    assert lines[0] == (
        "deep_gemm: 8 requests, 3 variants: 1 in the cache, compiled 2, failed 0; 105 requests not covered"
    )
    assert lines[1] == "deep_gemm: op m=14 (14 requests): miss: reason 14"
    assert lines[-1] == "... and 4 more; --json lists all"


def test_reason_that_many_share_is_said_once_with_their_number() -> None:
    same = [Problem(what=f"site {i}", kind="unavailable", text="no torch", requests=64) for i in range(3)]
    other = Problem(what="op m=2", kind="error", text="dim", requests=1)
    coverage = covered(problems=[other, *same])
    coverage.problems.append(Problem(what="site x", kind="unknown", text="no such op", requests=4))

    assert list(uncovered_lines(coverage)) == [
        "site x (4 requests): unknown: no such op",
        "deep_gemm: site 0 and 2 more (192 requests): unavailable: no torch",
        "deep_gemm: op m=2: error: dim",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("warm", "--target", "h200"), "give one of --model config.json and --profile"),
        (("warm", "--target", "h201", "--model", str(MODEL)), "h201"),
        ((*WARM, "--provider", "nothing"), "provider 'nothing' is not installed; installed: "),
        ((*WARM, "--max-tokens", "0"), "--max-tokens"),
        (("warm", "--target", "h200", "--model", "/nowhere.json"), "/nowhere.json"),
        (("null", "--target", "h200"), "COMMAND"),
        (("null", "--target", "h201", "--", "true"), "h201"),
        ((*WARM, "--max-tokens", "9" * 25), "--max-tokens"),
        ((*WARM, "--write-profile", "/proc/a.profile.toml"), "/proc/a.profile.toml"),
    ],
)
def test_what_cannot_run_as_asked_is_status_two_with_the_value_that_is_wrong(
    arguments: tuple[str, ...], text: str
) -> None:
    done = run(*arguments)

    assert (done.exit_code, done.stdout) == (2, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_target_and_without_a_gpu_the_presets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> Target:
        raise TargetError("libcuda.so.1 is not there")

    monkeypatch.setattr(model_options, "probe_target", probe)

    done = run("warm", "--model", str(MODEL))

    assert done.exit_code == 2
    assert "no --target given and no GPU to ask: libcuda.so.1 is not there; name one of " in done.stderr
    assert "h200" in done.stderr


@pytest.mark.parametrize("arguments", [("warm", "--model", str(MODEL)), ("null", "true")])
def test_target_name_that_the_null_device_cannot_carry_is_status_two(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "odd.toml").write_text('extends = "h200"\nname = "a;b"\n')

    done = run(arguments[0], "--target", str(tmp_path / "odd.toml"), *arguments[1:])

    assert done.exit_code == 2
    assert "name = 'a;b'" in done.stderr


def test_what_the_system_refuses_is_one_line_and_status_two(warm_ends: Callable[..., list[WarmPlan]]) -> None:
    async def full() -> Coverage:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/dev/null")

    warm_ends(full)

    done = run(*WARM)

    assert (done.exit_code, done.stderr) == (2, "prefetchd: /dev/null: Too many open files\n")


def test_reader_that_has_gone_is_left_to_click(warm_ends: Callable[..., list[WarmPlan]]) -> None:
    async def gone() -> Coverage:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    warm_ends(gone)

    done = run(*WARM)

    assert (done.exit_code, done.stderr) == (1, "")


def test_setting_that_cannot_be_used_is_status_two_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFETCHD_JOB_TIMEOUT_S", "soon")

    done = run(*WARM, "--dry-run")

    assert done.exit_code == 2
    assert "PREFETCHD_JOB_TIMEOUT_S = 'soon'" in done.stderr


def test_profile_is_written_and_nothing_else_is_done(tmp_path: Path) -> None:
    path = tmp_path / "tiny.profile.toml"

    done = run("warm", "--model", str(MODEL), "--write-profile", str(path))

    assert done.exit_code == 0
    gemms = len(read_profile(path).gemms)
    assert f"wrote {path}: {gemms} GEMM sites, 0 sites of other kernels" in done.stderr


def test_profile_that_is_written_is_one_json_object_too(tmp_path: Path) -> None:
    path = tmp_path / "tiny.profile.toml"

    done = run("warm", "--model", str(MODEL), "--write-profile", str(path), "--json")

    gemms = len(read_profile(path).gemms)
    assert json.loads(done.stdout) == {"out": str(path), "gemms": gemms, "kernels": 0}


def test_options_behind_a_command_are_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []

    def start(device: Target, command: tuple[str, ...], *, integer_ops: bool) -> None:
        started.append(command)

    monkeypatch.setattr(cli, "run_on_null_device", start)
    run("null", "--target", "h200", "python", "script.py", "--target", "b200", "-h")

    assert started == [("python", "script.py", "--target", "b200", "-h")]
