"""torch on the null device: what it sees, what memory does, what is counted, which operators compute."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefetchd.null_device import guard
from prefetchd.null_device.launcher import environment
from prefetchd.targets import Target, load_target

ROOT = Path(__file__).parents[2]


def on_null_device(target: Target, program: str, *, integer_ops: bool = False, **variables: str) -> Any:
    """Runs Python on the null device and returns the JSON that it printed."""
    base = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", f"import json\nimport torch\n{program}"],
        env={**environment(target, base, integer_ops=integer_ops), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def result_of(lines: str) -> str:
    """A program that prints the value of its last line."""
    last = ast.parse(lines).body[-1].lineno - 1
    before, value = lines.splitlines()[:last], lines.splitlines()[last:]
    return "\n".join([*before, "print(json.dumps(", *value, "))"])


@pytest.mark.parametrize("name", ["h200", "b200", "rtx-pro-6000"])
def test_the_device_has_the_targets_properties(name: str) -> None:
    target = load_target(name)

    seen = on_null_device(
        target,
        result_of("""
p = torch.cuda.get_device_properties(0)
[
    p.name, p.major, p.minor, p.multi_processor_count, p.total_memory, p.L2_cache_size,
    p.shared_memory_per_block_optin,
]
"""),
    )

    assert seen == [
        target.name,
        target.major,
        target.minor,
        target.sm_count,
        target.memory_bytes,
        target.l2_bytes,
        target.shared_bytes_per_block_optin,
    ]


def test_tensors_hold_real_bytes() -> None:
    seen = on_null_device(
        load_target("h200"),
        result_of("""
x = torch.zeros(4, device="cuda")
y = torch.arange(1000).cuda()
z = y[10:20].clone()
[x.tolist(), y[5:8].cpu().tolist(), z.tolist(), y.is_cuda, torch.empty(3, pin_memory=True).is_pinned()]
"""),
    )

    assert seen == [[0.0] * 4, [5, 6, 7], list(range(10, 20)), True, True]


def test_memory_is_bounded_by_the_target_and_comes_back() -> None:
    target = load_target("h200")

    seen = on_null_device(
        target,
        result_of("""
GB = 10**9
big = torch.empty(100 * GB, dtype=torch.uint8, device="cuda")
taken = torch.cuda.mem_get_info()[0]
try:
    torch.empty(100 * GB, dtype=torch.uint8, device="cuda")
    refused = False
except torch.OutOfMemoryError:
    refused = True
del big
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
import resource
[taken, refused, free, total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
"""),
    )

    taken, refused, free, total, resident_kb = seen
    assert 0 < target.memory_bytes - 100 * 10**9 - taken < 10**8
    assert refused
    assert total == target.memory_bytes
    assert total - free < 10**8
    assert resident_kb < 3 * 10**6


def test_expandable_segments_work() -> None:
    seen = on_null_device(
        load_target("h200"),
        result_of("""
x = torch.arange(1 << 20).cuda()
free = torch.cuda.mem_get_info()[0]
value = x[-1:].cpu().item()
del x
torch.cuda.empty_cache()
[value, free < torch.cuda.mem_get_info()[0] == torch.cuda.mem_get_info()[1]]
"""),
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )

    assert seen == [(1 << 20) - 1, True]


def test_two_threads_use_the_device_at_once() -> None:
    seen = on_null_device(
        load_target("h200"),
        result_of("""
from threading import Thread
wrong = []
def work(mark):
    with torch.cuda.stream(torch.cuda.Stream()):
        for size in range(1, 300):
            x = torch.full((size * 100,), mark).cuda()
            if int(x[-1:].cpu()) != mark:
                wrong.append(mark)
            del x
        torch.cuda.synchronize()
threads = [Thread(target=work, args=(mark,)) for mark in (1, 2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
wrong
"""),
    )

    assert seen == []


def test_a_graph_is_captured_and_replayed() -> None:
    seen = on_null_device(
        load_target("h200"),
        result_of("""
x = torch.zeros(8, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    inside = torch.cuda.is_current_stream_capturing()
    x + 1
graph.replay()
[inside, torch.cuda.is_current_stream_capturing()]
"""),
    )

    assert seen == [True, False]


def test_matrix_products_do_not_reach_a_real_cublas() -> None:
    seen = on_null_device(
        load_target("b200"),
        result_of("""
a = torch.empty(32, 64, device="cuda", dtype=torch.bfloat16)
w = torch.empty(16, 64, device="cuda", dtype=torch.bfloat16)
bias = torch.empty(16, device="cuda", dtype=torch.bfloat16)
linear = torch.nn.functional.linear(a, w, bias)
batched = torch.bmm(a[None].float(), w.t()[None].float())
torch.cuda.synchronize()
[list(linear.shape), list(batched.shape)]
"""),
    )

    assert seen == [[32, 16], [1, 32, 16]]


def test_what_is_not_answered_is_counted_and_printed(tmp_path: Path) -> None:
    log = tmp_path / "calls"

    seen = on_null_device(
        load_target("h200"),
        result_of("""
import ctypes
shim = ctypes.CDLL("libcuda.so.1")
codes = [shim.cuMulticastCreate(None, None), shim.cuMulticastCreate(None, None)]
text = ctypes.create_string_buffer(4096)
shim.prefetchd_null_calls.restype = ctypes.c_size_t
length = shim.prefetchd_null_calls(text, ctypes.c_size_t(len(text)))
[codes, "cuMulticastCreate 2" in text.value.decode().splitlines()]
"""),
        PREFETCHD_NULL_CALLS=str(log),
    )

    assert seen == [[801, 801], True]
    assert "not supported: cuMulticastCreate, 2 calls" in log.read_text()


def test_torch_and_nvml_map_no_driver_but_ours() -> None:
    seen = on_null_device(
        load_target("h200"),
        result_of("""
from prefetchd.null_device.guard import mapped_drivers, require_null_device
torch.zeros(1, device="cuda")
torch.cuda.device_count()
require_null_device()
mapped_drivers()
"""),
    )

    assert seen == sorted([str(guard.CUDA), str(guard.NVML)])


INDICES = """
import warnings
warnings.simplefilter("ignore")
from fla.ops.utils import prepare_chunk_indices, prepare_chunk_offsets
offsets = torch.tensor([0, 256, 320, 1000, 1001], dtype=torch.int32)
on_device = prepare_chunk_indices(offsets.cuda(), 64)
[
    on_device.is_cuda,
    on_device.tolist() == prepare_chunk_indices(offsets, 64).tolist(),
    prepare_chunk_offsets(offsets.cuda(), 64).tolist() == prepare_chunk_offsets(offsets, 64).tolist(),
]
"""


def test_chunk_indices_are_computed_on_the_device() -> None:
    pytest.importorskip("fla")

    assert on_null_device(load_target("h200"), result_of(INDICES), integer_ops=True) == [True, True, True]


# Each is tried on integer tensors of both devices; the results, their types and shapes must be equal.
EXPRESSIONS = [
    "x + 1",
    "x - y",
    "x * y",
    "x // 3",
    "x % 3",
    "-x",
    "x / 2",
    "(x > 3) & (y < 7)",
    "x.clamp(2, 5)",
    "torch.where(x > 3, x, -1)",
    "x.cumsum(0)",
    "x.sum()",
    "x.max()",
    "x.max(0)",
    "x.sort(descending=True)",
    "x.argsort()",
    "x.topk(3)",
    "x.unique(return_counts=True)",
    "x[x > 2]",
    "x[y % 2]",
    "(x > 2).nonzero()",
    "x.to(torch.int64)",
    "x.view(2, 5).t().contiguous()",
    "torch.cat([x, y])",
    "torch.stack([x, y], 1)",
    "torch.nn.functional.pad(x, (1, 2), value=9)",
    "x.repeat_interleave(y)",
    "torch.arange(2, 9, 3, device=x.device)",
    "torch.full((3,), 4, device=x.device)",
    "torch.zeros_like(x)",
    "torch.ones_like(x)",
    "x.new_empty(4).zero_().add_(5)",
    "x[::2].clone().mul_(2)",
    "torch.searchsorted(y.cumsum(0), x)",
    "x.scatter_add(0, y.long() % 10, x)",
    "x.gather(0, y.long() % 10)",
    "torch.bincount(y)",
    "x.masked_fill(x > 3, 0)",
    "torch.tril(x.view(2, 5))",
    "x.view(2, 5).flip(1)",
    "torch.add(x, y, out=x.new_empty(0))",
    "x.any()",
    "(x == y).all()",
    "x.new_empty(0) + 1",
]

COMPARE = """
def plain(value):
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return [value.is_cuda, str(value.dtype), list(value.shape), value.tolist()]
def run(device):
    x = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], dtype=torch.int32).to(device)
    y = torch.tensor([2, 7, 1, 8, 2, 8, 1, 8, 2, 8], dtype=torch.int32).to(device)
    return {text: plain(eval(text, {"torch": torch, "x": x, "y": y})) for text in EXPRESSIONS}
def without_device(value):
    return [without_device(item) for item in value] if isinstance(value[0], list) else value[1:]
host, device = run("cpu"), run("cuda")
[text for text in EXPRESSIONS if without_device(host[text]) != without_device(device[text])]
"""


def test_small_integer_operators_agree_with_the_cpu() -> None:
    different = on_null_device(
        load_target("h200"), f"EXPRESSIONS = {EXPRESSIONS!r}\n" + result_of(COMPARE), integer_ops=True
    )

    assert different == []


# Floating-point tensors go round the integer operators, which must not change their type, shape or place.
FLOATING = [
    "f + 1",
    "1 - f",
    "f * 0.5",
    "h * 0.5",
    "h.sum() * 0.5",
    "x * 0.5",
    "f / h",
    "f // 2",
    "f ** 2",
    "f.clamp(min=0)",
    "torch.where(f > 0, f, 0.0)",
    "f == 1",
    "f.sum(-1)",
    "f.max(0).indices",
    "f.sort().values",
    "f.to(torch.bfloat16)",
    "f.t().contiguous()",
    "f[x[:2] % 2]",
    "torch.cat([f, f])",
    "torch.full_like(f, 3)",
    "f.masked_fill(f > 0, 1.0)",
    "torch.add(f, f, out=f.new_empty(0))",
    "f.zero_().add_(1).mul_(h.new_ones(()))",
]
SHAPES = """
large = 1 << 21
x = torch.arange(large, device="cuda", dtype=torch.int32)
f = torch.empty(4, 4, device="cuda")
h = torch.empty(4, device="cuda", dtype=torch.float16)
values = [eval(text) for text in FLOATING]
[[str(value.dtype), list(value.shape), value.is_cuda, value.stride()] for value in values]
"""


def test_floating_operators_keep_their_types_and_shapes() -> None:
    program = f"FLOATING = {FLOATING!r}\n" + result_of(SHAPES)

    computing = on_null_device(load_target("h200"), program, integer_ops=True)

    assert computing == on_null_device(load_target("h200"), program)


def test_integer_operators_compute_nothing_unless_asked_for() -> None:
    program = result_of("(torch.tensor([5, 6], dtype=torch.int32).cuda() * 3).tolist()")

    assert on_null_device(load_target("h200"), program) != [15, 18]
    assert on_null_device(load_target("h200"), program, integer_ops=True) == [15, 18]


def test_large_and_floating_tensors_are_left_to_the_null_kernels() -> None:
    seen = on_null_device(
        load_target("h200"),
        result_of("""
large = torch.ones(1 << 21, dtype=torch.int32).cuda()
floating = torch.ones(4).cuda()
[int((large + 1)[0].cpu()), (floating + 1).tolist()]
"""),
        integer_ops=True,
    )

    assert seen == [0, [0.0] * 4]
