"""`prefetchd warm` end to end: what it counts is what it compiles, and what an engine then finds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest
from warming import NEW, TOKENS, Bench, Line, Warmed, old_line, profile_text, site

TARGETS = ("h200", "b200")

Warm = Callable[[Line, str], Warmed]
New = Callable[..., Bench]


@pytest.mark.parametrize("target", TARGETS)
def test_dry_run_names_exactly_the_variants_that_are_then_compiled(
    warmed: Warm, line: Line, target: str
) -> None:
    made = warmed(line, target)

    assert (made.dry.status, made.first.status) == (0, 0), made.first.err
    variants = made.dry.figures["variants"]
    assert variants > 4
    assert made.dry.counts("hits", "compiled", "failed", "uncovered") == (0, 0, 0, 0)
    assert made.first.counts("variants", "hits", "compiled", "failed", "uncovered") == (
        variants, 0, variants, 0, 0,
    )  # fmt: skip
    assert len(made.bench.entries()) == variants
    assert all({path.name for path in entry.iterdir()} == set(line.files) for entry in made.bench.entries())


@pytest.mark.parametrize("target", TARGETS)
def test_engine_whose_nvcc_fails_runs_every_m_after_a_warm_up(
    warmed: Warm, new_bench: New, line: Line, target: str
) -> None:
    bench = warmed(line, target).copy(new_bench("engine", line, target))
    before = bench.entries()

    swept = bench.engine()

    assert swept["calls"] > 2 * TOKENS
    assert swept["failed"] == []
    assert bench.nvcc.compiles() == []
    assert bench.entries() == before


def test_engine_misses_an_entry_that_is_taken_away(warmed: Warm, new_bench: New, line: Line) -> None:
    bench = warmed(line, "h200").copy(new_bench("engine", line))
    (taken,) = [entry for entry in bench.entries() if "transpose" in entry.name]
    shutil.rmtree(taken)

    swept = bench.engine()

    assert swept["failed"]
    assert bench.nvcc.compiles()


@pytest.mark.parametrize("target", TARGETS)
def test_second_run_compiles_nothing_and_takes_less_than_ten_seconds(warmed: Warm, target: str) -> None:
    made = warmed(NEW, target)
    compiles = made.bench.nvcc.compiles()
    begun = sum(os.times()[2:4])

    second = made.bench.warm("--max-tokens", str(TOKENS))

    # Of CPU, in all of its processes: what else runs on this machine is no fault of it.
    assert sum(os.times()[2:4]) - begun < 10
    variants = made.first.figures["variants"]
    assert second.status == 0
    assert second.counts("variants", "hits", "compiled") == (variants, variants, 0)
    assert second.result["compile_cpu_s"] == 0
    assert made.bench.nvcc.compiles() == compiles


def test_json_is_one_object_of_the_documented_form(warmed: Warm) -> None:
    made = warmed(NEW, "h200")

    for run in (made.dry, made.first):
        result = run.result
        assert run.err == ""
        assert {"target": result["target"], "max_tokens": result["max_tokens"]} == {
            "target": "h200",
            "max_tokens": TOKENS,
        }
        assert all(
            isinstance(result[name], float)
            for name in ("trace_s", "compile_wall_s", "compile_cpu_s", "prove_s")
        )
        assert set(result["providers"]) == {"deep_gemm"}
        assert set(run.figures) >= {
            "requests", "variants", "hits", "compiled", "failed", "uncovered", "requests_detail",
        }  # fmt: skip
        detail = run.figures["requests_detail"]
        assert sum(each["requests"] for each in detail) == run.figures["requests"]
        for each in detail:
            assert isinstance(each["request"], str)
            assert each["variants"] > 0
            assert each["seconds"] > 0
    assert made.first.result["compile_cpu_s"] > 0
    assert made.first.result["prove_s"] > 0


def test_run_leaves_no_temporary_files(warmed: Warm) -> None:
    assert warmed(NEW, "h200").bench.leftovers() == []


def test_site_of_an_unknown_op_is_reported_and_never_covered(bench: Bench) -> None:
    bench.profile.write_text(profile_text(site(m="1"), site("odd", "fp9_gemm_nt", m="1..8")))

    done = bench.warm("--dry-run")

    assert done.status == 1
    (problem,) = done.result["problems"]
    assert (problem["kind"], problem["requests"]) == ("unknown", 8)
    assert "odd" in problem["what"]
    assert "fp9_gemm_nt" in problem["text"]


def test_package_in_the_working_directory_is_not_taken_for_the_installed_one(bench: Bench) -> None:
    # As in a checkout of the library.
    (bench.place / "deep_gemm").mkdir()
    (bench.place / "deep_gemm/__init__.py").write_text("raise ImportError('the checkout was imported')\n")

    done = bench.warm("--dry-run")

    assert done.status == 0, done.out


def test_working_directory_may_be_gone(bench: Bench) -> None:
    gone = bench.place / "gone"
    gone.mkdir()
    command = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone), *bench.command("--dry-run")]

    done = subprocess.run(command, env=bench.environment(), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_profile_that_holds_nothing_is_not_called_covered(bench: Bench) -> None:
    bench.profile.write_text(profile_text())

    done = bench.warm()

    assert done.status == 2
    assert "holds nothing" in done.err
    assert "deep_gemm" in done.err


def test_site_that_its_family_cannot_serve_ends_the_command_with_its_name(bench: Bench) -> None:
    bench.profile.write_text(profile_text(site(m="1") + "[gemms.options]\ncolour = 'red'\n"))

    done = bench.warm("--dry-run")

    assert done.status == 2
    assert "site 'dense'" in done.err
    assert "'colour'" in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param("new", "h200", marks=pytest.mark.ci),
        ("new", "b200"),
        pytest.param("old", "h200", marks=pytest.mark.ci),
        ("old", "b200"),
    ],
)
def test_kernels_of_the_real_nvcc_serve_an_engine_whose_nvcc_fails(
    new_bench: New, name: str, target: str
) -> None:
    line = NEW if name == "new" else old_line()
    bench = new_bench("real", line, target)
    real = shutil.which("nvcc")

    done = bench.warm("--max-tokens", "4", changes={"DG_JIT_NVCC_COMPILER": real})
    again = bench.warm("--max-tokens", "4", changes={"DG_JIT_NVCC_COMPILER": real})
    swept = bench.engine(4)

    assert done.status == 0, done.out
    variants = done.figures["variants"]
    assert done.counts("hits", "compiled") == (0, variants)
    assert done.result["compile_cpu_s"] > 0
    assert again.counts("hits", "compiled", "uncovered") == (variants, 0, 0)
    assert swept["failed"] == []
    assert bench.nvcc.compiles() == []
