"""Winners on the null device: the library's own look-up finds what was seeded, and measures nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton")

from answering import answer_of
from triton_site import other_triton

from prefetchd.collect import read_all
from prefetchd.compilers.triton_cache import digest_of
from prefetchd.compilers.triton_results import Answers, given_for, result_path
from prefetchd.coverage import Ledger, WinnerFigures
from prefetchd.null_device.launcher import KEEP_NO_TIMINGS, environment
from prefetchd.targets import load_target
from prefetchd.tuned import TuningBooks
from prefetchd.winners import (
    Given,
    Tuning,
    Winner,
    append_winners,
    configuration,
    read_winners,
)

HERE = Path(__file__).parent
H200 = load_target("h200")
LINES = ["installed", pytest.param("other", marks=pytest.mark.slow)]
LIMIT_S = 300
# What `winners_kernels.run_all` asks, and how many candidates its first two kernels have.
TUNINGS = 4
CANDIDATES = 3


class Place:
    """An engine's cache under one version of Triton, and processes that work on it."""

    def __init__(self, folder: Path, line: str) -> None:
        self.folder = folder
        self.root = folder / "cache"
        paths = [str(HERE), *([str(other_triton())] if line == "other" else [])]
        self.base = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": ":".join(paths),
            "TRITON_CACHE_DIR": str(self.root),
        }
        self._count = 0

    def process(self, mode: str, calls: str, *arguments: str, **changes: str) -> dict[str, Any]:
        child = environment(H200, {**self.base, **changes}, integer_ops=True)
        if mode != "trace":
            # An engine keeps timings; these are made up, and end with the test's folder.
            for name in KEEP_NO_TIMINGS:
                child.pop(name, None)
                if name in changes:
                    child[name] = changes[name]
        return answer_of((str(HERE / "winners_process.py"), mode, calls, *arguments), child)

    def trace(self, calls: str, told: Given | None = None, **changes: str) -> dict[str, Any]:
        self._count += 1
        scratch = self.folder / f"scratch-{self._count}"
        scratch.mkdir()
        arguments = ["--scratch", str(scratch)]
        if told is not None:
            (scratch / "given.json").write_bytes(msgspec.json.encode(told))
            arguments += ["--given", str(scratch / "given.json")]
        answer = self.process("trace", calls, *arguments, **changes)
        answer["tunings"] = msgspec.convert(answer["tunings"], list[Tuning])
        return answer

    def engine(self, calls: str, **changes: str) -> dict[str, Any]:
        return self.process("engine", calls, **changes)

    def seed(self, tunings: list[Tuning], winners: list[Winner]) -> tuple[WinnerFigures, list[str]]:
        """As a warm-up does it."""
        ledger = Ledger("h200", 1, dry_run=False)
        ledger.add_provider("kda")
        books = TuningBooks(Answers(given_for({}, tuple(winners)), H200, self.root), self.root, ledger)
        books.met("kda", tunings)
        books.seed()
        books.close()
        return ledger.winners("kda"), ledger.coverage.notes

    def results(self) -> list[Path]:
        return sorted(self.root.rglob("*.autotune.json"))


def by_hand(tuning: Tuning, index: int = 0, **fields: Any) -> Winner:
    """As if measured on the target; the first candidate, which the tests' own benchmark never chooses."""
    values: dict[str, Any] = {
        "gpu": H200.name,
        "sm_count": H200.sm_count,
        "triton": tuning.triton,
        "module": tuning.module,
        "kernel": tuning.kernel,
        "source": tuning.source,
        "key": tuning.key,
        "config": configuration(tuning.candidates[index]),
        "timing_ms": [0.02, 0.02, 0.03],
    }
    return Winner(**{**values, **fields})


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Tuning]]:
    """What `all` asks, by the version of Triton."""
    known: dict[str, list[Tuning]] = {}

    def get(line: str) -> list[Tuning]:
        if line not in known:
            known[line] = Place(tmp_path_factory.mktemp(f"traced-{line}"), line).trace("all")["tunings"]
        return known[line]

    return get


@pytest.fixture(params=LINES)
def line(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(line: str, tmp_path: Path) -> Place:
    return Place(tmp_path, line)


@pytest.fixture
def tunings(line: str, traced: Callable[[str], list[Tuning]]) -> list[Tuning]:
    return traced(line)


@pytest.fixture
def kept(tunings: list[Tuning]) -> list[Tuning]:
    """Those of the kernel whose results are kept."""
    return [each for each in tunings if each.kernel == "kept"]


def test_every_tuning_is_met_with_its_key_its_candidates_and_how_its_result_is_kept(
    tunings: list[Tuning],
) -> None:
    assert len(tunings) == TUNINGS
    assert {(each.kernel, bool(each.entry), each.kept) for each in tunings} == {
        ("kept", True, True),
        ("forgotten", True, False),
        ("hooked", False, True),
    }
    assert [each.key for each in tunings if each.kernel == "kept"] == [
        [64, "torch.float32"],
        [100, "torch.float32"],
    ]
    blocks = [fields["kwargs"]["BLOCK"] for fields in tunings[0].candidates]
    assert blocks == [32, 64, 128]


def test_seeded_engine_measures_nothing_and_looks_up_only_the_winners(
    place: Place, kept: list[Tuning]
) -> None:
    winners = [by_hand(each) for each in kept]

    figures, notes = place.seed(kept, winners)
    chosen = place.trace("kept", given_for({}, tuple(winners)))
    answer = place.engine("kept")

    assert (figures, notes) == (WinnerFigures(known=2, seeded=2), [])
    assert answer["benchmarks"] == 0
    assert len(chosen["keys"]) == 2
    assert sorted(answer["made"]) == sorted(map(digest_of, chosen["keys"]))
    assert len(place.results()) == 2


def test_engine_keeps_its_results_where_the_trace_says_and_collecting_finds_its_winners(
    place: Place, kept: list[Tuning], tmp_path: Path
) -> None:
    before = place.engine("kept")
    found = read_all(kept, place.root, H200)

    assert before["benchmarks"] == 2 * CANDIDATES
    assert place.results() == sorted(result_path(place.root, each) for each in kept)
    assert [each.config.kwargs for each in found.winners] == [{"BLOCK": 128}] * 2
    assert (found.gpu, found.unmeasured, found.damaged, found.unasked) == ("NVIDIA H200", 0, 0, 0)
    # Written to a file, read again and seeded into another cache, they spare another engine the work.
    append_winners(tmp_path / "winners.jsonl", found.winners)
    place.base["TRITON_CACHE_DIR"] = str(tmp_path / "other")
    place.root = tmp_path / "other"
    figures, _ = place.seed(kept, read_winners(tmp_path / "winners.jsonl")[0])
    after = place.engine("kept")
    assert (figures.seeded, after["benchmarks"], len(after["made"])) == (2, 0, 2)


def test_winners_of_another_gpu_are_refused_and_the_engine_measures(place: Place, kept: list[Tuning]) -> None:
    figures, notes = place.seed(kept, [by_hand(each, gpu="NVIDIA H100 80GB HBM3") for each in kept])

    assert figures == WinnerFigures(missing=2, refused=2)
    assert "measured on NVIDIA H100 80GB HBM3 (132 SMs), not on this target" in notes[0]
    assert place.results() == []
    assert place.engine("kept")["benchmarks"] == 2 * CANDIDATES


def test_winner_whose_configuration_is_gone_is_dropped_and_all_candidates_stand(
    place: Place, kept: list[Tuning]
) -> None:
    winners = [by_hand(each) for each in kept]

    now = place.trace("kept", given_for({}, tuple(winners)), TEST_BLOCKS="16,64,128")
    figures, notes = place.seed(now["tunings"], winners)

    assert len(now["keys"]) == 2 * CANDIDATES
    assert figures == WinnerFigures(missing=2, dropped=2)
    assert "no longer among the candidates" in notes[0]
    assert place.results() == []


def test_engine_s_own_result_is_neither_replaced_nor_overruled(place: Place, kept: list[Tuning]) -> None:
    place.engine("kept")
    before = [(path, path.read_bytes(), path.stat().st_ino) for path in place.results()]
    winners = [by_hand(each) for each in kept]

    figures, _ = place.seed(kept, winners)
    chosen = place.trace("kept", given_for({}, tuple(winners)))
    answer = place.engine("kept")

    assert figures == WinnerFigures(known=2, present=2)
    assert [(path, path.read_bytes(), path.stat().st_ino) for path in place.results()] == before
    assert (answer["benchmarks"], answer["made"]) == (0, [])
    assert sorted(answer["found"]) == sorted(map(digest_of, chosen["keys"]))


def test_truncated_result_of_an_engine_is_skipped_with_its_name(place: Place, kept: list[Tuning]) -> None:
    place.engine("kept")
    path = result_path(place.root, kept[0])
    path.write_bytes(path.read_bytes()[:-20])

    found = read_all(kept, place.root, H200)

    assert (len(found.winners), found.damaged) == (1, 1)
    assert str(path) in found.notes[0]


def test_engine_that_keeps_no_results_gets_all_candidates_and_no_seed(
    place: Place, tunings: list[Tuning]
) -> None:
    winners = [by_hand(each) for each in tunings]

    told = place.trace("all", given_for({}, tuple(winners)))
    asked = place.trace("all", given_for({"TRITON_CACHE_AUTOTUNING": "1"}, tuple(winners)))
    figures, notes = place.seed(tunings, winners)

    assert sorted(told["kernels"]) == ["forgotten"] * CANDIDATES + ["hooked"] * 2 + ["kept"] * 2
    assert sorted(asked["kernels"]) == ["forgotten"] + ["hooked"] * 2 + ["kept"] * 2
    assert figures == WinnerFigures(known=2, seeded=2, missing=2, unread=2)
    assert any("set TRITON_CACHE_AUTOTUNING=1" in note for note in notes)
    assert any("a configuration has a hook" in note for note in notes)


def test_null_run_never_leaves_a_result(place: Place) -> None:
    place.trace("all", TRITON_CACHE_AUTOTUNING="1", FLA_CACHE_RESULTS="1")

    assert list(place.folder.rglob("*.autotune.json")) == []


def test_recorder_hears_winners_where_the_library_tells(place: Place, kept: list[Tuning], line: str) -> None:
    answer = place.process("listen", "kept")

    assert not answer["on_null_device"]
    if not answer["listening"]:
        assert kept[0].triton < "3.8"
        assert answer["heard"] == []
        return
    heard = msgspec.convert(answer["heard"], list[Winner])
    assert answer["others"] == answer["failures"] == ["kept", "kept"]
    assert [(each.gpu, each.sm_count) for each in heard] == [(H200.name, H200.sm_count)] * 2
    assert [(each.source, each.key, each.config.kwargs) for each in heard] == [
        (each.source, each.key, {"BLOCK": 128}) for each in kept
    ]


KDA = {
    "op": "chunk_kda",
    "tokens": 128,
    "heads": 4,
    "key_dim": 128,
    "value_dim": 128,
    "g_dtype": "float32",
    "beta_dtype": "float32",
    "initial_state": True,
    "final_state": True,
    "qk_l2norm": True,
}
PROFILE = """
model = "one KDA layer"
architecture = "handwritten"
version = 1
tp = 1
ep = 1
dp = 1
quantization = "bf16"
context_tokens = 1024

[[kernels]]
name = "kda"
op = "chunk_kda"
home = "fla"
sizes = { heads = 4, key_dim = 128, value_dim = 128 }
flags = { set = "vllm" }
"""


LIMITS = ("--target", "h200", "--provider", "kda", "--max-tokens", "128", "--json")


class TestKda:
    """fla's own tuners, by the command line."""

    def warm(self, place: Place, *arguments: str) -> dict[str, Any]:
        profile = place.folder / "kda.profile.toml"
        profile.write_text(PROFILE)
        done = subprocess.run(
            [sys.executable, "-m", "prefetchd", *arguments, "--profile", str(profile), *LIMITS],
            env=place.base,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "line", [pytest.param("installed", marks=pytest.mark.ci), "other"], indirect=True
    )
    def test_winners_alone_are_compiled_seeded_and_enough(self, place: Place, tmp_path: Path) -> None:
        pytest.importorskip("fla")
        traced = place.trace(json.dumps(KDA))
        winners = tmp_path / "winners.jsonl"
        append_winners(winners, [by_hand(each) for each in traced["tunings"]])
        directory = tmp_path / "fla"

        result = self.warm(place, "warm", "--winners", str(winners), "--fla-config-dir", str(directory))[
            "providers"
        ]["kda"]
        answer = place.engine(json.dumps(KDA))

        assert len(traced["keys"]) == 110
        assert (result["variants"], result["compiled"], result["uncovered"]) == (7, 7, 0)
        assert (result["winners"]["known"], result["winners"]["seeded"]) == (7, 7)
        assert (answer["benchmarks"], answer["made"], len(answer["found"])) == (0, [], 7)
        # What was seeded is what an engine would have written: it is collected as such.
        collected = self.warm(place, "winners", "collect", "--out", str(tmp_path / "again.jsonl"))
        again = {each.identity: each.config for each in read_winners(tmp_path / "again.jsonl")[0]}
        assert again == {each.identity: each.config for each in read_winners(winners)[0]}
        assert (collected["gpu"], collected["unasked"], collected["unmeasured"]) == (H200.name, 0, 0)
        # fla's own way to the same winners needs none of Triton's files.
        for path in place.results():
            path.unlink()
        answer = place.engine(json.dumps(KDA), FLA_CACHE_MODE="strict", FLA_CONFIG_DIR=str(directory))
        assert (answer["benchmarks"], answer["made"], len(answer["found"])) == (0, [], 7)
        assert place.results() == []
