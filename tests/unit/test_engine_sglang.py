"""SGLang's plug-in, on stand-ins laid out as its public scheduler classes are (sglang 0.5).

A release of today publishes its settings for the process and keeps what was typed in `server_args`; one of
before has them all in there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prefetchd.attaching import Handle
from prefetchd.engines import sglang_hooks
from prefetchd.engines.seat import Seat
from prefetchd.engines.sglang_batch import batch_of
from prefetchd.protocol import Batch


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    PREBUILT = auto()


def schedule_batch(
    mode: ForwardMode, *, count: int = 0, lengths: list[int] | None = None, running: int = 0
) -> Any:
    requests = [object()] * (count or len(lengths or ()))
    return SimpleNamespace(
        forward_mode=mode, reqs=requests, extend_lens=lengths, decoding_reqs=requests[:running] or None
    )


@pytest.mark.parametrize(
    ("batch", "drafts", "expected"),
    [
        (schedule_batch(ForwardMode.EXTEND, lengths=[64, 3]), 0, Batch(tokens=67, prefill_lengths=(64, 3))),
        (schedule_batch(ForwardMode.DECODE, count=5), 0, Batch(tokens=5, decodes=5)),
        (
            schedule_batch(ForwardMode.MIXED, lengths=[300, 1, 1], running=2),
            0,
            Batch(tokens=302, prefill_lengths=(300,), decodes=2),
        ),
        (
            schedule_batch(ForwardMode.DECODE, count=2),
            3,
            Batch(tokens=8, decodes=2, speculative_tokens=6),
        ),
        (
            schedule_batch(ForwardMode.EXTEND, lengths=[1, 1], running=2),
            0,
            Batch(tokens=2, decodes=2),
        ),
        (schedule_batch(ForwardMode.IDLE), 0, None),
        (schedule_batch(ForwardMode.PREBUILT, count=3), 0, None),
    ],
    ids=["prefill", "decode", "mixed", "drafts", "decode run as a prefill", "idle", "prebuilt"],
)  # fmt: skip
def test_scheduled_batch(batch: Any, drafts: int, expected: Batch | None) -> None:
    assert batch_of(batch, drafts) == expected


class Noting(Handle):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.slots: list[int] = []

    def on_schedule(self, batch: Batch) -> None:
        self.batches.append(batch)

    def use_state_slots(self, slots: int) -> None:
        self.slots.append(slots)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    asked: list[tuple[Any, dict[str, Any]]] = []

    def attach(profile: Any, **how: Any) -> Handle:
        asked.append((profile, how))
        return Noting()

    monkeypatch.setattr(sglang_hooks, "seat", Seat(attach))
    return asked


@pytest.fixture
def scheduler_class(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A scheduler module, hooked; answers its class."""

    class Scheduler:
        def __init__(self, server_args: Any, pool: Any = None) -> None:
            self.server_args = server_args
            self.ran: list[Any] = []
            self.tp_worker = SimpleNamespace(get_memory_pool=lambda: (SimpleNamespace(mamba_pool=pool), None))
            self.init_model_config()
            self.init_memory_pools()

        def init_model_config(self) -> None:
            fields = {"architectures": ["SomethingNew"]}
            self.model_config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: fields))

        def init_memory_pools(self) -> None:
            self.ran.append("pools")

        def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> str:
            self.ran.append(batch)
            return "result"

    def install(version: str = "0.5.23", **parts: Any) -> Any:
        module = ModuleType(sglang_hooks.SCHEDULER)
        vars(module).update({"Scheduler": Scheduler, **parts})
        monkeypatch.setitem(sys.modules, sglang_hooks.SCHEDULER, module)
        monkeypatch.setattr(sglang_hooks, "version", lambda name: version)
        sglang_hooks.install()
        return Scheduler

    return install


# As typed: nothing of it is what SGLang made of it, but for the names.
TYPED = SimpleNamespace(
    tp_size=1, pp_size=1, dp_size=8, ep_size=1, model_path="/models/x", served_model_name="x",
    chunked_prefill_size=None, max_prefill_tokens=16384, speculative_num_draft_tokens=None,
)  # fmt: skip
# What a process of today publishes.
PUBLISHED = {
    "get_parallel": lambda: SimpleNamespace(
        tp_rank=3, pp_rank=1, tp_size=4, pp_size=2, ep_size=2, attn_dp_size=4
    ),
    "get_device": lambda: SimpleNamespace(gpu_id=7),
    "get_schedule": lambda: SimpleNamespace(chunked_prefill_size=4096, max_prefill_tokens=16384),
    "get_spec": lambda: SimpleNamespace(speculative_num_draft_tokens=4),
}
# A release without published settings has resolved the arguments themselves.
RESOLVED = SimpleNamespace(
    **vars(TYPED) | {"tp_size": 4, "chunked_prefill_size": -1, "speculative_num_draft_tokens": 3}
)


def test_rank_attaches_as_its_process_was_started_and_not_as_was_typed(
    asked: list[tuple[Any, dict[str, Any]]], scheduler_class: Callable[..., Any]
) -> None:
    scheduler_class(**PUBLISHED)(TYPED)

    ((profile, how),) = asked
    assert (profile.model, profile.tp, profile.ep, profile.dp) == ("x", 4, 2, 4)
    assert (how["rank"], how["world"], how["device"], how["max_tokens"]) == (4 + 3, 8, 7, 4096)


@pytest.mark.parametrize(("enabled", "dp"), [(False, 1), (True, 8)], ids=["replicas", "attention"])
def test_release_that_publishes_nothing_has_it_in_the_scheduler_and_its_arguments(
    asked: list[tuple[Any, dict[str, Any]]], scheduler_class: Callable[..., Any], enabled: bool, dp: int
) -> None:
    scheduler = scheduler_class()
    scheduler.tp_rank, scheduler.gpu_id = 1, 5
    scheduler(SimpleNamespace(**vars(RESOLVED), enable_dp_attention=enabled))

    ((profile, how),) = asked
    assert (profile.tp, profile.dp) == (4, dp)
    # Without chunks a whole prefill is the largest batch.
    assert (how["rank"], how["world"], how["device"], how["max_tokens"]) == (1, 4, 5, 16384)


@pytest.mark.parametrize(
    ("settings", "arguments", "drafts"),
    [(PUBLISHED, TYPED, 3), ({}, RESOLVED, 2)],
    ids=["published", "in the arguments"],
)
def test_drafts_of_a_decoding_batch_are_those_of_the_process(
    asked: list[tuple[Any, dict[str, Any]]],
    scheduler_class: Callable[..., Any],
    settings: dict[str, Any],
    arguments: Any,
    drafts: int,
) -> None:
    scheduler = scheduler_class(**settings)
    scheduler.tp_rank, scheduler.gpu_id = 0, 0

    scheduler(arguments).run_batch(schedule_batch(ForwardMode.DECODE, count=2))

    handle = sglang_hooks.seat.handle
    assert isinstance(handle, Noting)
    assert handle.batches == [Batch(tokens=2 * (drafts + 1), decodes=2, speculative_tokens=2 * drafts)]


@pytest.mark.parametrize(
    ("pool", "told"), [(SimpleNamespace(size=127), [128]), (None, [])], ids=["states", "attention alone"]
)
def test_rank_tells_how_many_states_its_pool_holds(
    asked: list[tuple[Any, dict[str, Any]]], scheduler_class: Callable[..., Any], pool: Any, told: list[int]
) -> None:
    assert scheduler_class(**PUBLISHED)(TYPED, pool).ran == ["pools"]

    handle = sglang_hooks.seat.handle
    assert isinstance(handle, Noting)
    assert handle.slots == told


def test_pools_that_cannot_be_read_are_the_engines_all_the_same(
    asked: list[tuple[Any, dict[str, Any]]], scheduler_class: Callable[..., Any]
) -> None:
    assert scheduler_class(**PUBLISHED)(TYPED, object()).ran == ["pools"]
    assert sglang_hooks.seat.guard.errors == 1


def test_release_without_a_function_that_is_hooked_is_named(
    asked: list[tuple[Any, dict[str, Any]]],
    scheduler_class: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_hooks, "POOLS_MADE", ("make_pools",))
    scheduler_class(**PUBLISHED)(TYPED)

    assert len(asked) == 1
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "Scheduler.make_pools" in line


def test_batch_is_told_before_it_runs_and_its_result_passes(
    asked: list[tuple[Any, dict[str, Any]]], scheduler_class: Callable[..., Any]
) -> None:
    scheduler = scheduler_class(**PUBLISHED)(TYPED)
    batch = schedule_batch(ForwardMode.EXTEND, lengths=[7])

    assert scheduler.run_batch(batch) == "result"

    handle = sglang_hooks.seat.handle
    assert isinstance(handle, Noting)
    assert handle.batches == [Batch(tokens=7, prefill_lengths=(7,))]
    assert scheduler.ran == ["pools", batch]


def test_batch_that_cannot_be_read_runs_all_the_same(
    asked: list[tuple[Any, dict[str, Any]]], scheduler_class: Callable[..., Any]
) -> None:
    scheduler = scheduler_class(**PUBLISHED)(TYPED)

    assert scheduler.run_batch(object()) == "result"
    assert sglang_hooks.seat.guard.errors == 1


def test_unknown_sglang_is_one_line_and_only_observed(
    asked: list[tuple[Any, dict[str, Any]]],
    scheduler_class: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = scheduler_class("1.2.0", **PUBLISHED)(TYPED)
    scheduler.run_batch(schedule_batch(ForwardMode.DECODE, count=7))

    ((profile, how),) = asked
    assert profile is None
    assert how["or_observe"]
    assert len([record for record in caplog.records if "1.2.0" in record.getMessage()]) == 1
