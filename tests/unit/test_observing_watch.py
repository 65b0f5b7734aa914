"""How an observer comes into a process and leaves it: by import hooks, by attach(), at exit, in a fork."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
from told_sink import Told

from prefetchd.config import Settings
from prefetchd.engine_environment import SITE
from prefetchd.observer import Observer
from prefetchd.observing import watch as module
from prefetchd.observing.watch import EXIT_ENGINE_COMPILED, Watch

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0


class Library:
    """An adaptor of the tests' own."""

    name = "a compiler"

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.failing = False
        self.removed = 0

    def install(self, observer: Observer) -> None:
        if self.failing:
            raise RuntimeError("another version")
        self.observer = observer

    def remove(self) -> None:
        self.removed += 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(module, "_adaptor", lambda *_: found)
    return found


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    made = Watch(Settings(log_dir=str(tmp_path / "log")), {})
    yield made
    made.close()


def test_a_library_is_observed_once_from_its_import_until_the_end(watch: Watch, library: Library) -> None:
    watch.library_imported(ModuleType("triton"))
    first = library.observer
    library.observer = None
    watch.library_imported(ModuleType("triton"))

    assert first is watch.observer
    assert library.observer is None
    watch.close()
    assert library.removed == 1


def test_an_adaptor_that_does_not_install_is_off_with_one_line(
    watch: Watch, library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    library.failing = True

    watch.library_imported(ModuleType("triton"))

    (line,) = [record.getMessage() for record in caplog.records]
    assert "the compiles of a compiler are not observed" in line
    assert "another version" in line
    assert library.removed == 1


def test_a_library_that_only_starts_nvcc_is_left_alone_unless_that_is_asked_for(watch: Watch) -> None:
    watch.library_imported(ModuleType("torch.utils.cpp_extension"))

    assert watch._adaptors == {}


def test_compiles_count_from_the_start_or_from_serving(tmp_path: Path) -> None:
    def made(since: Any) -> Watch:
        return Watch(
            Settings(log_dir=str(tmp_path), on_engine_compile="error", on_engine_compile_from=since), {}
        )

    assert made("start").observer.on_compile == "error"
    serving = made("serving")
    assert serving.observer.on_compile == "ignore"
    serving.mark_serving()
    assert serving.observer.on_compile == "error"


def test_only_a_compile_that_was_forbidden_changes_the_exit_status(tmp_path: Path) -> None:
    found = Watch(Settings(log_dir=str(tmp_path), on_engine_compile="error"), {})
    found.observer._sink = Told()
    found.observer.hit("triton", "k")
    assert found.exit_status() == 0

    found.observer.ended(found.observer.started("triton", key="k"), seconds=1.0)

    assert found.exit_status() == EXIT_ENGINE_COMPILED


def test_compiles_before_serving_do_not_change_it(tmp_path: Path) -> None:
    settings = Settings(log_dir=str(tmp_path), on_engine_compile="error", on_engine_compile_from="serving")
    found = Watch(settings, {})
    found.observer._sink = Told()
    found.observer.ended(found.observer.started("triton", key="early"), seconds=1.0)

    found.mark_serving()

    assert found.exit_status() == 0


def test_without_a_home_it_observes_and_says_that_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    found = Watch(Settings(), {})

    found.observer.ended(found.observer.started("triton", key="k"), seconds=1.0)
    found.close()

    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "PREFETCHD_LOG_DIR" in line
    assert found.observer.figures()["triton.compiles"] == 1


PROGRAM = """
import json, sys
import {imports}
loaded = sorted(name for name in sys.modules if name.startswith("prefetchd.observing"))
print(json.dumps(loaded))
"""


def engine(imports: str, **variables: str) -> tuple[list[str], str]:
    """What of ours is loaded in an engine under `prefetchd run` that has imported these."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "triton.py").write_text("")
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(imports=imports)],
            env={
                "PATH": os.environ["PATH"],
                "HOME": folder,
                "PYTHONPATH": f"{SITE}:{folder}:{ROOT}",
                "PREFETCHD": "1",
                **variables,
            },
            capture_output=True, text=True, timeout=LIMIT_S, check=True,
        )  # fmt: skip
    loaded: list[str] = json.loads(done.stdout)
    return loaded, done.stderr


def test_an_engine_that_imports_no_such_library_has_nothing_of_ours() -> None:
    assert engine("decimal") == ([], "")


def test_one_that_does_is_observed_and_its_odd_library_costs_a_line() -> None:
    loaded, said = engine("triton")

    assert "prefetchd.observing.watch" in loaded
    (line,) = said.splitlines()
    assert "are not observed in process" in line


def test_switched_off_the_import_loads_nothing() -> None:
    assert engine("triton", PREFETCHD_OBSERVE="0") == ([], "")
    assert engine("triton", PREFETCHD="0") == ([], "")


WORKER = """
import multiprocessing, os, sys
from prefetchd.observing import watch as module
from prefetchd.config import Settings

def work(name):
    found = module.watch(dict(os.environ))

    def look():
        found.observer.ended(found.observer.started("triton", key=name), seconds=1)

    # As an adaptor does that looks every second: what it sees at the very end belongs to the log too.
    found.recorder.every_second(look)

if __name__ == "__main__":
    if sys.argv[2] == "early":
        module.watch(dict(os.environ))
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(sys.argv[1],))
    worker.start()
    worker.join()
"""


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_what_a_worker_compiled_last_is_in_the_log(method: str, when: str, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(WORKER)
    environment = {**os.environ, "PREFETCHD_LOG_DIR": str(tmp_path / "log"), "PYTHONPATH": str(ROOT)}

    subprocess.run([sys.executable, script, method, when], env=environment, check=True, timeout=LIMIT_S)

    (log,) = (tmp_path / "log").glob("*.jsonl")
    assert f'"key":"{method}"' in log.read_text()
