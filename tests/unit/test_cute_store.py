"""The store of object files: whose files are believed, what a damaged one does, and what is removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefetchd.cute.artifacts import (
    OBJECT,
    RECORD,
    Artifact,
    StoreRefused,
    Unloadable,
    check_root,
    entry_name,
    evict,
    find,
    find_root,
    is_name,
    mark_used,
    names,
    write,
)

CONTENT = b"\x7fELF and more"


def put(root: Path, key: str, content: bytes = CONTENT, used: int = 0) -> str:
    name = entry_name("library:cache", key, "environment", "source")
    (root / name).mkdir(parents=True)
    artifact = Artifact(
        name=name, namespace="library:cache", key=key, kind="plain", symbol="s", architecture="sm_90a",
        object_sha256="", object_bytes=0,
    )  # fmt: skip
    write(root / name, artifact, content)
    if used:
        os.utime(root / name / RECORD, (used, used))
    return name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    place.mkdir(mode=0o700)
    return place


def test_an_entry_is_found_by_its_name(root: Path) -> None:
    name = put(root, "key")

    found = find(root, name)

    assert found is not None
    assert (found.artifact.key, found.artifact.object_bytes) == ("key", len(CONTENT))
    assert found.path.read_bytes() == CONTENT


def test_every_ingredient_changes_the_name() -> None:
    parts = ("library:cache", "key", "environment", "source")
    all_names = {entry_name(*parts)} | {
        entry_name(*(part + "x" if i == at else part for i, part in enumerate(parts))) for at in range(4)
    }

    assert len(all_names) == 5
    assert all(is_name(name) for name in all_names)


@pytest.mark.parametrize(
    "name", ["", "..", "a/b-" + "0" * 40, "-" + "0" * 40, "a-" + "0" * 39, "a-" + "g" * 40]
)
def test_what_is_no_name_leads_nowhere(name: str) -> None:
    assert not is_name(name)


@pytest.mark.parametrize("file", [OBJECT, RECORD])
@pytest.mark.parametrize("damage", ["cut", "changed", "absent", "link", "directory"])
def test_a_damaged_entry_is_unusable_and_says_why(root: Path, file: str, damage: str) -> None:
    name = put(root, "key")
    path = root / name / file
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-2])
    elif damage == "changed":
        path.write_bytes(content[:-1] + b"!")
    elif damage == "link":
        path.symlink_to("/etc/passwd")
    elif damage == "directory":
        path.mkdir()
    if damage in ("cut", "changed"):
        path.chmod(0o600)

    with pytest.raises(Unloadable, match=name):
        find(root, name)


def test_an_entry_under_another_name_is_unusable(root: Path) -> None:
    name = put(root, "key")
    other = entry_name("library:cache", "other", "environment", "source")
    (root / name).rename(root / other)

    with pytest.raises(Unloadable, match="it is version 1 of"):
        find(root, other)


@pytest.mark.parametrize("what", ["root", "entry", "object"])
def test_whatever_others_may_write_is_not_loaded(root: Path, what: str) -> None:
    name = put(root, "key")
    place = {"root": root, "entry": root / name, "object": root / name / OBJECT}[what]
    place.chmod(0o777)

    with pytest.raises(StoreRefused, match="whoever may write there"):
        find(root, name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_files_of_another_user_are_not_loaded(root: Path) -> None:
    name = put(root, "key")
    os.chown(root / name / OBJECT, 12345, 12345)

    with pytest.raises(StoreRefused, match="owned by uid 12345"):
        find(root, name)


def test_an_absent_store_holds_nothing_and_is_in_order(tmp_path: Path) -> None:
    absent = tmp_path / "none"

    check_root(absent)

    assert names(absent) == []
    assert find(absent, entry_name("a:b", "k", "e", "s")) is None


def test_what_was_used_longest_ago_goes_first(root: Path) -> None:
    old, used, new = put(root, "a", used=100), put(root, "b", used=200), put(root, "c", used=300)
    size = sum(file.stat().st_size for file in (root / new).iterdir())
    mark_used(root / used)

    removed = evict(root, 2 * size + 10)

    assert removed == [old]
    assert set(names(root)) == {used, new}
    assert not list(root.glob(".prefetchd/evicted-*"))


def test_what_was_just_published_is_kept_whatever_its_age(root: Path) -> None:
    old, new = put(root, "a", used=100), put(root, "b", used=200)

    removed = evict(root, 0, keep=frozenset({old}))

    assert removed == [new]
    assert names(root) == [old]


def test_the_store_lies_where_the_setting_or_the_users_cache_is(tmp_path: Path) -> None:
    assert find_root({"HOME": "/home/u"}, None) == Path("/home/u/.cache/prefetchd/cute")
    assert find_root({"HOME": "/home/u", "XDG_CACHE_HOME": "/c"}, None) == Path("/c/prefetchd/cute")
    assert find_root({}, "/s") == Path("/s")
    for environment, chosen in (({}, None), ({"HOME": "/h"}, "relative")):
        with pytest.raises(ValueError, match="cute_store"):
            find_root(environment, chosen)
