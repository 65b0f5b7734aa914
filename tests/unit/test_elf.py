"""What counts as a complete cubin, and the architecture read from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_cubin import HEADER, SECTION, fake_cubin
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.elf import NotACubin, cubin_architecture, parse_architecture


@pytest.mark.parametrize("abi", [7, 8])
@pytest.mark.parametrize("architecture", [80, 90, 100, 103, 120])
def test_architecture_is_read_in_both_encodings(architecture: int, abi: int) -> None:
    assert parse_architecture(fake_cubin(architecture, abi=abi)) == architecture


def test_architecture_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "kernel.cubin").write_bytes(fake_cubin(100))

    assert cubin_architecture(tmp_path / "kernel.cubin") == 100


def test_what_is_no_file_is_refused_without_being_read(tmp_path: Path) -> None:
    # Reading the first would wait for a writer for ever, and the second would never end.
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "directory").mkdir()

    for name in ("fifo", "device", "directory"):
        with pytest.raises(NotACubin, match="not a regular file"):
            cubin_architecture(tmp_path / name)


@given(st.integers(min_value=0, max_value=len(fake_cubin()) - 1))
def test_every_truncation_is_refused(length: int) -> None:
    with pytest.raises(NotACubin):
        parse_architecture(fake_cubin()[:length])


@given(st.binary(max_size=256))
def test_any_bytes_are_judged_without_another_error(data: bytes) -> None:
    with pytest.raises(NotACubin):
        parse_architecture(data)


def test_a_section_that_ends_beyond_the_file_is_named() -> None:
    data = bytearray(fake_cubin())
    SECTION.pack_into(data, len(data) - SECTION.size, 0, 1, 0, 0, HEADER.size, len(data), 0, 0, 1, 0)

    with pytest.raises(NotACubin, match="truncated: section 0"):
        parse_architecture(bytes(data))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "empty"),
        (b"placeholder", "11 bytes"),
        (b"x" * 4096, "64-bit ELF"),
        (fake_cubin(machine=62), "machine is 62"),
    ],
)
def test_the_message_says_what_is_wrong(data: bytes, text: str) -> None:
    with pytest.raises(NotACubin, match=text):
        parse_architecture(data)
