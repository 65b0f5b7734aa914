"""Small integer operators that really compute on the null device.

Null kernels compute nothing, yet libraries read some results back on the host: fla counts chunks from
sequence offsets that lie on the device. Those results are made by a few ATen operators on small integer
tensors, and the null device's memory is ordinary host memory. So the CUDA kernels of these operators are
replaced by ones that run the CPU operator on the very same bytes when every tensor is a small integer or
boolean one, and call the original otherwise. Nothing else is touched: an operator that is not listed here
costs what it did.

Loaded by its file in interpreters that lack prefetchd, so it imports only torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Elements of all tensors of one call together. Index arithmetic is far below; a larger one is data, and
# computing it on the CPU would take the time that a trace has for hundreds of calls.
SMALL = 1 << 20

DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

# Each with all of its overloads that have a kernel of their own on CUDA; in-place and out forms are
# overloads or names of their own.
OPERATORS = (
    "add add_ sub sub_ mul mul_ div div_ floor_divide floor_divide_ remainder remainder_ fmod neg abs "
    "sign pow bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift "
    "__lshift__ __rshift__ logical_and logical_or logical_not logical_xor eq ne lt le gt ge minimum "
    "maximum clamp clamp_ clamp_min clamp_max where cumsum cumsum_ cumprod sum prod max min amax amin "
    "argmax argmin any all aminmax fill_ zero_ copy_ arange cat flip roll tril triu sort topk "
    "unique_consecutive _unique2 unique_dim nonzero index index_select gather scatter scatter_ "
    "scatter_add scatter_add_ index_add index_add_ index_fill_ _index_put_impl_ masked_fill "
    "masked_fill_ masked_select take searchsorted bucketize bincount histc isin repeat_interleave "
)

_library: torch.library.Library | None = None


def install() -> None:
    """Replaces the kernels, once in a process."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    for overload in _overloads():
        kernel = torch.library.get_kernel(overload, "CUDA")
        _library.impl(overload, _replacement(overload, kernel), "CUDA", with_keyset=True, allow_override=True)


def _overloads() -> Iterator[torch._ops.OpOverload]:
    with_kernel = {
        name
        for key in ("CUDA", "CompositeExplicitAutograd")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
    }
    for name in OPERATORS.split():
        packet = getattr(torch.ops.aten, name, None)
        for overload_name in packet.overloads() if packet is not None else ():
            suffix = "" if overload_name == "default" else f".{overload_name}"
            if f"aten::{name}{suffix}" not in with_kernel:
                continue
            overload = getattr(packet, overload_name)
            # One without tensors, such as plain arange, ends in an overload that has some.
            if any("Tensor" in str(argument.type) for argument in overload._schema.arguments):
                yield overload


def _replacement(overload: torch._ops.OpOverload, kernel: Any) -> Callable[..., Any]:
    outputs = {argument.name for argument in overload._schema.arguments if argument.is_out}
    writes_first = any(
        argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
        for argument in overload._schema.arguments[:1]
    )

    tensor_positions = [
        position
        for position, argument in enumerate(overload._schema.arguments)
        if isinstance(argument.type, torch._C.TensorType)
    ]

    def run(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        device = _device_if_small_integers((*args, *kwargs.values()))
        if device is None:
            return kernel.call_boxed(keys, *_with_tensors_for_numbers(args, tensor_positions), **kwargs)
        fresh = {name: torch.empty(0, dtype=kwargs[name].dtype) for name in outputs & kwargs.keys()}
        host = {name: fresh.get(name, value) for name, value in kwargs.items()}
        result = overload(*_on_host(args), **_on_host(host))
        if writes_first:
            return args[0]
        if fresh:
            for name, value in fresh.items():
                _bytes_of(kwargs[name].resize_(value.shape)).copy_(value)
            filled = tuple(
                kwargs[argument.name] for argument in overload._schema.arguments if argument.is_out
            )
            return filled[0] if len(filled) == 1 else filled
        return _on_device(result, device)

    return run


def _with_tensors_for_numbers(args: tuple[Any, ...], tensor_positions: list[int]) -> tuple[Any, ...]:
    """The arguments for a boxed call, which takes no number where the schema has a tensor.

    A number reaches us unwrapped from the tensor that the dispatcher had made of it. A tensor of the result's
    type in its place leaves that type, and so everything but the value, as it would have been.
    """
    numbers = [
        position
        for position in tensor_positions
        if position < len(args) and isinstance(args[position], (int, float, complex))
    ]
    if not numbers:
        return args
    tensor = next((value for value in args if isinstance(value, torch.Tensor)), torch.empty(()))
    changed = list(args)
    for position in numbers:
        number = args[position]
        changed[position] = torch.scalar_tensor(number, dtype=torch.result_type(tensor, number))
    return tuple(changed)


def _device_if_small_integers(values: tuple[Any, ...]) -> torch.device | None:
    """The CUDA device of the call, or None when one of its tensors is not a small integer one."""
    device = None
    elements = 0
    for value in values:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.is_cuda:
                if tensor.dtype not in DTYPES:
                    return None
                device = tensor.device
            elements += tensor.numel()
            if elements > SMALL:
                return None
    return device


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _bytes_of(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    if isinstance(value, dict):
        return {name: _on_host(item) for name, item in value.items()}
    return value


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        copy = torch.empty(value.shape, dtype=value.dtype, device=device)
        _bytes_of(copy).copy_(value)
        return copy
    if isinstance(value, (list, tuple)):
        return tuple(_on_device(item, device) for item in value)
    return value


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes; it must not outlive the call."""
    if tensor.is_contiguous() and (elements := tensor.numel()):
        memory = (ctypes.c_char * (elements * tensor.element_size())).from_address(tensor.data_ptr())
        flat = torch.frombuffer(memory, dtype=tensor.dtype)
        return flat if tensor.dim() == 1 else flat.view(tensor.shape)
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.element_size()
    if not size:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=size)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
