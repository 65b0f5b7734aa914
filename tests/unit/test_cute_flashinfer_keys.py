"""FlashInfer's own directory of CuTe kernels as files: what is found, what is published, and when not."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest

from prefetchd.compilers.base import ArtifactInvalid, CompilerUnavailable, EntryState, Job
from prefetchd.compilers.cute_dsl_flashinfer import META, FlashInferCute, Kernel
from prefetchd.cute.calls import Call
from prefetchd.targets import load_target

EXPECTED = {"arch": "sm100a", "cute_dsl_version": "x", "source_sha256": "y"}
PLACE = "0.7.4/100a/cached_ops/decode_sm100a_cute_dsl"


def cubin(architecture: int) -> bytes:
    """As little of an ELF file of CUDA's as is looked at: a header and one section that takes no place."""
    header = struct.pack(
        "<4sBBBBB7xHHIQQQIHHHHHH",
        b"\x7fELF", 2, 1, 1, 0x41, 8, 2, 190, 1, 0, 0, 64, architecture << 8, 64, 0, 0, 64, 1, 0,
    )  # fmt: skip
    return header + struct.pack("<IIQQQQIIQQ", 0, 8, 0, 0, 0, 0, 0, 0, 0, 0)


def host_object(architecture: int = 100) -> bytes:
    return b"\x7fELF host code " + cubin(architecture)


def key(kernel: str = "kernel_a", expected: dict[str, str] = EXPECTED) -> str:
    digest = hashlib.sha256(json.dumps(expected, sort_keys=True).encode()).hexdigest()[:16]
    return f"{PLACE}/{kernel}@{digest}"


def staged(compiler: FlashInferCute, place: Path, kernel: str = "kernel_a", architecture: int = 100) -> Job:
    entry = compiler.staged_entry(key(kernel), place)
    entry.mkdir(parents=True)
    (entry / f"{kernel}.o").write_bytes(host_object(architecture))
    (entry / META).write_text(json.dumps(EXPECTED, indent=2))
    call = Call(module="flashinfer.kda", function="recurrent_kda", arguments={})
    return compiler.job(Kernel(key=key(kernel), call=call))


@pytest.fixture
def compiler(tmp_path: Path) -> FlashInferCute:
    return FlashInferCute(load_target("b200"), {"FLASHINFER_WORKSPACE_BASE": str(tmp_path / "ws")})


def test_kernels_of_one_module_are_published_into_one_directory(
    compiler: FlashInferCute, tmp_path: Path
) -> None:
    root = compiler.cache_root()
    for kernel in ("kernel_a", "kernel_b"):
        job = staged(compiler, tmp_path / kernel, kernel)
        assert compiler.state(job.key, root) is EntryState.MISSING
        compiler.verify(job, tmp_path / kernel)
        assert compiler.publish(job, tmp_path / kernel, root) is True
        assert compiler.state(job.key, root) is EntryState.PUBLISHED

    module = root / PLACE
    assert sorted(path.name for path in module.iterdir()) == ["kernel_a.o", "kernel_b.o", META]
    assert json.loads((module / META).read_text()) == EXPECTED


def test_what_the_engine_has_is_not_replaced(compiler: FlashInferCute, tmp_path: Path) -> None:
    root = compiler.cache_root()
    job = staged(compiler, tmp_path / "one")
    compiler.publish(job, tmp_path / "one", root)
    (root / PLACE / "kernel_a.o").write_bytes(b"the engine's")
    again = staged(compiler, tmp_path / "two")

    assert compiler.publish(again, tmp_path / "two", root) is False
    assert (root / PLACE / "kernel_a.o").read_bytes() == b"the engine's"
    assert compiler.state(job.key, root) is EntryState.CORRUPT


def test_a_module_of_another_version_is_a_miss_and_makes_way_as_a_whole(
    compiler: FlashInferCute, tmp_path: Path
) -> None:
    root = compiler.cache_root()
    job = staged(compiler, tmp_path / "one")
    compiler.publish(job, tmp_path / "one", root)
    (root / PLACE / META).write_text(json.dumps({**EXPECTED, "source_sha256": "older"}))
    (root / PLACE / "older.o").write_bytes(host_object())

    assert compiler.state(job.key, root) is EntryState.MISSING
    assert compiler.publish(staged(compiler, tmp_path / "two"), tmp_path / "two", root) is True
    assert sorted(path.name for path in (root / PLACE).iterdir()) == ["kernel_a.o", META]
    (aside,) = (root / ".prefetchd" / "quarantine").iterdir()
    assert (aside / "older.o").is_file()


def test_an_object_for_another_device_or_of_another_meta_is_not_published(
    compiler: FlashInferCute, tmp_path: Path
) -> None:
    wrong = staged(compiler, tmp_path / "one", architecture=90)
    with pytest.raises(ArtifactInvalid, match="sm_90, not for sm_100"):
        compiler.verify(wrong, tmp_path / "one")
    odd = staged(compiler, tmp_path / "two")
    (tmp_path / "two" / "entry" / META).write_text("{}")
    with pytest.raises(ArtifactInvalid, match=r"meta\.json"):
        compiler.verify(odd, tmp_path / "two")


def test_a_helper_is_told_the_directory_itself_and_the_library_the_one_above(tmp_path: Path) -> None:
    target = load_target("b200")
    engine = FlashInferCute(target, {"HOME": str(tmp_path)})
    told = {engine.cache_variable: str(engine.cache_root()), "HOME": "/elsewhere"}

    assert FlashInferCute(target, told).cache_root() == engine.cache_root()
    with pytest.raises(CompilerUnavailable, match="FLASHINFER_WORKSPACE_BASE"):
        FlashInferCute(target, {engine.cache_variable: "/cache"})


@pytest.mark.parametrize(
    "name", ["", "../x", "0.7.4/100a/cached_ops/m/k", "../100a/cached_ops/m/k@" + "0" * 16, key() + "/x"]
)
def test_what_is_no_key_leads_nowhere(compiler: FlashInferCute, name: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        compiler.entry_path(name, compiler.cache_root())
