"""The doctor as a whole, and its checks of prefetchd itself: here, without environment, as a stranger."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from as_user import as_nameless_user
from doctor_machines import install, machine
from rich.console import Console

from prefetchd import doctor
from prefetchd.doctor import Check, Findings, caches, examine, facts, own, render
from prefetchd.doctor.facts import Machine, Mount, this_machine
from prefetchd.null_device.guard import NullDeviceBroken
from prefetchd.targets import Target, TargetError, load_target

ROOT = Path(doctor.__file__).parents[1]
T = TypeVar("T")
EXAMINE = """
import json, os, sys
from prefetchd.doctor import examine
findings = examine(os.environ)
print(json.dumps({"ok": findings.ok, "torch": "torch" in sys.modules,
                  "checks": {c.name: [c.state, c.found, c.advice] for c in findings.checks}}))
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def everything_loaded(function: Callable[[], T]) -> Callable[[], T]:
    """The function, once what the checks import late is loaded: the other user may not read this Python."""
    examine({})
    return function


def test_job_runner_that_was_not_built_fails(tmp_path: Path) -> None:
    assert own.job_runner(machine(), tmp_path / "job_runner").state == "fail"


def test_job_runner_that_is_not_executable_fails(tmp_path: Path) -> None:
    program = tmp_path / "job_runner"
    program.touch(mode=0o644)

    assert own.job_runner(machine(), program).state == "fail"
    program.chmod(0o755)
    assert own.job_runner(machine(), program).state == "ok"


def test_absent_gpu_is_no_fault() -> None:
    def no_driver() -> Target:
        raise TargetError("no driver")

    verdict = own.gpu(machine(), no_driver)

    assert verdict.state == "missing"
    assert "--target" in verdict.advice


def test_gpu_is_described() -> None:
    assert "132 SMs" in own.gpu(machine(), lambda: load_target("h200")).found


def test_misspelt_variable_is_named_with_the_nearest_one() -> None:
    verdict = own.variables(machine(PREFETCHD_MAX_TOKEN="1", PREFETCHD_JOBS="2"))

    assert verdict.state == "warn"
    assert "did you mean PREFETCHD_MAX_TOKENS" in verdict.advice
    assert "PREFETCHD_JOBS" not in verdict.found


def test_settings_that_differ_from_their_default_are_listed() -> None:
    assert own.settings(machine(PREFETCHD_JOBS="3")).found == "jobs=3"
    assert own.settings(machine(PREFETCHD_JOBS="many")).state == "fail"


def test_null_device_that_does_not_answer_fails_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(environment: dict[str, str]) -> None:
        raise NullDeviceBroken("the marker symbol is absent")

    monkeypatch.setattr(own, "verify", broken)

    verdict = own.null_device(machine())

    assert (verdict.state, verdict.found) == ("fail", "the marker symbol is absent")
    assert "reinstall" in verdict.advice


def test_check_that_breaks_is_itself_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Machine) -> Any:
        raise RuntimeError("strange kernel")

    monkeypatch.setattr(doctor, "CHECKS", {"odd": broken, "user": caches.user})

    findings = examine({})

    assert [check.name for check in findings.checks] == ["odd", "user"]
    assert findings.checks[0].state == "fail"
    assert "RuntimeError: strange kernel" in findings.checks[0].found
    assert not findings.ok


def test_absence_and_warnings_leave_it_ok() -> None:
    assert Findings([Check("a", "missing", ""), Check("b", "warn", ""), Check("c", "ok", "")]).ok
    assert not Findings([Check("a", "ok", ""), Check("b", "fail", "")]).ok


def test_table_fits_eighty_columns_and_shows_text_as_it_is() -> None:
    text = io.StringIO()
    findings = Findings([Check("a [red]check", "fail", "/a/very/long/path" * 12, "do [bold]this[/bold]")])

    render(findings, Console(file=text, width=80))

    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "a [red]check" in lines[0]
    assert any("-> do [bold]this[/bold]" in line for line in lines)
    assert lines[-1] == "Not right: a [red]check."


def test_machine_with_nothing_but_the_base_package_has_no_failure(tmp_path: Path) -> None:
    bare = Machine(environment={}, mounts=(Mount("/", "ext4"),), uid=12345)
    of_libraries = {
        name: check for name, check in doctor.CHECKS.items() if check.__module__ != "prefetchd.doctor.own"
    }

    states = {name: check(bare).state for name, check in of_libraries.items()}

    assert len(states) > 10
    assert {name: state for name, state in states.items() if state == "fail"} == {}


def test_empty_environment_has_a_working_null_device_and_no_home() -> None:
    """As under `env -i`."""
    command = [sys.executable, "-c", EXAMINE]

    done = subprocess.run(command, env={}, cwd=ROOT, capture_output=True, text=True, check=True)

    answer = json.loads(done.stdout)
    assert answer["checks"]["null device"][0] == "ok"
    assert answer["checks"]["job runner"][0] == "ok"
    assert answer["checks"]["HOME"][0] == "warn"
    assert answer["torch"] is False


def test_user_without_a_name_a_home_or_an_environment_gets_every_answer() -> None:
    findings = as_nameless_user(everything_loaded(lambda: examine({})))

    found = {check.name: check for check in findings.checks}
    assert list(found) == list(doctor.CHECKS)
    assert [check for check in findings.checks if "check broke" in check.found] == []
    assert (found["user"].state, found["HOME"].state) == ("warn", "warn")


def test_user_without_a_name_cannot_publish_into_a_foreign_home(open_directory: Path) -> None:
    site, home = open_directory / "site", open_directory / "home"
    install(site, "triton", "3.8.0")
    home.mkdir(mode=0o700)

    def triton_cache() -> facts.Verdict:
        sys.path.insert(0, str(site))
        return caches.triton_cache(this_machine({"HOME": str(home)}))

    verdict = as_nameless_user(everything_loaded(triton_cache))

    assert verdict.state == "fail"
    assert verdict.found.startswith(f"{home}/.triton/cache: not made yet, NOT writable")


def test_whole_examination_takes_less_than_two_seconds() -> None:
    # Of CPU, its tools' included: what else runs on this machine is no fault of it.
    start = sum(os.times()[:4])

    findings = examine(os.environ)

    assert sum(os.times()[:4]) - start < 2
    assert [check.name for check in findings.checks] == list(doctor.CHECKS)


def test_this_machine_sees_its_own_root_mount() -> None:
    assert any(mount.point == "/" for mount in this_machine({}).mounts)
