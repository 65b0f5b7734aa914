"""Many logs as one: what is kept of each variant, whatever the order; and compacting in place."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.shapelog import (
    Ended,
    LogUnusable,
    Merged,
    Record,
    Started,
    compact,
    encode_line,
    encode_record,
    log_files,
    write_merged,
)
from prefetchd.shapelog import merging as merging_module
from prefetchd.shapelog.stats import log_stats


def record(key: str = "k", **fields: object) -> Record:
    return msgspec.convert({"compiler": "triton", "key": key, "fingerprint": "f", **fields}, Record)


def log(path: Path, *lines: Record | Started | Ended) -> Path:
    path.write_bytes(b"".join(map(encode_line, lines)))
    return path


def merged(tmp_path: Path, *lines: Record | Started | Ended) -> list[Record]:
    return list(Merged([log(tmp_path / "a.jsonl", *lines)]))


def test_variants_come_the_dearest_first(tmp_path: Path) -> None:
    found = merged(tmp_path, record("a", seconds=1), record("b", seconds=6.4), record("c", seconds=2))

    assert [each.key for each in found] == ["b", "c", "a"]


def test_cost_is_the_dearest_and_what_rebuilds_it_comes_from_whoever_has_it(tmp_path: Path) -> None:
    (found,) = merged(
        tmp_path,
        record(seconds=1, request={"op": "fp8_gemm_nt"}, provider="deep_gemm"),
        record(seconds=5, site="model.py:9", rank=3),
        record(seconds=2, rebuild={"source": "text"}),
    )

    assert (found.seconds, found.site, found.rank) == (5, "model.py:9", 3)
    assert (found.provider, found.request) == ("deep_gemm", {"op": "fp8_gemm_nt"})
    assert found.rebuild == {"source": "text"}


def test_compile_that_succeeded_tells_the_cost_before_one_that_failed(tmp_path: Path) -> None:
    (found,) = merged(tmp_path, record(seconds=600, ok=False), record(seconds=5))

    assert (found.seconds, found.ok) == (5, True)


def test_request_is_kept_with_its_own_provider_or_with_none(tmp_path: Path) -> None:
    (found,) = merged(
        tmp_path,
        record(seconds=5, provider="kda", request={}),
        record(seconds=1, request={"op": "fp8_gemm_nt"}),
    )

    assert (found.seconds, found.provider, found.request) == (5, "", {"op": "fp8_gemm_nt"})


@pytest.mark.parametrize(
    "others",
    [
        {"provider": "kda"},
        {"job_digest": "d"},
        {"version": 2},
        {"site": "model.py:9"},
    ],
)
def test_records_that_cost_the_same_are_told_apart_whichever_comes_first(
    tmp_path: Path, others: dict[str, object]
) -> None:
    one, two = record(), record(**others)

    assert merged(tmp_path, one, two) == merged(tmp_path, two, one)


def test_other_fingerprints_are_other_variants_and_are_kept(tmp_path: Path) -> None:
    found = merged(tmp_path, record(), record(fingerprint="g"), record())

    assert sorted(each.fingerprint for each in found) == ["f", "g"]


def test_records_without_a_key_are_told_apart_by_their_digest(tmp_path: Path) -> None:
    found = merged(
        tmp_path, record("", job_digest="1"), record("", job_digest="2"), record("", job_digest="1")
    )

    assert sorted(each.job_digest for each in found) == ["1", "2"]


def test_fields_of_a_newer_version_survive_merging(tmp_path: Path) -> None:
    fields = {"compiler": "triton", "key": "k", "fingerprint": "f", "version": 2, "weather": "fine"}
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        msgspec.json.encode(fields | {"seconds": 5.0}) + b"\n" + encode_record(record(rebuild={}))
    )

    ((line, _),) = Merged([path]).lines()

    assert msgspec.json.decode(line) == fields | {"seconds": 5.0, "rebuild": {}}


def test_unended_compiles_are_kept_and_ended_ones_dropped(tmp_path: Path) -> None:
    started = [Started(compiler="triton", token=token, process="1-1", rank=token % 2) for token in (1, 2, 3)]
    path = log(tmp_path / "a.jsonl", *started, Ended(token=2, process="1-1"), record())

    write_merged(Merged([path]), tmp_path / "out.jsonl")

    assert [line.token for line in Merged([tmp_path / "out.jsonl"]).unfinished] == [1, 3]


def test_compacting_keeps_what_a_newer_version_wrote_and_drops_what_nobody_can_read(tmp_path: Path) -> None:
    path = log(tmp_path / "a.jsonl", record(seconds=1), record(seconds=2))
    with path.open("ab") as file:
        file.write(b'{"kind":"weather","text":"fine"}\nnoise\n')

    done = compact(path)

    assert (done.records, done.duplicates, done.unreadable) == (1, 1, 1)
    assert path.read_bytes().splitlines() == [
        encode_record(record(seconds=2)).strip(),
        b'{"kind":"weather","text":"fine"}',
    ]
    assert (done.before, done.after) == (done.before, path.stat().st_size)


def test_compacting_twice_changes_nothing(tmp_path: Path) -> None:
    path = log(tmp_path / "a.jsonl", *(record(f"k{number % 7}", seconds=number) for number in range(50)))
    compact(path)
    first = path.read_bytes()

    compact(path)

    assert path.read_bytes() == first


def test_failed_compaction_leaves_the_log_and_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log(tmp_path / "a.jsonl", record(), record())
    before = path.read_bytes()

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(LogUnusable, match="No space left"):
        compact(path)

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_compacting_what_is_not_there_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(LogUnusable, match="cannot be read"):
        compact(tmp_path / "a.jsonl")

    assert not list(tmp_path.iterdir())


def test_log_replaced_while_it_is_merged_costs_its_lines_only(tmp_path: Path) -> None:
    one = log(tmp_path / "a.jsonl", record("a", seconds=3), record("b", seconds=2))
    two = log(tmp_path / "b.jsonl", record("c", seconds=1))
    both = Merged([one, two])
    log(one, record("other", seconds=9, site="x" * 50))

    assert [each.key for each in both] == ["c"]
    assert both.problems.count == 2
    assert "changed while it was read" in both.problems.first[0]


def test_more_variants_than_are_kept_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging_module, "MAX_VARIANTS", 3)
    both = Merged([log(tmp_path / "a.jsonl", *(record(f"k{number}") for number in range(5)))])

    assert (len(list(both)), both.left_out) == (3, 2)


def test_more_logs_than_files_may_be_open_are_merged(tmp_path: Path) -> None:
    for rank in range(merging_module.MAX_OPEN + 10):
        log(tmp_path / f"n.rank{rank}.jsonl", record(f"k{rank}", seconds=rank), record("shared", rank=rank))

    assert len(list(Merged(log_files([tmp_path])))) == merging_module.MAX_OPEN + 11


values = st.one_of(st.integers(0, 3), st.sampled_from(["a", "bb"]))
parts = st.none() | st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2)
some_records = st.builds(
    Record,
    compiler=st.sampled_from(["triton", "deep_jit"]),
    key=st.sampled_from(["", "k1", "k2"]),
    job_digest=st.sampled_from(["", "d"]),
    fingerprint=st.sampled_from(["f", "g"]),
    seconds=st.sampled_from([0.0, 1.0, 2.5]),
    ok=st.booleans(),
    cause=st.sampled_from(["planned", "late", "unplanned"]),
    at=st.sampled_from([0.0, 10.0]),
    site=st.sampled_from(["", "here"]),
    rank=st.integers(0, 1),
    provider=st.sampled_from(["", "p"]),
    request=parts,
    rebuild=parts,
)


def outcome(*paths: Path) -> list[bytes]:
    """What merging gives, with equal things written equally."""
    return [msgspec.json.encode(each, order="sorted") for each in Merged(paths)]


@settings(max_examples=150)
@given(st.lists(st.lists(some_records, max_size=5), min_size=2, max_size=3))
def test_order_and_grouping_of_logs_make_no_difference(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[Record]]
) -> None:
    directory = tmp_path_factory.mktemp("merge")
    paths = [log(directory / f"{number}.jsonl", *group) for number, group in enumerate(groups)]
    whole = outcome(*paths)

    for order in itertools.permutations(paths):
        assert outcome(*order) == whole
    write_merged(Merged(paths[:-1]), directory / "part.jsonl")
    assert outcome(directory / "part.jsonl", paths[-1]) == whole
    assert outcome(*paths, *paths) == whole


@given(st.lists(some_records, max_size=12))
def test_merging_keeps_each_variant_once_with_all_that_is_known(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Record]
) -> None:
    path = log(tmp_path_factory.getbasetemp() / "lines.jsonl", *lines)

    found = {each.identity: each for each in Merged([path])}

    assert set(found) == {line.identity for line in lines}
    for identity, kept in found.items():
        same = [line for line in lines if line.identity == identity]
        assert kept.seconds == max(line.seconds for line in same if line.ok == kept.ok)
        assert kept.ok == any(line.ok for line in same)
        assert (kept.request is None) == all(line.request is None for line in same)
        assert (kept.rebuild is None) == all(line.rebuild is None for line in same)
    costs = [each.seconds for each in Merged([path])]
    assert costs == sorted(costs, reverse=True)
    stats = log_stats([path])
    assert (stats.total.records, stats.total.variants) == (len(lines), len(found))
    assert sum(count.records for count in stats.compilers.values()) == len(lines)
