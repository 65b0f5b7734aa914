"""The list of kernels that a warm-up pass used, and when it speaks for the next start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from prefetchd.compilers.base import CompilerUnavailable, EntryState
from prefetchd.engines import warmup_ledger
from prefetchd.engines.warmup_ledger import is_covered, ledger_path, write_ledger
from prefetchd.targets import load_target

H200 = load_target("h200")


def test_pass_is_needed_where_a_key_it_used_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = ledger_path(tmp_path, ("vllm", "hash"))
    write_ledger(path, {"triton": ("THERE", "GONE")})
    there = SimpleNamespace(
        look_up=lambda key: EntryState.PUBLISHED if key == "THERE" else EntryState.MISSING
    )
    monkeypatch.setattr(warmup_ledger, "load_compiler", lambda *_: there)

    assert not is_covered(path, H200, {})


@pytest.mark.parametrize(
    "error", [CompilerUnavailable("no triton"), KeyError("triton"), OSError("a stale disk")]
)
def test_pass_is_needed_where_its_compiler_cannot_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def failing(*_: object) -> None:
        raise error

    path = ledger_path(tmp_path, ("vllm", "hash"))
    write_ledger(path, {"triton": ("KEY",)})
    monkeypatch.setattr(warmup_ledger, "load_compiler", failing)

    assert not is_covered(path, H200, {})


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b'{"keys": {}}', b'{"keys": {"triton": ["K"]}, "version": 9}']
)
def test_pass_is_needed_without_a_readable_list(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "warmup.json"
    if content is not None:
        path.write_bytes(content)

    assert not is_covered(path, H200, {})


def test_pass_that_used_nothing_leaves_no_list(tmp_path: Path) -> None:
    write_ledger(tmp_path / "warmup.json", {"triton": ()})

    assert list(tmp_path.iterdir()) == []


def test_another_engine_has_another_list(tmp_path: Path) -> None:
    assert ledger_path(tmp_path, ("vllm", "a")) != ledger_path(tmp_path, ("vllm", "b"))
