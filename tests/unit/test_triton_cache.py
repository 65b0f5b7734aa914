"""Triton's cache on disk, judged and rewritten, on made-up groups: no library is needed."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest
from fake_cubin import fake_cubin

from prefetchd.compilers import triton_cache
from prefetchd.compilers.base import EntryState
from prefetchd.compilers.triton_cache import (
    IN_PROGRESS_S,
    LOOKED_UP_S,
    Incomplete,
    Unusable,
    check_entry,
    digest_of,
    entry_state,
    key_of,
    move_to_absent,
    relocate,
)
from prefetchd.store import publish_directory

DIGEST = "5a" * 32
KEY = key_of(DIGEST)


def group(root: Path, *, digest: str = DIGEST, arch: int = 90, cubin: bytes | None = None) -> Path:
    """A whole group under `KEY`, as the library leaves it."""
    entry = root / KEY
    entry.mkdir(parents=True)
    files = {
        "k.cubin": fake_cubin(90) if cubin is None else cubin,
        "k.json": json.dumps({"hash": digest, "target": {"backend": "cuda", "arch": arch}}).encode(),
        "k.ptx": b"// text",
    }
    for name, data in files.items():
        (entry / name).write_bytes(data)
    paths = {name: str(entry / name) for name in files}
    (entry / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
    return entry


def grow_old(entry: Path, seconds: float) -> None:
    for path in (*entry.iterdir(), entry):
        then = path.stat().st_mtime - seconds
        os.utime(path, times=(then, then))


def test_key_and_digest_are_two_spellings_of_one_number() -> None:
    assert digest_of(KEY) == DIGEST
    assert len(KEY) == 52


@pytest.mark.parametrize("name", ["", "../../etc", "ABC", KEY.lower(), KEY + "A", "a/b"])
def test_what_is_no_key_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no key of Triton's"):
        digest_of(name)


def test_whole_group_is_published(tmp_path: Path) -> None:
    assert entry_state(group(tmp_path), 90) is EntryState.PUBLISHED


def test_absent_and_looked_up_entries_are_missing(tmp_path: Path) -> None:
    assert entry_state(tmp_path / KEY, 90) is EntryState.MISSING
    (tmp_path / KEY).mkdir()
    assert entry_state(tmp_path / KEY, 90) is EntryState.MISSING


def test_file_and_dead_link_in_an_entrys_place_are_corrupt(tmp_path: Path) -> None:
    (tmp_path / KEY).write_text("")
    assert entry_state(tmp_path / KEY, 90) is EntryState.CORRUPT
    (tmp_path / KEY).unlink()
    (tmp_path / KEY).symlink_to(tmp_path / "nowhere")
    assert entry_state(tmp_path / KEY, 90) is EntryState.CORRUPT


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "k.ptx").unlink(),
        lambda entry: (entry / "__grp__k.json").unlink(),
        lambda entry: os.truncate(entry / "__grp__k.json", 30),
        lambda entry: os.truncate(entry / "__grp__k.json", 0),
        lambda entry: (entry / "__grp__other.json").write_text("{}"),
    ],
    ids=["no member", "no group", "half a group", "empty group", "two groups"],
)
def test_incomplete_group_is_an_engine_at_work_until_it_is_old(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    entry = group(tmp_path)
    damage(entry)

    assert entry_state(entry, 90) is EntryState.MISSING
    grow_old(entry, IN_PROGRESS_S)
    assert entry_state(entry, 90) is EntryState.CORRUPT


def test_entry_from_the_future_is_an_engine_at_work_for_as_long_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = group(tmp_path)
    (entry / "__grp__k.json").unlink()
    grow_old(entry, -1e7)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    assert entry_state(entry, 90) is EntryState.MISSING
    now += IN_PROGRESS_S - 1
    assert entry_state(entry, 90) is EntryState.MISSING
    now += 1
    assert entry_state(entry, 90) is EntryState.CORRUPT


def test_entry_from_the_future_that_is_written_to_again_is_young_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = group(tmp_path)
    (entry / "__grp__k.json").unlink()
    grow_old(entry, -1e7)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    entry_state(entry, 90)
    now += IN_PROGRESS_S
    grow_old(entry, -1.0)

    assert entry_state(entry, 90) is EntryState.MISSING


def test_entries_from_the_future_are_remembered_up_to_a_bound(tmp_path: Path) -> None:
    for number in range(triton_cache.MOST_FROM_THE_FUTURE + 3):
        entry = group(tmp_path / str(number))
        (entry / "__grp__k.json").unlink()
        grow_old(entry, -1e7)
        entry_state(entry, 90)

    assert len(triton_cache._from_the_future) == triton_cache.MOST_FROM_THE_FUTURE


def test_one_young_file_is_enough_for_an_engine_at_work(tmp_path: Path) -> None:
    entry = group(tmp_path)
    (entry / "__grp__k.json").unlink()
    grow_old(entry, IN_PROGRESS_S)
    (entry / "k.llir").write_text("")

    assert entry_state(entry, 90) is EntryState.MISSING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cubin": fake_cubin(100)}, "compiled for sm_100"),
        ({"arch": 100}, "described as for 100"),
        ({"digest": "00" * 32}, "describes another key"),
        ({"cubin": fake_cubin(90)[:-40]}, "is damaged"),
        ({"cubin": b""}, "is damaged"),
    ],
)
def test_whole_group_that_an_engine_would_fail_on_is_corrupt_at_once(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    entry = group(tmp_path, **changes)  # type: ignore[arg-type]

    assert entry_state(entry, 90) is EntryState.CORRUPT
    with pytest.raises(Unusable, match=reason):
        check_entry(entry, 90)


def test_moved_group_is_incomplete_until_it_is_relocated(tmp_path: Path) -> None:
    entry = group(tmp_path / "staging")
    final = tmp_path / "cache" / KEY
    relocate(entry, final)
    with pytest.raises(Incomplete, match="which is not there"):
        check_entry(entry, 90)

    assert publish_directory(entry, final, move_to_absent)

    assert entry_state(final, 90) is EntryState.PUBLISHED


def test_directory_an_engine_has_just_looked_into_is_left_to_it(tmp_path: Path) -> None:
    entry, final = group(tmp_path / "staging"), tmp_path / "cache" / KEY
    final.mkdir(parents=True)

    assert not publish_directory(entry, final, move_to_absent)

    assert list(final.iterdir()) == []


def test_long_empty_directory_is_taken(tmp_path: Path) -> None:
    entry, final = group(tmp_path / "staging"), tmp_path / "cache" / KEY
    final.mkdir(parents=True)
    grow_old(final, LOOKED_UP_S + 1)

    assert publish_directory(entry, final, move_to_absent)

    assert (final / "k.cubin").exists()


def test_old_files_of_an_engine_are_never_replaced(tmp_path: Path) -> None:
    entry, final = group(tmp_path / "staging"), tmp_path / "cache" / KEY
    final.mkdir(parents=True)
    (final / "k.ttir").write_text("theirs")
    grow_old(final, IN_PROGRESS_S)

    with pytest.raises(OSError, match=os.strerror(errno.EEXIST)):
        move_to_absent(entry, final)

    assert [path.name for path in final.iterdir()] == ["k.ttir"]
