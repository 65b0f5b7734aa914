"""Small libraries of CuTe kernels, written as real ones are, for the tests of the CuTe compiler.

Three ways of keeping compiled kernels occur: a function under `functools.cache` whose arguments are the key,
with fake tensors and TVM-FFI (`scale`); a module's dict with TVM-FFI and static sizes in the key, as cuLA has
it (`kda_decode`); a module's dict of the DSL's own functions, compiled from the first call's tensors, whose
key says whether all sequences are whole chunks, as TensorRT-LLM has it (`kda_prefill`).

The DSL reads annotations itself, and 4.4 does not read them as text: so none are postponed here, and a
kernel's functions have those that the DSL knows and no others.
"""
# ruff: noqa: ANN001, ANN201, ANN202

import functools
import sys
from importlib import import_module
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream

CHUNK = 64
THREADS = 128
CUTE = {torch.float32: cutlass.Float32, torch.bfloat16: cutlass.BFloat16}


# A function under functools.cache.


@cute.kernel
def _scale_kernel(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, factor: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < n:
        y[i] = (x[i] * factor).to(y.element_type)


@cute.jit
def _scale_host(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, factor: cutlass.Constexpr, stream):
    blocks = (n + THREADS - 1) // THREADS
    _scale_kernel(x, y, n, factor).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


@functools.cache
def compile_scale(dtype: torch.dtype, factor: float = 2.0):
    n = cute.sym_int()
    x, y = (make_fake_compact_tensor(CUTE[dtype], (n,)) for _ in range(2))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(_scale_host, x, y, cutlass.Int32(1), factor, stream, options="--enable-tvm-ffi")


def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    y = torch.empty_like(x)
    compile_scale(x.dtype, factor)(x, y, x.numel())
    return y


# A dict, with TVM-FFI: one step of the recurrence for each sequence, its state in a pool.

decode_cache: dict[Any, Any] = {}


@cute.kernel
def _decode_kernel(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    gate: cute.Tensor,
    beta: cute.Tensor,
    pool: cute.Tensor,
    slots: cute.Tensor,
    o: cute.Tensor,
    key_dim: cutlass.Constexpr,
    value_dim: cutlass.Constexpr,
    heads: cutlass.Constexpr,
    scaling: cutlass.Constexpr,
):
    # One thread a value channel: S is decayed by channel of the key, corrected by what it gets wrong of v.
    column, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    n = block // heads
    h = block % heads
    slot = slots[n]
    if column < value_dim:
        predicted = cutlass.Float32(0.0)
        for i in range(key_dim):
            decayed = pool[slot, h, i, column] * cute.math.exp(gate[n, h, i])
            pool[slot, h, i, column] = decayed
            predicted = predicted + decayed * k[n, h, i]
        correction = beta[n, h] * (v[n, h, column] - predicted)
        out = cutlass.Float32(0.0)
        for i in range(key_dim):
            updated = pool[slot, h, i, column] + k[n, h, i] * correction
            pool[slot, h, i, column] = updated
            out = out + updated * q[n, h, i]
        o[n, h, column] = out * scaling


@cute.jit
def _decode_host(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    gate: cute.Tensor,
    beta: cute.Tensor,
    pool: cute.Tensor,
    slots: cute.Tensor,
    o: cute.Tensor,
    sequences: cutlass.Constexpr,
    heads: cutlass.Constexpr,
    key_dim: cutlass.Constexpr,
    value_dim: cutlass.Constexpr,
    scaling: cutlass.Constexpr,
    stream,
):
    _decode_kernel(q, k, v, gate, beta, pool, slots, o, key_dim, value_dim, heads, scaling).launch(
        grid=[sequences * heads, 1, 1], block=[value_dim, 1, 1], stream=stream
    )


def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """One token a sequence: q, k, gate [N, H, K], v [N, H, V], beta [N, H], pool [S, H, K, V], in place."""
    sequences, heads, key_dim = q.shape
    value_dim, size = v.shape[2], pool.shape[0]
    o = torch.empty_like(v)
    key = (sequences, heads, key_dim, value_dim, size, q.dtype, key_dim**-0.5)
    if key not in decode_cache:
        decode_cache[key] = _compile_decode(sequences, heads, key_dim, value_dim, size)
    decode_cache[key](q, k, v, gate, beta, pool, slots, o)
    return o


def _compile_decode(sequences: int, heads: int, key_dim: int, value_dim: int, size: int):
    def fake(*shape: int, dtype=cutlass.Float32):
        return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))))

    keys, values = (sequences, heads, key_dim), (sequences, heads, value_dim)
    return cute.compile(
        _decode_host,
        fake(*keys),
        fake(*keys),
        fake(*values),
        fake(*keys),
        fake(sequences, heads),
        fake(size, heads, key_dim, value_dim),
        fake(sequences, dtype=cutlass.Int32),
        fake(*values),
        sequences,
        heads,
        key_dim,
        value_dim,
        key_dim**-0.5,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


# A dict without TVM-FFI, keyed by the device's number and by alignment; shapes of the first call are baked in
# only where the key holds them.

prefill_cache: dict[Any, Any] = {}


@cute.kernel
def _prefill_kernel(q: cute.Tensor, o: cute.Tensor, count: cutlass.Int32, aligned: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * CHUNK + thread
    if cutlass.const_expr(aligned):
        o[i] = q[i] + q[i]
    else:
        if i < count:
            o[i] = q[i] + q[i]


def kda_prefill(
    q: torch.Tensor,
    lengths: list[int] | tuple[int, ...] = (),
    varlen_is_aligned: bool | None = None,
    state_pool: torch.Tensor | None = None,
) -> torch.Tensor:
    """Doubles q [T]; whether every length is a whole chunk, or one sequence is all, is part of the key."""
    aligned = varlen_is_aligned
    if aligned is None:
        aligned = all(length % CHUNK == 0 for length in lengths) or len(lengths) == 1
    device = q.device.index or 0
    layout = None if state_pool is None else (state_pool.dtype, tuple(state_pool.shape), state_pool.stride())
    key = (1, True, device, bool(aligned), q.dtype, -1, layout)
    o = torch.empty_like(q)
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    arguments = (
        from_dlpack(q).mark_layout_dynamic(),
        from_dlpack(o).mark_layout_dynamic(),
        cutlass.Int32(q.numel()),
    )
    compiled = prefill_cache.get(key)
    if compiled is None:
        compiled = cute.compile(_prefill_host(bool(aligned)), *arguments, stream)
        prefill_cache[key] = compiled
    compiled(*arguments, stream)
    return o


def _prefill_host(aligned: bool):
    """The host function of one variant, as a closure."""

    @cute.jit
    def host(q: cute.Tensor, o: cute.Tensor, count: cutlass.Int32, stream: driver.CUstream):
        blocks = (count + CHUNK - 1) // CHUNK
        _prefill_kernel(q, o, count, aligned).launch(grid=[blocks, 1, 1], block=[CHUNK, 1, 1], stream=stream)

    return host


def decode_tensors(
    sequences: int = 4, heads: int = 2, dim: int = 32, size: int = 8
) -> dict[str, torch.Tensor]:
    """The arguments of `kda_decode`."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float32, device="cuda")

    keys = (sequences, heads, dim)
    return {
        "q": rand(*keys),
        "k": rand(*keys) / dim,
        "v": rand(*keys),
        "gate": -rand(*keys),
        "beta": rand(sequences, heads),
        "pool": rand(size, heads, dim, dim),
        "slots": torch.arange(sequences, dtype=torch.int32, device="cuda"),
    }


def run(what: str) -> None:
    """One call by name, with the arguments of an engine."""
    if what == "scale":
        scale(torch.zeros(1000, device="cuda"), 3.0)
    elif what == "scale.bfloat16":
        scale(torch.zeros(10, dtype=torch.bfloat16, device="cuda"))
    elif what == "decode":
        kda_decode(**decode_tensors())
    elif what.startswith("prefill"):
        lengths = (128, 64) if what == "prefill.aligned" else (100, 28)
        tokens = torch.zeros(sum(lengths), device="cuda")
        kda_prefill(tokens, lengths, state_pool=torch.zeros(8, 2, 16, 16, device="cuda"))
    elif what.startswith("owned"):
        import_module("cute_owned").run(what)
    else:
        sys.exit(f"no call {what!r}")


CALLS = ("scale", "scale.bfloat16", "decode", "prefill.aligned", "prefill.ragged")


# The same under the names that requests have, with the arguments of the libraries they imitate.


def chunk_kda(
    q: torch.Tensor,
    state_pool: torch.Tensor,
    varlen_is_aligned: bool | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """As TensorRT-LLM's operator: alignment is a hint, the pool's layout is part of the key."""
    return kda_prefill(q.flatten(), (), varlen_is_aligned, state_pool)


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """As cuLA's decode: the number of sequences and the pool's size are part of the key."""
    return kda_decode(q, k, v, gate, beta, pool, slots)
