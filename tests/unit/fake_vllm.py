"""A vLLM of a few lines, laid out like the real one, with the functions that the plug-in hooks."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass
class NewRequest:
    req_id: str


@dataclass
class CachedRequests:
    req_ids: list[str] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def prefill(**lengths: int) -> SchedulerOutput:
    """Requests that are scheduled for the first time."""
    return SchedulerOutput(dict(lengths), [NewRequest(name) for name in lengths])


def caches(blocks: int, *, states: bool = True) -> Any:
    """What the plug-in reads of a `KVCacheConfig`."""
    return SimpleNamespace(num_blocks=blocks, has_mamba_layers=states)


class Scheduler:
    def __init__(self) -> None:
        self.kv_cache_config = caches(7)
        self.outputs = [prefill(a=64), prefill(b=3)]

    def schedule(self) -> SchedulerOutput:
        return self.outputs.pop(0)


class Worker:
    rank = 2

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.parallel_config, self.scheduler_config = config.parallel_config, config.scheduler_config
        self.device = SimpleNamespace(index=1)
        self.model_runner = SimpleNamespace()
        self.done: list[str] = []

    def load_model(self, *, load_dummy_weights: bool = False) -> str:
        self.done.append(f"load dummy={load_dummy_weights}")
        return "loaded"

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.model_runner.kv_cache_config = kv_cache_config

    def compile_or_warm_up_model(self) -> str:
        sys.modules["vllm.v1.worker.gpu_worker"].kernel_warmup(self)
        if self.vllm_config.kernel_config.enable_jit_warmup:
            self.done.append("buffers sized")
        self._maybe_activate_jit_monitor()
        return "warm"

    def _maybe_activate_jit_monitor(self) -> None:
        self.done.append("monitor")

    def get_model(self) -> Any:
        return SimpleNamespace(named_modules=lambda: iter(()), modules=lambda: iter(()))


def kernel_warmup(worker: Any) -> None:
    """The passes, as far as the plug-in has to do with them."""
    if worker.vllm_config.kernel_config.enable_jit_warmup:
        worker.done.append("jit pass")
        worker.jit_pass()
    worker.done.append(f"deep_gemm {sys.modules['vllm.envs'].VLLM_DEEP_GEMM_WARMUP}")


class Executor:
    """Of workers that are processes of their own; one that answers an exception raises it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers

    def collective_rpc(self, method: str) -> list[Any]:
        assert method == "prefetchd_profile"
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
        return list(self.answers)


class EngineCore:
    def __init__(self, config: Any, *answers: Any) -> None:
        self.vllm_config = config
        self.scheduler = Scheduler()
        self.model_executor = Executor(*answers)


class HfConfig:
    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def to_dict(self) -> dict[str, Any]:
        return self._fields


def config_of(fields: dict[str, Any], **parallel: Any) -> Any:
    """What the plug-in reads of a `VllmConfig`."""
    sizes = {"tensor_parallel_size": 1, "data_parallel_size": 1, "data_parallel_rank": 0, "world_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(enable_expert_parallel=False, **{**sizes, **parallel}),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        observability_config=SimpleNamespace(jit_monitor_mode="warn"),
        compute_hash=lambda: "hash",
        model_config=SimpleNamespace(
            hf_config=HfConfig(fields),
            architectures=fields["architectures"],
            served_model_name="tiny",
            model="/models/tiny",
        ),
    )


def install(monkeypatch: pytest.MonkeyPatch, *, without: str = "") -> tuple[ModuleType, ModuleType]:
    """Puts fresh copies of the fake modules where the real ones would be; returns worker's and core's."""
    modules = {
        name: ModuleType(name)
        for name in (
            "vllm",
            "vllm.envs",
            "vllm.v1",
            "vllm.v1.engine",
            "vllm.v1.engine.core",
            "vllm.v1.worker",
            "vllm.v1.worker.gpu_worker",
            "vllm.model_executor",
            "vllm.model_executor.warmup",
            "vllm.model_executor.warmup.deep_gemm_warmup",
        )
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    envs: Any = modules["vllm.envs"]
    envs.VLLM_CACHE_ROOT = "/caches/vllm"
    # Read once and kept, as in each worker that is a process of its own.
    envs.__getattr__ = functools.cache(lambda name: os.environ.get(name, "full"))
    assert envs.VLLM_DEEP_GEMM_WARMUP
    warmup: Any = modules["vllm.model_executor.warmup.deep_gemm_warmup"]
    warmup._deep_gemm_linear_data = lambda module: None
    warmup._fused_moe_grouped_gemm_may_use_deep_gemm = lambda module: False
    warmup._mega_moe_may_use_deep_gemm = lambda module: False
    worker, core = modules["vllm.v1.worker.gpu_worker"], modules["vllm.v1.engine.core"]
    methods = {name: value for name, value in vars(Worker).items() if name != without}
    worker.Worker = type("Worker", (), methods)  # type: ignore[attr-defined]
    if without != "kernel_warmup":
        worker.kernel_warmup = kernel_warmup  # type: ignore[attr-defined]
    core.EngineCore = type("EngineCore", (), dict(vars(EngineCore)))  # type: ignore[attr-defined]
    return worker, core
