"""What all ops share: the library, the device's architecture, and tensors that cost next to nothing.

A sweep makes ten thousand calls whose tensors differ in one size. Their contents never matter, since
nothing is computed, so there is one buffer for each (role, type), and a call takes a view of it. The one
subtle rule: shape, strides and type of a view are exactly what an engine passes, because the library picks
its layout kernels from the strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import deep_gemm
import torch

from prefetchd.codec import op_of
from prefetchd.provider import Unavailable
from prefetchd.request import Request
from prefetchd.requests.deep_gemm import DeepGemmRequest

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
FLOAT = torch.float32
INT = torch.int32
# Two FP4 values lie in one byte, and the library knows the pair as int8.
FP4 = torch.int8

Call = Callable[..., Any]
# Takes the driver, the library's public function and the request.
Run = Callable[["Driver", Call, Any], None]
F = TypeVar("F", bound=Callable[..., None])


@dataclass(frozen=True)
class Drive:
    """How requests of one type are run: by which public function, for which architectures (major numbers)."""

    run: Run
    majors: tuple[int, ...]
    names: tuple[str, ...]


DRIVES: dict[type[Request], Drive] = {}


def drives(
    *kinds: type[Request], majors: tuple[int, ...] = (9, 10, 12), other_names: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Registers the function that runs requests of these types; packages may know an op by other names."""

    def register(function: F) -> F:
        for kind in kinds:
            DRIVES[kind] = Drive(function, majors, (op_of(kind), *other_names))
        return function

    return register


class Driver:
    """One traced process's view of the library. Made on first use, after the fork: it initialises CUDA."""

    def __init__(self) -> None:
        self.major, self.minor = torch.cuda.get_device_capability()
        self._ready: dict[type[Request], tuple[Run, Call]] = {}
        self._pools: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._weights: dict[tuple[Any, ...], torch.Tensor] = {}

    def run(self, request: DeepGemmRequest) -> None:
        """Runs the request. Raises `Unavailable` where the library has no such op for this device."""
        kind = type(request)
        ready = self._ready.get(kind)
        if ready is None:
            self._ready[kind] = ready = self._resolve(kind)
        function, call = ready
        if not request.sms:
            function(self, call, request)
            return
        before = deep_gemm.get_num_sms()
        deep_gemm.set_num_sms(request.sms)
        try:
            function(self, call, request)
        finally:
            deep_gemm.set_num_sms(before)

    def _resolve(self, kind: type[Request]) -> tuple[Run, Call]:
        drive = DRIVES.get(kind)
        if drive is None:
            raise Unavailable(f"this provider cannot run {op_of(kind)}")
        call = public(*drive.names)
        if self.major not in drive.majors:
            needed = " and ".join(f"sm_{major}x" for major in drive.majors)
            raise Unavailable(f"{library()} has {op_of(kind)} for {needed}, not for {self.device()}")
        return drive.run, call

    def device(self) -> str:
        """The device's architecture, for messages."""
        return f"sm_{self.major}{self.minor}"

    def tensor(self, role: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A contiguous tensor, a view of the role's buffer: two of one role overlap."""
        return self.strided(role, dtype, shape, contiguous_strides(shape))

    def strided(
        self, role: str, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """As `tensor`, with given strides."""
        needed = 1
        for size, stride in zip(shape, strides, strict=True):
            needed += (size - 1) * stride
        pool = self._pools.get((role, dtype))
        if pool is None or pool.numel() < needed:
            # A power of two, so that an ascending sweep allocates a dozen times and not at every step.
            pool = torch.empty(1 << (needed - 1).bit_length(), dtype=dtype, device="cuda")
            self._pools[role, dtype] = pool
        return pool.as_strided(shape, strides)

    def weight(self, role: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A contiguous tensor that many requests share: the same object each time."""
        key = (role, dtype, shape)
        found = self._weights.get(key)
        if found is None:
            self._weights[key] = found = self.tensor(role, dtype, *shape)
        return found


def public(*names: str) -> Call:
    """The library's public function, by the first of its names that this package knows."""
    for name in names:
        function = getattr(deep_gemm, name, None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise Unavailable(f"{library()} has no {' or '.join(names)}")


def library() -> str:
    """The library in messages: name, version, path."""
    return f"deep_gemm {deep_gemm.__version__} at {deep_gemm.__path__[0]}"


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor; a size of one keeps the stride it would have anyway."""
    strides = [1] * len(shape)
    for index in range(len(shape) - 1, 0, -1):
        strides[index - 1] = strides[index] * shape[index]
    return strides


def ceil_div(value: int, unit: int) -> int:
    """How many units hold the value."""
    return -(-value // unit)


def align(value: int, unit: int) -> int:
    """The value rounded up to whole units."""
    return -(-value // unit) * unit


def given(**arguments: Any) -> dict[str, Any]:
    """The keyword arguments that were set: what is None is left to the library's default."""
    return {name: value for name, value in arguments.items() if value is not None}
