"""What an engine compiled itself is recorded so that it can be compiled ahead from the record alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("cutlass.cute")

from cute_site import VARIABLE, Site

from prefetchd.compilers.base import NotRebuildable, fingerprint_id
from prefetchd.pipeline import Ending
from prefetchd.shapelog import Record, decode_record, encode_record

PREFETCHD = Path(sys.executable).with_name("prefetchd")
CALLS = ("scale", "decode", "prefill.aligned", "prefill.ragged")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, list[Record], dict[str, float]]:
    site = Site(tmp_path_factory.mktemp("observed"))
    answer = site.process("observed", *CALLS)
    assert answer["open"] == 0
    records = [decode_record(line.encode()) for line in answer["records"]]
    return site, records, answer["figures"]


@pytest.mark.slow
def test_each_compile_is_recorded_once_with_namespace_key_duration_and_place(
    observed: tuple[Site, list[Record], dict[str, float]],
) -> None:
    _, records, figures = observed

    assert figures["cute_dsl.compiles"] == len(CALLS)
    assert [record.ok and record.seconds > 0 and record.compiler for record in records] == ["cute_dsl"] * 4
    namespaces = [record.rebuild["namespace"] for record in records if record.rebuild]
    assert (
        namespaces
        == ["cute_kernels:compile_scale", "cute_kernels:decode_cache"] + ["cute_kernels:prefill_cache"] * 2
    )
    assert all("cute_kernels" in record.site for record in records)
    # Aligned and ragged differ in one place of the key, and that is what is told.
    assert "[3]: True -> False" in records[3].changed or "[3]" in records[3].changed


@pytest.mark.slow
@pytest.mark.ci
def test_records_alone_fill_the_store_for_an_engine_that_may_not_compile(
    observed: tuple[Site, list[Record], dict[str, float]],
) -> None:
    site, records, _ = observed
    compiler = site.compiler()

    outcomes = site.warm([compiler.rebuild(record) for record in records])
    answer = site.process("engine-forbidden", *CALLS)
    again = site.process("observed", *CALLS)

    assert [(outcome.ending, outcome.text) for outcome in outcomes] == [(Ending.COMPILED, "")] * len(CALLS)
    assert answer["counts"] == {"hit": len(CALLS)}
    assert again["figures"]["cute_dsl.hits"] == len(CALLS)
    assert "cute_dsl.compiles" not in again["figures"]
    assert again["preloaded"] == ["cutlass.cute", "runtime", "tvm_ffi"]


@pytest.mark.slow
def test_the_replay_command_compiles_from_a_log_without_a_provider(
    observed: tuple[Site, list[Record], dict[str, float]], tmp_path: Path
) -> None:
    recorded_by, records, _ = observed
    site = Site(tmp_path)
    # What a recorder adds to what the observer tells.
    known = {"gpu": site.target.name, "capability": 90, "sm_count": site.target.sm_count}
    known["fingerprint"] = fingerprint_id(recorded_by.compiler().fingerprint())
    log = tmp_path / "host.rank0.jsonl"
    log.write_bytes(b"".join(encode_record(msgspec.structs.replace(each, **known)) for each in records[:2]))
    # Where the store lies is part of a fingerprint, as every compiler's root is.
    environment = {**site.environment, VARIABLE: str(recorded_by.root)}
    shutil.rmtree(recorded_by.root, ignore_errors=True)

    done = subprocess.run(
        [str(PREFETCHD), "replay", str(log), "--target", "h200", "--json"], env=environment, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["rebuilt"], answer["compiled"], answer["failed"]) == (2, 2, 0)
    assert recorded_by.process("engine-forbidden", "scale", "decode")["counts"] == {"hit": 2}


@pytest.mark.slow
def test_a_record_reaches_nothing_but_the_places_that_are_known(
    observed: tuple[Site, list[Record], dict[str, float]],
) -> None:
    site, (scale, decode, *_), _ = observed
    compiler = site.compiler()

    def changed(record: Record, **changes: object) -> Record:
        rebuild = msgspec.to_builtins(record.rebuild) | changes
        return msgspec.structs.replace(record, rebuild=rebuild)

    call = msgspec.to_builtins(decode.rebuild)["call"]
    strangers = {
        "namespace": changed(scale, namespace="os:system"),
        "architecture": changed(scale, architecture="sm_100a"),
        "rebuild.call": changed(decode, call=call | {"module": "os"}),
        "rebuild": changed(decode, call=call | {"function": "../../x"}),
        "key": changed(scale, name="x-" + "0" * 40),
        "ok": msgspec.structs.replace(scale, ok=False),
        "absent": msgspec.structs.replace(scale, rebuild=None),
    }
    for reason, record in strangers.items():
        with pytest.raises(NotRebuildable, match=reason):
            compiler.rebuild(record)
