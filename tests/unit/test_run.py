"""`prefetchd run` as a process: it becomes the command, whatever state prefetchd is in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_daemon import until

from prefetchd.endpoint import find_endpoint
from prefetchd.engine_environment import SITE
from prefetchd.node.lock import is_held

ROOT = Path(__file__).parents[2]
DAEMON = Path(__file__).parent / "run_daemon.py"
# The command, with a daemon of the test's in place of `prefetchd serve`.
RUN = f"""
import sys
from prefetchd import daemon_start
daemon_start.SERVE = ({str(DAEMON)!r}, "answer")
BREAK = ""
from prefetchd.run import run_command
run_command(sys.argv[1:], prog_name="prefetchd run")
"""


class Place:
    """A user's surroundings: a home, a runtime directory, and what `run` is started with."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.home, self.runtime = self.folder / "home", self.folder / "run"
        self.home.mkdir()
        self.runtime.mkdir(mode=0o700)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "PYTHONPATH": f"{DAEMON.parent}:{ROOT}",
        }

    def run(self, *argv: str, script: str = RUN, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, *argv],
            env={**self.environment, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def end_daemon(self) -> None:
        for given in self.runtime.rglob("given.json"):
            lock = find_endpoint(self.environment).lock_path
            if lock is not None and is_held(lock):
                os.kill(json.loads(given.read_text())["pid"], signal.SIGKILL)
                until(lambda lock=lock: not is_held(lock))


@pytest.fixture
def place() -> Iterator[Place]:
    with TemporaryDirectory(prefix="pd") as folder:
        found = Place(folder)
        yield found
        found.end_daemon()


@pytest.fixture(scope="module")
def served() -> Iterator[Place]:
    """The same with a daemon, which the first run starts and all others find."""
    with TemporaryDirectory(prefix="pd") as folder:
        found = Place(folder)
        yield found
        found.end_daemon()


def test_the_exit_status_and_output_are_the_commands_own(served: Place) -> None:
    result = served.run("--", "sh", "-c", "echo out; exit 42")

    assert (result.returncode, result.stdout) == (42, "out\n")


def test_a_signal_ends_the_command_as_it_would_alone(served: Place) -> None:
    assert served.run("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_the_command_is_the_very_process_that_was_started(served: Place) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "sh", "-c", "echo $$; read line"],
        env=served.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None

    assert process.stdout.readline() == f"{process.pid}\n"

    process.communicate("\n", timeout=60)


def test_the_command_ignores_no_signal_that_it_would_not_ignore_alone(served: Place) -> None:
    show = ("grep", "SigIgn", "/proc/self/status")
    # As a shell starts its commands.
    alone = subprocess.run(show, capture_output=True, text=True, check=True, restore_signals=True)

    assert served.run("--", *show).stdout == alone.stdout


def test_a_missing_command_exits_as_in_a_shell_and_starts_nothing(place: Place) -> None:
    result = place.run("--", "no-such-command-anywhere")

    assert (result.returncode, result.stderr) == (
        127,
        "prefetchd run: no-such-command-anywhere: command not found or not executable\n",
    )
    assert list(place.runtime.iterdir()) == []


def test_a_file_that_is_no_program_exits_as_in_a_shell(served: Place) -> None:
    odd = served.folder / "odd"
    odd.write_bytes(b"\0\1\2")
    odd.chmod(0o755)

    result = served.run("--no-start", "--", str(odd))

    assert result.returncode == 126
    assert f"prefetchd run: {odd}: Exec format error" in result.stderr


def test_the_commands_own_options_are_left_to_it(served: Place) -> None:
    assert served.run("echo", "--help", "--no-start", "-n").stdout == "--help --no-start -n\n"


def test_each_variable_that_is_set_is_printed(served: Place) -> None:
    result = served.run("--", "env")

    environment = dict(line.split("=", 1) for line in result.stdout.splitlines())
    changed = {name for name, value in environment.items() if served.environment.get(name) != value}
    changed -= {"_", "PWD", "SHLVL", "OLDPWD", "LC_CTYPE"}
    assert changed >= {"PREFETCHD", "PYTHONPATH", "TRITON_CACHE_AUTOTUNING"}
    printed = result.stderr.splitlines()
    for name in changed:
        assert any(line.startswith(f"prefetchd run: {name}={environment[name]}") for line in printed), name
    assert environment["PYTHONPATH"].split(":") == [str(SITE), str(DAEMON.parent), str(ROOT)]


def test_a_daemon_is_started_once_and_found_after_that(place: Place) -> None:
    first = place.run("--", "true")
    second = place.run("--", "true")

    address = find_endpoint(place.environment).address
    assert f"prefetchd run: started a daemon at {address}, its log is " in first.stderr
    assert f"prefetchd run: found the daemon at {address}\n" in second.stderr


def test_a_daemon_that_nobody_asked_for_ends_when_it_is_idle(place: Place) -> None:
    place.run("--", "true", PREFETCHD="1")

    given = json.loads((place.runtime / "prefetchd/given.json").read_text())["environment"]
    assert given["PREFETCHD_IDLE_EXIT_S"] == "600"
    assert "PREFETCHD" not in given
    assert given["TRITON_CACHE_AUTOTUNING"] == "1"
    assert str(SITE) not in given["PYTHONPATH"]


def test_a_users_own_idle_limit_stays(place: Place) -> None:
    place.run("--", "true", PREFETCHD_IDLE_EXIT_S="0")

    given = json.loads((place.runtime / "prefetchd/given.json").read_text())["environment"]
    assert given["PREFETCHD_IDLE_EXIT_S"] == "0"


def test_output_ends_with_the_command_and_not_with_the_daemon(place: Place) -> None:
    # A daemon that held the pipe would keep `communicate` waiting for ever.
    result = place.run("--", "sh", "-c", "echo done")

    assert result.stdout == "done\n"
    lock = find_endpoint(place.environment).lock_path
    assert lock is not None
    assert is_held(lock)


def test_switched_off_nothing_is_set_or_started(place: Place) -> None:
    result = place.run("--", "env", PREFETCHD="0")

    assert result.stderr == "prefetchd run: PREFETCHD=0: switched off, nothing is set or started\n"
    assert str(SITE) not in result.stdout
    assert list(place.runtime.iterdir()) == []


# How prefetchd may be broken: statements before the command is imported, or variables; and what is said.
BROKEN = {
    "no daemon program": (
        "daemon_start.SERVE = ('-c', 'exit(3)')",
        {},
        "the daemon ended at once",
    ),
    "a silent daemon": (
        "daemon_start.SERVE = ('-c', 'import time; time.sleep(9)'); daemon_start.WAIT_S = 0.3",
        {},
        "has not answered",
    ),
    "a setting that is wrong": ("", {"PREFETCHD_MAX_TOKENS": "many"}, "PREFETCHD_MAX_TOKENS"),
    "an endpoint that is wrong": ("", {"PREFETCHD_ENDPOINT": "nonsense"}, "must start with ipc://"),
    "an endpoint on another node": ("", {"PREFETCHD_ENDPOINT": "tcp://10.0.0.1:1"}, "not on this node"),
    "a place that cannot be written": (
        "",
        {"PREFETCHD_ENDPOINT": "ipc:///proc/x/d"},
        "cannot be created",
    ),
    "no ZeroMQ": ("daemon_start.zmq = None", {}, "AttributeError"),
    "no library can be found": (
        "import prefetchd.engine_environment as e; e.find_spec = None",
        {},
        "no cache directory is set",
    ),
    "no process can be started": (
        "import os\ndef fork():\n    raise OSError(11, 'Resource temporarily unavailable')\nos.fork = fork",
        {},
        "Resource temporarily unavailable",
    ),
}


@pytest.mark.parametrize("way", BROKEN)
def test_the_engine_starts_however_prefetchd_is_broken(way: str, place: Place) -> None:
    statements, variables, said = BROKEN[way]

    result = place.run(
        "--", "sh", "-c", "echo serving; exit 7", script=RUN.replace('BREAK = ""', statements), **variables
    )

    assert (result.returncode, result.stdout) == (7, "serving\n")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "variables",
    [
        {"PREFETCHD_ON_ENGINE_COMPILE": "eror"},
        {"PREFETCHD_ON_ENGINE_COMPILE": "error", "PREFETCHD_JOBS": "many"},
    ],
)
def test_a_gate_that_could_not_close_is_an_error(place: Place, variables: dict[str, str]) -> None:
    result = place.run("--no-start", "--", "echo", "serving", **variables)

    wrong, value = list(variables.items())[-1]
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{wrong} = '{value}'" in result.stderr


def test_a_gate_without_anyone_to_observe_is_an_error(place: Place) -> None:
    gate = {"PREFETCHD_ON_ENGINE_COMPILE": "error", "PREFETCHD_OBSERVE": "0"}

    result = place.run("--no-start", "--", "echo", "serving", **gate)

    assert (result.returncode, result.stdout) == (2, "")
    assert "PREFETCHD_OBSERVE=0" in result.stderr


def test_without_a_daemon_there_is_one_clear_line(place: Place) -> None:
    result = place.run("--no-start", "--", "true")

    lines = [line for line in result.stderr.splitlines() if "no daemon" in line]
    address = find_endpoint(place.environment).address
    assert lines == [
        f"prefetchd run: no daemon: none serves {address}, and --no-start says to start none. The engine "
        "starts without it and uses one as soon as it is there"
    ]


def test_a_directory_that_others_may_enter_is_not_trusted(place: Place) -> None:
    (place.runtime / "prefetchd").mkdir()
    (place.runtime / "prefetchd").chmod(0o777)

    result = place.run("--", "echo", "serving")

    assert result.stdout == "serving\n"
    assert "lets others in" in result.stderr


def test_an_engine_starts_with_its_standard_streams_closed(served: Place) -> None:
    mark = served.folder / "mark"
    command = [sys.executable, "-c", RUN, "--no-start", "--", "touch", str(mark)]

    subprocess.run(
        ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *command],
        env=served.environment,
        check=True,
        timeout=60,
    )

    assert mark.exists()


def test_it_is_a_command_of_prefetchd(served: Place) -> None:
    program = shutil.which("prefetchd", path=str(Path(sys.executable).parent))
    assert program is not None

    result = subprocess.run(
        [program, "run", "--no-start", "--", "echo", "serving"],
        env=served.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert result.stdout == "serving\n"
