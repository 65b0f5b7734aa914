"""The command `replay` as a user runs it, where deep_gemm is some files and nvcc a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from deep_jit_records import Written
from fake_deep_gemm import make_nvcc

from prefetchd.shapelog import Record, ShapeLog

PREFETCHD = Path(sys.executable).with_name("prefetchd")
LIMIT_S = 60


class Machine:
    """A record each of the numbers it is asked for, a log directory and the command."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.written = Written(place, new=True)
        (self.written.site.package / "__init__.py").touch()
        self.logs = place / "state/prefetchd"
        self.environment = {
            **self.written.site.environment,
            "HOME": str(place),
            "TMPDIR": str(place),
            "XDG_STATE_HOME": str(place / "state"),
            "PYTHONPATH": str(self.written.site.package.parent),
        }

    def records(self, *numbers: int) -> list[Record]:
        sources = [self.written.source.replace("512 / 16", f"{number} / 16") for number in numbers]
        return [self.written.record(source=source) for source in sources]

    def log(self, *records: Record) -> Path:
        log = ShapeLog(self.logs, "host", 0)
        assert all([log.append(record) for record in records])
        log.close()
        return log.path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(PREFETCHD), "replay", *arguments], env=self.environment, cwd=self.place, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start("--target", "h200", *arguments)
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err

    def cached(self) -> set[str]:
        return {path.name for path in (self.written.site.root / "cache").glob("*")}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_default_logs_are_replayed_and_reported_to_people(machine: Machine) -> None:
    good = machine.records(1, 2)
    machine.log(*good)

    status, out, err = machine.run()

    assert (status, machine.cached()) == (0, {record.key for record in good})
    assert out.splitlines() == [
        "2 records in 1 logs: 0 requests traced, 2 rebuilt from their record, 0 refused",
        "2 variants: 0 in the cache, compiled 2, failed 0; 0 records not covered",
    ]
    assert "compile: 2/2" in err


@pytest.mark.parametrize("there", [(), ("winners.jsonl",)])
def test_before_the_very_first_start_there_is_nothing_to_do(machine: Machine, there: tuple[str, ...]) -> None:
    for name in there:
        machine.logs.mkdir(parents=True)
        (machine.logs / name).touch()
    text = f"nothing to replay: no engine has written a shape log in {machine.logs} yet"

    assert machine.run() == (0, f"{text}\n", "")
    status, out, err = machine.run("--json")
    assert (status, json.loads(out)["notes"], err) == (0, [text], "")


def test_second_run_compiles_nothing(machine: Machine) -> None:
    path = machine.log(*machine.records(1, 2))
    machine.run(str(path))

    status, out, err = machine.run(str(path), "--json")

    assert (status, err) == (0, "")
    assert (json.loads(out)["present"], json.loads(out)["compiled"]) == (2, 0)


def test_refused_record_is_told_with_its_reason_and_makes_status_1(machine: Machine) -> None:
    good, other = machine.records(1, 2)
    machine.log(good, machine.written.record(key=other.key))

    status, out, _ = machine.run()

    assert (status, machine.cached()) == (1, {good.key})
    assert f"deep_jit {other.key}: refused: key {other.key}: its source" in out


def test_nothing_of_a_log_is_obeyed_by_the_terminal(machine: Machine) -> None:
    escapes = "\x1b]0;title\x07\x1b[2J\n0 problems"
    path = machine.log(msgspec.structs.replace(machine.records(1)[0], key=escapes))
    with path.open("ab") as file:
        file.write(msgspec.json.encode({"kind": escapes}) + b"\n")

    status, out, _ = machine.run()

    assert (status, out.count("refused: key"), out.count("unreadable")) == (1, 1, 1)
    assert all(line.isprintable() for line in out.splitlines())
    assert not any(line.startswith("0 problems") for line in out.splitlines())


def test_compile_that_fails_makes_status_1(machine: Machine) -> None:
    good = machine.records(1, 2)
    machine.log(*good)
    make_nvcc(
        machine.written.site.nvcc, body='grep -q "1 / 16" "$source" || { echo "no such type" >&2; exit 1; }'
    )

    status, out, _ = machine.run("--json")
    result = json.loads(out)

    assert (status, machine.cached()) == (1, {good[0].key})
    assert (result["compiled"], result["failed"]) == (1, 1)
    (problem,) = result["problems"]
    assert (problem["what"], problem["kind"]) == (good[1].key, "compile")
    assert "no such type" in problem["text"]


def test_dearest_is_compiled_first(machine: Machine) -> None:
    cheap, dear, middle = machine.records(1, 2, 3)
    order = machine.place / "order"
    make_nvcc(machine.written.site.nvcc, body=f'grep -o "[0-9] / 16" "$source" >>{order}')
    seconds = {cheap.key: 1.0, dear.key: 9.0, middle.key: 5.0}
    machine.log(*(costing(each, seconds[each.key]) for each in (cheap, dear, middle)))

    assert machine.run("--jobs", "1")[0] == 0

    assert order.read_text().split("\n")[:-1] == ["2 / 16", "3 / 16", "1 / 16"]


def costing(record: Record, seconds: float) -> Record:
    return msgspec.structs.replace(record, seconds=seconds)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("absent.jsonl",), "absent.jsonl"),
        ((".",), "no shape log"),
    ],
)
def test_logs_that_are_not_there_are_an_error_with_the_fix(
    machine: Machine, arguments: tuple[str, ...], told: str
) -> None:
    status, out, err = machine.run(*arguments)

    assert (status, out) == (2, "")
    assert told in err
    assert "name" in err


def test_without_a_device_the_target_must_be_named(machine: Machine) -> None:
    machine.log(*machine.records(1))
    process = machine.start()
    _, err = process.communicate(timeout=LIMIT_S)

    if "--target" not in err:
        pytest.skip("there is a device here")
    assert process.returncode == 2


def test_interrupt_keeps_what_is_published_and_leaves_nothing_else(machine: Machine) -> None:
    first, second = machine.records(1, 2)
    machine.log(costing(first, 9.0), second)
    pipe = machine.place / "pipe"
    os.mkfifo(pipe)
    # The second tells when the first is published, whichever of the two began before the other.
    published = machine.written.site.root / "cache" / first.key
    wait = f"until [ -e {published} ]; do sleep 0.01; done"
    make_nvcc(
        machine.written.site.nvcc,
        body=f'if grep -q "2 / 16" "$source"; then {wait}; echo here >{pipe}; sleep 60; fi',
    )

    process = machine.start("--target", "h200", "--jobs", "2")
    assert pipe.read_text() == "here\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)

    assert (process.returncode, machine.cached()) == (130, {first.key})
    assert list(machine.place.rglob("owner-*")) == []
