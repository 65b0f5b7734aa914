"""Staging, publishing, quarantine and key locks, judged by what another process sees on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from as_user import NAMELESS, as_nameless_user

from prefetchd.store import (
    QUARANTINE_LIMIT,
    KeyLocks,
    Staging,
    StoreUnwritable,
    private_directory,
    publish_directory,
    quarantine,
)

VARIABLE = "DG_JIT_CACHE_DIR"


def staging(root: Path) -> Staging:
    return Staging(root, variable=VARIABLE)


def finished(directory: Path, text: str = "ours") -> Path:
    directory.mkdir(parents=True)
    (directory / "kernel.cubin").write_text(text)
    return directory


@contextmanager
def other_process(script: str, *arguments: Path) -> Iterator[subprocess.Popen[str]]:
    """Another interpreter, from the moment it has printed `ready`; killed at the end."""
    argv = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


IN_STAGING = """
import sys
from pathlib import Path
from prefetchd.store import Staging
with Staging(Path(sys.argv[1]), variable="X") as place, place.entry("key") as entry:
    (entry / "half.cubin").write_text("half")
    print("ready", flush=True)
    sys.stdin.read()
"""

HOLDING = """
import sys
from pathlib import Path
from prefetchd.store import KeyLocks
locks = KeyLocks(Path(sys.argv[1]), variable="X")
assert locks.try_acquire("key")
print("ready", flush=True)
sys.stdin.read()
"""


def test_publishing_makes_the_whole_directory_visible(tmp_path: Path) -> None:
    staged, final = finished(tmp_path / "staged"), tmp_path / "root/cache/key"

    assert publish_directory(staged, final)

    assert (final / "kernel.cubin").read_text() == "ours"
    assert not staged.exists()


def test_an_empty_directory_is_replaced(tmp_path: Path) -> None:
    final = tmp_path / "cache/key"
    final.mkdir(parents=True)

    assert publish_directory(finished(tmp_path / "staged"), final)
    assert (final / "kernel.cubin").read_text() == "ours"


def test_an_entry_of_the_engine_is_never_touched(tmp_path: Path) -> None:
    staged, final = finished(tmp_path / "staged"), finished(tmp_path / "cache/key", "the engine's")

    assert not publish_directory(staged, final)

    assert (final / "kernel.cubin").read_text() == "the engine's"
    assert not staged.exists()


def test_a_file_in_the_way_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("foreign")

    with pytest.raises(NotADirectoryError):
        publish_directory(finished(tmp_path / "staged"), tmp_path / "key")

    assert (tmp_path / "key").read_text() == "foreign"


def test_staging_creates_its_root_and_leaves_no_owner_behind(tmp_path: Path) -> None:
    root = tmp_path / "not/yet/there"

    with staging(root) as place:
        assert place.directory.parent == root / ".prefetchd"
        assert place.directory.stat().st_mode & 0o777 == 0o700

    assert not place.directory.exists()


def test_an_entry_is_empty_private_and_removed_also_after_an_error(tmp_path: Path) -> None:
    with staging(tmp_path) as place:
        with suppress(RuntimeError), place.entry("key") as entry:
            assert list(entry.iterdir()) == []
            (entry / "half.cubin").write_text("half")
            raise RuntimeError

        assert not entry.exists()


def test_two_entries_of_one_key_are_apart(tmp_path: Path) -> None:
    with staging(tmp_path) as place, place.entry("key") as first, place.entry("key") as second:
        assert first != second


def test_what_a_killed_owner_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    with other_process(IN_STAGING, tmp_path) as owner:
        [left] = tmp_path.glob(".prefetchd/owner-*")
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert list(left.rglob("half.cubin"))

        with staging(tmp_path):
            assert not left.exists()


def test_a_living_owner_keeps_its_place(tmp_path: Path) -> None:
    with other_process(IN_STAGING, tmp_path):
        [other] = tmp_path.glob(".prefetchd/owner-*")

        with staging(tmp_path):
            assert list(other.rglob("half.cubin"))


def test_a_root_that_cannot_be_written_is_named_with_the_fix(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)

    def attempt() -> str:
        with pytest.raises(StoreUnwritable) as caught:
            staging(root).__enter__()
        return str(caught.value)

    text = as_nameless_user(attempt)
    assert str(root) in text
    assert f"uid {NAMELESS}" in text
    assert VARIABLE in text
    assert not (root / ".prefetchd").exists()


def test_a_root_of_a_user_without_a_name_works(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    os.chown(root, NAMELESS, NAMELESS)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)

    def attempt() -> bool:
        with staging(root) as place, place.entry("key") as entry:
            return publish_directory(finished(entry / "entry"), root / "cache/key")

    assert as_nameless_user(attempt)
    assert (root / "cache/key/kernel.cubin").stat().st_uid == NAMELESS


def test_whoever_may_write_to_the_root_may_work_in_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    with staging(tmp_path):
        KeyLocks(tmp_path, variable=VARIABLE).close()

        def attempt() -> bool:
            with staging(tmp_path):
                return KeyLocks(tmp_path, variable=VARIABLE).try_acquire("key")

        assert as_nameless_user(attempt)


def test_a_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")

    with pytest.raises(StoreUnwritable, match="File exists"):
        staging(tmp_path / "root").__enter__()


def test_a_key_has_one_holder_among_processes(tmp_path: Path) -> None:
    with other_process(HOLDING, tmp_path):
        locks = KeyLocks(tmp_path, variable=VARIABLE)

        assert not locks.try_acquire("key")
        assert locks.try_acquire("another key")
        locks.close()


def test_a_killed_holder_frees_its_keys(tmp_path: Path) -> None:
    with other_process(HOLDING, tmp_path) as holder:
        locks = KeyLocks(tmp_path, variable=VARIABLE)
        holder.kill()
        holder.wait()

        assert locks.try_acquire("key")
        locks.close()


def test_two_holders_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = KeyLocks(tmp_path, variable=VARIABLE), KeyLocks(tmp_path, variable=VARIABLE)

    assert first.try_acquire("key")
    assert not second.try_acquire("key")
    second.release("key")
    assert not second.try_acquire("key")
    first.release("key")
    assert second.try_acquire("key")
    first.close()
    second.close()


def test_a_corrupt_entry_is_moved_out_of_the_way_and_kept(tmp_path: Path) -> None:
    entry = finished(tmp_path / "cache/key", "half")

    place = quarantine(tmp_path, entry)

    assert not entry.exists()
    assert (place / "kernel.cubin").read_text() == "half"
    assert place.is_relative_to(tmp_path / ".prefetchd/quarantine")


def test_quarantine_keeps_only_the_newest(tmp_path: Path) -> None:
    places = [quarantine(tmp_path, finished(tmp_path / f"cache/{n}")) for n in range(QUARANTINE_LIMIT + 3)]

    assert [place.exists() for place in places] == [False] * 3 + [True] * QUARANTINE_LIMIT


@contextmanager
def overlay(directory: Path) -> Iterator[Path]:
    """A root as a container sees it: what `directory/lower` holds came with the image."""
    if os.geteuid() != 0:
        pytest.skip("mounts an overlay, which only root can")
    # The upper layer may not itself lie on an overlay, as the temporary directory of a container does.
    layers = directory / "layers"
    layers.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", layers], check=True)
    try:
        for name in ("upper", "work", "root"):
            (layers / name).mkdir()
        options = f"lowerdir={directory / 'lower'},upperdir={layers / 'upper'},workdir={layers / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, layers / "root"], check=True)
        yield layers / "root"
    finally:
        subprocess.run(["umount", layers / "root"], check=True)
        subprocess.run(["umount", layers], check=True)


def test_entries_that_came_with_a_container_image_are_handled_alike(tmp_path: Path) -> None:
    finished(tmp_path / "lower/cache/corrupt", "half")
    (tmp_path / "lower/cache/empty").mkdir()
    with overlay(tmp_path) as root:
        place = quarantine(root, root / "cache/corrupt")

        assert publish_directory(finished(root / "staged"), root / "cache/corrupt")
        assert publish_directory(finished(root / "staged"), root / "cache/empty")
        assert (place / "kernel.cubin").read_text() == "half"
        assert [path.read_text() for path in sorted(root.glob("cache/*/*"))] == ["ours", "ours"]


def test_an_entry_that_someone_else_moved_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        quarantine(tmp_path, tmp_path / "cache/key")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_leaves_nothing_visible(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], check=True)
    try:
        with (
            staging(tmp_path) as place,
            place.entry("key") as entry,
            pytest.raises(OSError, match="No space left"),
        ):
            (entry / "kernel.cubin").write_bytes(bytes(1 << 20))
        assert not (tmp_path / "cache").exists()
        assert [path.name for path in private_directory(tmp_path).iterdir()] == ["start.lock"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
