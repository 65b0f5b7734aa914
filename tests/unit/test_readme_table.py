"""The documents say what the stored results say: a number changed on either side is found."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/benchmarks.md")


def readme(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPOSITORY / "bench/readme.py", "--root", root, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The documents and the results, to be changed."""
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    return tmp_path


def test_documents_are_what_the_results_say() -> None:
    done = readme(REPOSITORY, "--check")

    assert done.returncode == 0, done.stderr


def test_number_changed_by_hand_is_found_and_written_anew(copy: Path) -> None:
    path = copy / "README.md"
    text = path.read_text()
    changed = re.sub(r"\d+ variants for H200", "7 variants for H200", text)
    assert changed != text
    path.write_text(changed)

    assert readme(copy, "--check").returncode == 1
    assert path.read_text() == changed
    assert readme(copy).returncode == 0
    assert path.read_text() == text


def test_other_result_is_found(copy: Path) -> None:
    path = copy / "docs/results/chaos.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"rounds": found["rounds"] + 1}))

    done = readme(copy, "--check")

    assert done.returncode == 1
    assert "README.md is not what the results say" in done.stderr


def test_run_on_the_null_device_is_no_result(copy: Path) -> None:
    run = {
        "null": True,
        "part": "hit",
        "machine": {"cores": 3},
        "figures": {"rows": [{"entries": 5, "p50_us": 77}]},
    }
    path = copy / "docs/results/scaling.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []

    path.write_text(json.dumps({"runs": [*runs, run]}))
    assert readme(copy, "--check").returncode == 0
    path.write_text(json.dumps({"runs": [*runs, run | {"null": False}]}))
    assert readme(copy, "--check").returncode == 1


def test_start_of_an_engine_is_one_on_the_null_device(copy: Path) -> None:
    """There its counts are true, and the README says what its times are."""
    start = {"up_s": 41.0, "first_prompt_s": 0.2, "compiles": {"triton": 4711}}
    run = {"part": "replay", "model": "kimi-linear", "target": "h200", "cold": start, "replayed": start}
    path = copy / "docs/results/vllm.json"
    runs = json.loads(path.read_text())["runs"]

    path.write_text(json.dumps({"runs": [*runs, run | {"null": False}]}))
    assert readme(copy, "--check").returncode == 0
    path.write_text(json.dumps({"runs": [*runs, run | {"null": True}]}))
    assert readme(copy).returncode == 0
    assert "41 s + 0.20 s; 4711 Triton compiled" in (copy / "README.md").read_text()


def test_unknown_part_is_named(copy: Path) -> None:
    path = copy / "docs/benchmarks.md"
    path.write_text(path.read_text() + "\n<!-- generated: nonsense -->\n<!-- end of nonsense -->\n")

    done = readme(copy)

    assert done.returncode == 1
    assert "part 'nonsense' is not known" in done.stderr
    assert all((copy / name).exists() for name in DOCUMENTS)
