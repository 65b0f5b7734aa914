"""Which candidates of a log nobody needs: those that lost where the engine finds who won, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_triton_records import PARTS
from winners_bench import H200

from prefetchd.compilers.base import Job
from prefetchd.compilers.triton_cache import key_of
from prefetchd.compilers.triton_capture import Variant
from prefetchd.compilers.triton_rivals import Answered, rivals
from prefetchd.replaying.winners import without_rivals
from prefetchd.winners import Configuration, Tuning, Winner

BLOCKS = (16, 32, 64)
ENTRY = f"{key_of('cd' * 32)}/scale.autotune.json"


def variant(block: int, *, warps: int = 4, dtype: str = "fp32", size: int = 128, **changes: Any) -> Variant:
    """A candidate of `scale(x, n, SIZE, BLOCK)`, tuned by SIZE."""
    text = {
        "name": "kernels.scale",
        "signature": {"x": f"*{dtype}", "n": "i32", "SIZE": "constexpr", "BLOCK": "constexpr"},
        "constant_keys": [[2], [3]],
        "constant_vals": [size, block],
        "attrs_keys": [[0], [1]],
        "attrs_vals": [[["tt.divisibility", 16]], []],
        "options": {"num_warps": warps, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "debug": False},
        **changes,
    }
    return Variant(module="kernels", name="scale", specialization=json.dumps(text), seconds=1.0, parts=PARTS)


def tuning(size: int = 128, **changes: Any) -> Tuning:
    candidates = [
        {"kwargs": {"BLOCK": block}, "num_warps": 4, "num_stages": 3, "num_ctas": 1} for block in BLOCKS
    ]
    fields = {"key": [size, "torch.float32"], "names": ("SIZE",), "entry": ENTRY, "candidates": candidates}
    base = {"triton": "3.8.0", "module": "kernels", "kernel": "scale", "source": "ab"}
    return Tuning(**{**base, **fields, **changes})


def log(**more: Variant) -> dict[str, Variant]:
    return {**{f"block {block}": variant(block) for block in BLOCKS}, **more}


LOSERS = {"block 16", "block 64"}
ANSWER = Answered(tuning(), BLOCKS.index(32))


def test_only_the_winner_of_a_known_tuning_is_left() -> None:
    assert rivals(log(), [ANSWER]) == LOSERS


def test_each_class_of_arguments_keeps_its_own_winner() -> None:
    aligned: dict[str, Any] = {"attrs_vals": [[["tt.divisibility", 16]], [["tt.divisibility", 16]]]}
    others = {f"aligned {block}": variant(block, **aligned) for block in BLOCKS}

    assert rivals(log(**others), [ANSWER]) == {*LOSERS, "aligned 16", "aligned 64"}


def test_winner_of_each_of_two_tunings_that_look_the_same_stays() -> None:
    # What tells them apart is no constant: the value of n.
    first, second = (tuning(key=[n, "torch.float32"], names=("n",)) for n in (5, 7))

    assert rivals(log(), [Answered(first, 0), Answered(second, 1)]) == {"block 64"}


@pytest.mark.parametrize(
    "more",
    [
        variant(16, warps=8),
        variant(48),
        variant(16, dtype="bf16"),
        variant(16, size=256),
        msgspec.structs.replace(variant(16), name="another"),
        msgspec.structs.replace(variant(16), specialization="no JSON"),
        msgspec.structs.replace(variant(16), specialization='{"signature": {}}'),
    ],
    ids=["options", "no candidate", "dtype", "value of the key", "kernel", "unreadable", "incomplete"],
)
def test_variant_of_which_it_is_not_certain_stays(more: Variant) -> None:
    assert rivals(log(more=more), [ANSWER]) == LOSERS


@pytest.mark.parametrize(
    "asked",
    [
        tuning(key=[256, "torch.float32"]),
        tuning(key=[128, "torch.bfloat16"]),
        tuning(kernel="another"),
        tuning(module="elsewhere"),
    ],
    ids=["value", "dtype", "kernel", "module"],
)
def test_answer_to_another_question_leaves_all_of_them(asked: Tuning) -> None:
    assert rivals(log(), [Answered(asked, 1)]) == set()


def test_without_the_winner_itself_all_of_them_stay() -> None:
    known = log()
    del known["block 32"]

    assert rivals(known, [ANSWER]) == set()


def winner(block: int = 32, **changes: Any) -> Winner:
    fields = {
        "key": [128, "torch.float32"],
        "config": Configuration(kwargs={"BLOCK": block}),
        "timing_ms": [1.0],
    }
    base = {"gpu": H200.name, "sm_count": H200.sm_count, "triton": "3.8.0", "source": "ab"}
    return Winner(**{**base, "module": "kernels", "kernel": "scale", **fields, **changes})


@pytest.mark.parametrize(
    ("environment", "known", "asked", "left"),
    [
        ({"TRITON_CACHE_AUTOTUNING": "1"}, winner(), tuning(), 1),
        ({}, winner(), tuning(kept=True), 1),
        # Whoever measures needs all of them.
        ({}, winner(), tuning(), 3),
        ({"TRITON_CACHE_AUTOTUNING": "1"}, winner(), tuning(entry=""), 3),
        ({"TRITON_CACHE_AUTOTUNING": "1"}, winner(gpu="NVIDIA H100"), tuning(), 3),
        ({"TRITON_CACHE_AUTOTUNING": "1"}, winner(source="cd"), tuning(), 3),
        ({"TRITON_CACHE_AUTOTUNING": "1"}, winner(block=48), tuning(), 3),
    ],
    ids=["read", "kept by the kernel", "unread", "no file", "another GPU", "another source", "no candidate"],
)
def test_losers_are_left_out_only_where_the_engine_reads_the_result(
    environment: dict[str, str], known: Winner, asked: Tuning, left: int, tmp_path: Path
) -> None:
    other = Job(compiler="deep_jit", key="block 16", payload=b"no variant")
    jobs = {
        ("triton", key): Job(compiler="triton", key=key, payload=msgspec.msgpack.encode(each))
        for key, each in log().items()
    }
    jobs[other.compiler, other.key] = other

    kept = without_rivals(jobs, [asked], [known], H200, environment, [tmp_path])

    assert kept.pop((other.compiler, other.key)) is other
    assert len(kept) == left
    assert ("triton", "block 32") in kept


def test_where_no_root_is_seeded_nothing_is_left_out() -> None:
    job = Job(compiler="triton", key="block 16", payload=msgspec.msgpack.encode(variant(16)))
    jobs = {("triton", job.key): job}

    assert without_rivals(jobs, [tuning(kept=True)], [winner()], H200, {}, []) == jobs
