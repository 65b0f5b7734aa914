"""Ninja's own records of a build, moved with it: the real ninja has nothing to do in the new place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prefetchd.compilers import ninja_logs
from prefetchd.compilers.ninja_logs import (
    DEPENDENCIES,
    LOG,
    MANIFEST,
    UnknownNinja,
    inputs_of,
    murmur,
    rapid,
    relocate,
    up_to_date,
)

FOUND = (shutil.which("ninja"), str(Path(sys.executable).with_name("ninja")), "/usr/bin/ninja")
NINJAS = sorted({str(path) for path in FOUND if path and os.access(path, os.X_OK)})
pytestmark = pytest.mark.skipif(not NINJAS, reason="no ninja is installed")

RULES = """\
rule make
  command = cat $in > $out && echo "$out: $in $header" > $out.d  {padding}
  depfile = $out.d
  deps = gcc

rule join
  command = cat $in > $out

"""


def build(ninja: str, place: Path, padding: str = "") -> Path:
    """A build whose commands name absolute paths below `place`; its header lies there too."""
    sources, directory = place / "sources", place / "module"
    sources.mkdir(parents=True)
    directory.mkdir()
    for name in ("a.c", "b.c", "x.h"):
        (sources / name).write_text(name)
    lines = [RULES.format(padding=padding)]
    for name in ("a", "b"):
        lines += [f"build {directory}/{name}.o: make {sources}/{name}.c", f"  header = {sources}/x.h"]
    lines += [
        f"build {directory}/m.so: join {directory}/a.o {directory}/b.o",
        f"default {directory}/m.so",
        "",
    ]
    (directory / MANIFEST).write_text("\n".join(lines))
    command = [ninja, "-C", str(directory), "-f", str(directory / MANIFEST)]
    subprocess.run(command, check=True, capture_output=True)
    return directory


def move(ninja: str, directory: Path, new: Path) -> Path:
    """As it is published: sources first, then the directory by one rename."""
    old = directory.parent
    shutil.copytree(old / "sources", new / "sources")
    stamp = time.time_ns()
    relocate(ninja, directory, os.environ, str(old), str(new), stamp)
    return directory.rename(new / directory.name)


@pytest.mark.parametrize("ninja", NINJAS)
@pytest.mark.parametrize("padding", ["", "#" * 7, "#" * 40])
def test_a_moved_build_is_up_to_date_and_still_knows_its_headers(
    tmp_path: Path, ninja: str, padding: str
) -> None:
    made = build(ninja, tmp_path / "of-a-longer-name", padding.strip())
    assert up_to_date(ninja, made, os.environ)

    moved = move(ninja, made, tmp_path / "new")

    assert up_to_date(ninja, moved, os.environ)
    assert set(inputs_of(moved)) >= {str(tmp_path / "new/sources/x.h")}
    (tmp_path / "new/sources/x.h").write_text("changed")
    os.utime(tmp_path / "new/sources/x.h", ns=(time.time_ns() + 10**9,) * 2)
    assert not up_to_date(ninja, moved, os.environ)


@pytest.mark.parametrize("ninja", NINJAS)
def test_what_is_only_renamed_would_be_built_again(tmp_path: Path, ninja: str) -> None:
    made = build(ninja, tmp_path / "old")
    manifest = made / MANIFEST
    manifest.write_text(manifest.read_text().replace("/old/", "/new/"))

    shutil.copytree(tmp_path / "old", tmp_path / "new")

    assert not up_to_date(ninja, tmp_path / "new/module", os.environ)


@pytest.mark.parametrize("ninja", NINJAS)
def test_the_hash_of_a_command_is_ninjas_own_at_every_length(tmp_path: Path, ninja: str) -> None:
    lengths = range(20, 150)
    lines = ["rule make", "  command = echo > $out #$padding", ""]
    for length in lengths:
        lines += [f"build o{length}: make", f"  padding = {'x' * (length - len(f'echo > o{length} #'))}"]
    (tmp_path / MANIFEST).write_text("\n".join([*lines, ""]))
    subprocess.run([ninja, "-C", str(tmp_path)], check=True, capture_output=True)

    header, *entries = (tmp_path / LOG).read_text().splitlines()

    digest = murmur if header.endswith("v5") else rapid
    for entry in entries:
        output, hashed = entry.split("\t")[3:]
        command = f"echo > {output} #".ljust(int(output[1:]), "x")
        assert digest(command.encode()) == int(hashed, 16), command
    assert len(entries) == len(lengths)


def test_a_ninja_whose_hashes_are_not_understood_moves_nothing(tmp_path: Path) -> None:
    made = build(NINJAS[0], tmp_path / "old")
    log = (made / LOG).read_text()
    (made / LOG).write_text(log.replace(log.split("\t")[4].split("\n")[0], "1234", 1))
    before = {path.name: path.read_bytes() for path in made.iterdir()}

    with pytest.raises(UnknownNinja, match="hash"):
        move(NINJAS[0], made, tmp_path / "new")

    assert {path.name: path.read_bytes() for path in made.iterdir()} == before


@pytest.mark.parametrize(
    ("file", "content"),
    [(LOG, b"# ninja log v99\n"), (DEPENDENCIES, b"# ninjadeps\n\x09\0\0\0"), (DEPENDENCIES, b"")],
)
def test_a_log_of_another_version_moves_nothing(tmp_path: Path, file: str, content: bytes) -> None:
    made = build(NINJAS[0], tmp_path / "old")
    (made / file).write_bytes(content)

    with pytest.raises(UnknownNinja):
        move(NINJAS[0], made, tmp_path / "new")


@pytest.mark.skipif(len(NINJAS) < 2, reason="there is one ninja here")
@pytest.mark.parametrize("ninja", NINJAS)
def test_asking_changes_nothing_even_where_another_ninja_has_built(tmp_path: Path, ninja: str) -> None:
    made = build(ninja, tmp_path / "old")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in made.iterdir()}

    for other in NINJAS:
        up_to_date(other, made, os.environ)

    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in made.iterdir()} == before


def test_a_truncated_log_of_headers_moves_nothing(tmp_path: Path) -> None:
    made = build(NINJAS[0], tmp_path / "old")
    (made / DEPENDENCIES).write_bytes((made / DEPENDENCIES).read_bytes()[:-3])

    with pytest.raises(UnknownNinja, match="within a record"):
        move(NINJAS[0], made, tmp_path / "new")


def test_a_ninja_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(NINJAS[0], tmp_path / "old")
    hanging = tmp_path / "ninja"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(ninja_logs, "_ASK_LIMIT_S", 0.05)

    with pytest.raises(TimeoutError, match="does not say"):
        up_to_date(str(hanging), made, os.environ)
    with pytest.raises(UnknownNinja, match="timed out"):
        move(str(hanging), made, tmp_path / "new")
