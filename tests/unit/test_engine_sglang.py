"""SGLang's plug-in, on stand-ins with the names of its public scheduler classes (sglang 0.5)."""

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
        (schedule_batch(ForwardMode.IDLE), 0, None),
        (schedule_batch(ForwardMode.PREBUILT, count=3), 0, None),
    ],
    ids=["prefill", "decode", "mixed", "drafts", "idle", "prebuilt"],
)  # fmt: skip
def test_scheduled_batch(batch: Any, drafts: int, expected: Batch | None) -> None:
    assert batch_of(batch, drafts) == expected


class Noting(Handle):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []

    def on_schedule(self, batch: Batch) -> None:
        self.batches.append(batch)


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
        def __init__(self, server_args: Any) -> None:
            self.server_args = server_args
            self.ran: list[Any] = []
            self.init_model_config()

        def init_model_config(self) -> None:
            fields = {"architectures": ["SomethingNew"]}
            self.model_config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: fields))

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


ARGUMENTS = SimpleNamespace(
    tp_size=4, pp_size=1, dp_size=1, ep_size=1, model_path="/models/x", served_model_name="x",
    chunked_prefill_size=4096, max_prefill_tokens=16384, speculative_num_draft_tokens=None,
)  # fmt: skip
CONTEXT = {
    "get_parallel": lambda: SimpleNamespace(tp_rank=3),
    "get_device": lambda: SimpleNamespace(gpu_id=3),
}


def test_rank_attaches_once_its_configuration_is_read(
    asked: list[tuple[Any, dict[str, Any]]], scheduler_class: Callable[..., Any]
) -> None:
    scheduler_class(**CONTEXT)(ARGUMENTS)

    ((profile, how),) = asked
    assert (profile.model, profile.tp) == ("x", 4)
    assert (how["rank"], how["world"], how["device"], how["max_tokens"]) == (3, 4, 3, 4096)


def test_release_without_a_context_names_rank_and_device_in_the_scheduler(
    asked: list[tuple[Any, dict[str, Any]]], scheduler_class: Callable[..., Any]
) -> None:
    scheduler = scheduler_class()
    scheduler.tp_rank, scheduler.gpu_id = 1, 5
    scheduler(ARGUMENTS)

    assert (asked[0][1]["rank"], asked[0][1]["device"]) == (1, 5)


def test_batch_is_told_before_it_runs_and_its_result_passes(
    asked: list[tuple[Any, dict[str, Any]]], scheduler_class: Callable[..., Any]
) -> None:
    scheduler = scheduler_class(**CONTEXT)(ARGUMENTS)
    batch = schedule_batch(ForwardMode.DECODE, count=7)

    assert scheduler.run_batch(batch) == "result"

    handle = sglang_hooks.seat.handle
    assert isinstance(handle, Noting)
    assert handle.batches == [Batch(tokens=7, decodes=7)]
    assert scheduler.ran == [batch]


def test_batch_that_cannot_be_read_runs_all_the_same(
    asked: list[tuple[Any, dict[str, Any]]], scheduler_class: Callable[..., Any]
) -> None:
    scheduler = scheduler_class(**CONTEXT)(ARGUMENTS)

    assert scheduler.run_batch(object()) == "result"
    assert sglang_hooks.seat.guard.errors == 1


def test_unknown_sglang_is_one_line_and_only_observed(
    asked: list[tuple[Any, dict[str, Any]]],
    scheduler_class: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = scheduler_class("1.2.0", **CONTEXT)(ARGUMENTS)
    scheduler.run_batch(schedule_batch(ForwardMode.DECODE, count=7))

    ((profile, how),) = asked
    assert profile is None
    assert how["or_observe"]
    assert len([record for record in caplog.records if "1.2.0" in record.getMessage()]) == 1
