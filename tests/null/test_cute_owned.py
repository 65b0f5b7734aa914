"""Kernels that a library keeps in an object of its own: baked, proved, and replayed from records."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("cutlass.cute")

from cute_site import Site

from prefetchd.compilers.base import NotRebuildable
from prefetchd.compilers.cute_dsl import payload_of
from prefetchd.cute.artifacts import find, names
from prefetchd.pipeline import Ending
from prefetchd.shapelog import decode_record

CALLS = ("owned.object", "owned.other", "owned.cached")
NAMESPACES = ["cute_owned:Adder.compile"] * 2 + ["cute_owned:Cached.compile"]


def site_in(place: Path, *, allowed: bool = True, other: bool = False) -> Site:
    site = Site(place, other=other)
    if allowed:
        site.environment["PREFETCHD_REPLAY_PACKAGES"] = "cute_owned"
    return site


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("other", [False, True])
def test_captured_kernels_are_compiled_proved_and_loaded_by_an_engine_that_may_not_compile(
    tmp_path: Path, other: bool
) -> None:
    site = site_in(tmp_path, other=other)

    jobs = site.capture(*CALLS)
    outcomes = site.warm(jobs)
    proof = site.process("forbid", *CALLS)
    engine = site.process("engine-forbidden", *CALLS)

    assert [(outcome.ending, outcome.text) for outcome in outcomes] == [(Ending.COMPILED, "")] * len(CALLS)
    assert sorted(job.key for job in jobs) == names(site.root)
    assert (proof["jobs"], proof["raised"]) == ([], [])
    assert engine["counts"] == {"hit": len(CALLS)}
    if not other:
        # An older DSL has no functions with names.
        found = [find(site.root, name) for name in names(site.root)]
        signatures = [each.artifact.signature for each in found if each is not None]
        assert [each.names[:3] for each in signatures if each is not None] == [("x", "y", "n")] * len(CALLS)
        assert signatures[0] is not None
        assert (signatures[0].names[-1], signatures[0].defaults) == ("offset", (["i", "0"],))


@pytest.mark.slow
def test_observed_compiles_are_made_again_from_their_records_alone(tmp_path: Path) -> None:
    site = site_in(tmp_path)
    records = [decode_record(line.encode()) for line in site.process("observed", *CALLS)["records"]]
    compiler = site.compiler()

    outcomes = site.warm([compiler.rebuild(record) for record in records])

    assert [record.rebuild["namespace"] for record in records if record.rebuild] == NAMESPACES
    assert "compile_key.amount: 1 -> 2" in records[1].changed
    assert [(outcome.ending, outcome.text) for outcome in outcomes] == [(Ending.COMPILED, "")] * len(CALLS)
    assert site.process("engine-forbidden", *CALLS)["counts"] == {"hit": len(CALLS)}
    # On a machine where nobody has allowed the package by name the same records are refused.
    with pytest.raises(NotRebuildable, match="replay_packages"):
        site_in(tmp_path / "strict", allowed=False).compiler().rebuild(records[0])
    call = msgspec.to_builtins(records[0].rebuild)["call"] | {"module": "os", "function": "system"}
    stranger = msgspec.to_builtins(records[0].rebuild) | {"namespace": "os:system", "call": call}
    with pytest.raises(NotRebuildable, match=r"rebuild\.namespace"):
        compiler.rebuild(msgspec.structs.replace(records[0], rebuild=stranger))


@pytest.mark.slow
def test_a_function_of_an_allowed_package_that_compiles_nothing_is_not_called(tmp_path: Path) -> None:
    site = site_in(tmp_path)
    (job,) = site.capture(CALLS[0])
    variant = payload_of(job)
    assert variant.call is not None
    call = msgspec.structs.replace(variant.call, function="touch", arguments={})
    namespace = "cute_owned:touch"
    other = site.compiler().job(msgspec.structs.replace(variant, namespace=namespace, call=call))

    (outcome,) = site.warm([other])

    assert outcome.ending is Ending.FAILED
    assert "nothing compiled by the DSL" in outcome.text
    assert not list(tmp_path.rglob("touched"))


@pytest.mark.slow
def test_a_package_that_nobody_allowed_is_compiled_by_the_engine_without_a_name(tmp_path: Path) -> None:
    site = site_in(tmp_path, allowed=False)

    records = [decode_record(line.encode()) for line in site.process("observed", CALLS[0])["records"]]

    assert [record.key for record in records] == [""]
    assert site.process("forbid", CALLS[0])["raised"][0].startswith("Miss: cute_owned.AddKernel")
